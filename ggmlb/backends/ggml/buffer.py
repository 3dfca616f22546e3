"""Buffers and buffer types of ggml's devices."""

from __future__ import annotations

import ctypes
import sys
import weakref
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ggmlb.core.dtypes import DType
from ggmlb.core.enums import BufferUsage
from ggmlb.core.tensor import Tensor
from ggmlb.interface import Buffer, BufferType
from ggmlb.interface.data import Bytes, Pieces

if TYPE_CHECKING:
    from ggmlb.backends.ggml.device import GgmlDevice

_USAGES: Final = {BufferUsage.ANY: 0, BufferUsage.WEIGHTS: 1, BufferUsage.COMPUTE: 2}

WORD: Final = 4
"""Bytes that ggml's Vulkan fills at a time; its memset ignores a partial word."""


class GgmlBufferType(BufferType):
    """A buffer type of a ggml device (`ggml_backend_buffer_type_t`).

    Attributes:
        handle: The C buffer type.
    """

    device: GgmlDevice

    def __init__(self, device: GgmlDevice, handle: int) -> None:
        self.handle = handle
        c = self._c = device.library.load()
        name = c["backend_buft_name"](handle).decode(errors="replace")
        super().__init__(device, device.library.prefix + name, c["backend_buft_get_alignment"](handle))
        self._max_size: int = min(c["backend_buft_get_max_size"](handle), sys.maxsize)
        self._is_host = bool(c["backend_buft_is_host"](handle))
        self._has_sizes = device.library.has_slot(handle, "buffer_type", "get_alloc_size")

    @property
    def max_size(self) -> int:
        """Largest buffer [bytes]."""
        return self._max_size

    @property
    def is_host(self) -> bool:
        """Whether ggml says that this is host memory."""
        return self._is_host

    def alloc_size(self, tensor: Tensor) -> int:
        """Return ggml's allocation size of the tensor [bytes]."""
        if not self._has_sizes:
            return tensor.nbytes
        library = self.device.library
        memory = library.room(1)
        library.pack(memory, 0, tensor, (0, 0, 0))
        nbytes: int = self._c["backend_buft_get_alloc_size"](self.handle, ctypes.addressof(memory))
        return max(tensor.nbytes, nbytes)

    def _alloc_buffer(self, nbytes: int) -> Buffer:
        self.device.free_dropped()
        size = -(-nbytes // self.alignment) * self.alignment  # whole words
        handle = self._c["backend_buft_alloc_buffer"](self.handle, size)
        if not handle:
            raise self.out_of_memory(nbytes)
        return self._buffer(nbytes, handle)

    def _buffer(self, nbytes: int, handle: int) -> GgmlBuffer:
        return GgmlBuffer(self, nbytes, handle)


class GgmlBuffer(Buffer):
    """A buffer of a ggml device (`ggml_backend_buffer_t`).

    Attributes:
        handle: The C buffer.
        address: ggml's base pointer; an address of this process only in host memory.
    """

    buft: GgmlBufferType

    def __init__(self, buft: GgmlBufferType, size: int, handle: int) -> None:
        super().__init__(buft, size)
        device = buft.device
        self.handle = handle
        self._library, self._c = device.library, device.library.load()
        self.address: int = (self._c["backend_buffer_get_base"](handle) or 0) if size else 0
        self._prepares = device.library.has_slot(handle, "buffer", "init_tensor")
        self._extras: weakref.WeakKeyDictionary[Tensor, int] = weakref.WeakKeyDictionary()
        # Arrays over host memory keep it allocated even after the buffer is freed.
        memory: Any = (ctypes.c_ubyte * size).from_address(self.address) if self.is_host and size else None
        self._base = np.empty(0, np.uint8) if memory is None else np.frombuffer(memory, np.uint8)
        self._end = weakref.finalize(self if memory is None else memory, device.drop, handle)
        self._end.atexit = False

    @property
    def base(self) -> Bytes:
        """The memory as a flat byte array; empty for device memory."""
        return self._base

    @property
    def prepares_tensors(self) -> bool:
        """Whether placing a tensor calls ggml's `init_tensor`; not in compute buffers, where plans do."""
        return self._prepares and self._usage is not BufferUsage.COMPUTE

    def c_tensor(self, tensor: Tensor) -> ctypes.Array[ctypes.c_char]:
        """Return a `ggml_tensor` for a tensor in this buffer, for ggml's transfer functions."""
        memory = self._library.room(1)
        extra = self._extras.get(tensor, 0)
        self._library.pack(memory, 0, tensor, (self.handle, self.address + tensor.offset, extra))
        return memory

    def extra(self, tensor: Tensor) -> int | None:
        """Return a tensor's pointer `ggml_tensor.extra`; `None` if `init_tensor` must still set it."""
        return self._extras.get(tensor, None if self._prepares else 0)

    def _init_tensor(self, tensor: Tensor) -> None:
        if self.prepares_tensors and tensor.view_src is None:
            memory = self.c_tensor(tensor)
            self._c["backend_buffer_init_tensor"](self.handle, ctypes.addressof(memory))
            self._extras[tensor] = self._library.extra(memory)

    def _set_tensor(self, tensor: Tensor, data: Bytes, offset: int) -> None:
        memory = self.c_tensor(tensor)
        self._c["backend_tensor_set"](ctypes.addressof(memory), data.ctypes.data, offset, data.size)

    def _get_tensor(self, tensor: Tensor, out: Bytes, offset: int) -> None:
        memory = self.c_tensor(tensor)
        self._c["backend_tensor_get"](ctypes.addressof(memory), out.ctypes.data, offset, out.size)

    def _memset_tensor(self, tensor: Tensor, value: int, offset: int, size: int) -> None:
        if (tensor.offset + offset) % WORD or size % WORD:
            self._set_tensor(tensor, np.full(size, value, np.uint8), offset)
            return
        memory = self.c_tensor(tensor)
        self._c["backend_tensor_memset"](ctypes.addressof(memory), value, offset, size)

    def _set_tensor_2d(self, tensor: Tensor, data: Bytes, pieces: Pieces) -> None:
        self._move_2d("backend_tensor_set_2d", tensor, data, pieces, super()._set_tensor_2d)

    def _get_tensor_2d(self, tensor: Tensor, out: Bytes, pieces: Pieces) -> None:
        self._move_2d("backend_tensor_get_2d", tensor, out, pieces, super()._get_tensor_2d)

    def _move_2d(self, name: str, tensor: Tensor, data: Bytes, pieces: Pieces, by_pieces: Any) -> None:
        if name not in self._c:
            by_pieces(tensor, data, pieces)
            return
        memory = self.c_tensor(tensor)
        self._c[name](ctypes.addressof(memory), data.ctypes.data, *pieces)

    def _cpy_tensor(self, src: Tensor, dst: Tensor) -> bool:
        if not isinstance(src.buffer, GgmlBuffer) or src.buffer._library is not self._library:
            return False
        source, target = src.buffer.c_tensor(src), self.c_tensor(dst)
        self._c["backend_tensor_copy"](ctypes.addressof(source), ctypes.addressof(target))
        return True

    def _clear(self, value: int) -> None:
        # ggml's Vulkan (0.25) fills 32-bit words with the value, not bytes; its memset is right.
        size = -(-self.size // WORD) * WORD
        everything = Tensor(DType.I8, (size, 1, 1, 1))
        memory = self.c_tensor(everything)
        self._c["backend_tensor_memset"](ctypes.addressof(memory), value, 0, size)

    def _set_usage(self, usage: BufferUsage) -> None:
        self._c["backend_buffer_set_usage"](self.handle, _USAGES[usage])

    def _free(self) -> None:
        if self.is_host:
            self._base = np.empty(0, np.uint8)
        else:
            self._end()
        self.buft.device.free_dropped()
