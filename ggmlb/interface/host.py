"""Buffers in host memory: NumPy byte arrays, allocated here or given by the caller."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from ggmlb.core.tensor import Tensor
from ggmlb.interface.buffer import Buffer
from ggmlb.interface.buffer_type import BufferType

if TYPE_CHECKING:
    from ggmlb.interface.data import Bytes

ALIGNMENT: Final = 64
"""Alignment of host memory [bytes]: a cache line, and the widest vector register."""

MAPPED_ALIGNMENT: Final = 32
"""Alignment of tensors in a caller's memory [bytes]: ggml's TENSOR_ALIGNMENT, GGUF's default."""


def aligned_empty(nbytes: int, alignment: int = ALIGNMENT) -> Bytes:
    """Return `nbytes` of fresh memory that begins at a multiple of `alignment` [bytes].

    Raises:
        MemoryError: There is not enough memory.
        ValueError: The size exceeds the range of array indices.
    """
    memory = np.empty(nbytes + alignment, np.uint8)
    start = -memory.ctypes.data % alignment
    return memory[start : start + nbytes]


def allocate(buft: BufferType, nbytes: int) -> Bytes:
    """Allocate `nbytes` of host memory for a buffer of type `buft`, at the type's alignment.

    Raises:
        AllocationError: The system lacks room.
    """
    try:
        return aligned_empty(nbytes, buft.alignment)
    except (MemoryError, ValueError) as error:
        raise buft.out_of_memory(nbytes, str(error)) from None


class HostBufferType(BufferType):
    """A buffer type of host memory."""

    @property
    def is_host(self) -> bool:
        """True, because NumPy reads and writes host memory."""
        return True

    def _alloc_buffer(self, nbytes: int) -> Buffer:
        return HostBuffer(self, allocate(self, nbytes))


class HostBuffer(Buffer):
    """A buffer over a NumPy array of host memory; read-only if the array is.

    The memory stays allocated while any NumPy view of it exists, also after `free`.
    """

    def __init__(self, buft: BufferType, memory: Bytes) -> None:
        super().__init__(buft, memory.size)
        self._base = memory
        self.is_read_only = not memory.flags.writeable

    @property
    def base(self) -> Bytes:
        """The memory as a flat uint8 array."""
        return self._base

    def _set_tensor(self, tensor: Tensor, data: Bytes, offset: int) -> None:
        start = tensor.offset + offset
        self._base[start : start + data.size] = data

    def _get_tensor(self, tensor: Tensor, out: Bytes, offset: int) -> None:
        start = tensor.offset + offset
        out[:] = self._base[start : start + out.size]

    def _memset_tensor(self, tensor: Tensor, value: int, offset: int, size: int) -> None:
        start = tensor.offset + offset
        self._base[start : start + size] = value

    def _clear(self, value: int) -> None:
        self._base[:] = value

    def _cpy_tensor(self, src: Tensor, dst: Tensor) -> bool:
        if src.buffer is None or not src.buffer.is_host:
            return False
        source = src.buffer.base[src.offset : src.offset + src.nbytes]
        self._base[dst.offset : dst.offset + dst.nbytes] = source
        return True

    def _free(self) -> None:
        self._base = np.empty(0, np.uint8)
