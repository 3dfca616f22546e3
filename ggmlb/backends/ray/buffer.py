"""Buffers and buffer types of a device of another machine."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ggmlb.backends.ray.link import CHUNK, MemoryRange
from ggmlb.backends.ray.node import APART, Stored
from ggmlb.backends.ray.wire import NONE, Records, node_record
from ggmlb.core.dtypes import DType
from ggmlb.core.enums import BufferUsage
from ggmlb.core.errors import readable_size
from ggmlb.core.tensor import Ne, Tensor
from ggmlb.interface import Buffer, BufferType
from ggmlb.interface.data import Bytes, Pieces

if TYPE_CHECKING:
    from ggmlb.backends.ray.device import RayDevice
    from ggmlb.backends.ray.link import Link


class RayBufferType(BufferType):
    """A buffer type of a device of another machine.

    Attributes:
        is_plain: Whether tensors are stored in their own layout; else the machine is queried for it, once
            per type and shape.
    """

    device: RayDevice

    def __init__(self, device: RayDevice, number: int, facts: Mapping[str, Any]) -> None:
        name = f"{device.name}/{facts['name']}" if number else device.name
        super().__init__(device, name, facts["alignment"])
        self._number = number
        self._max_size: int = facts["max_size"]
        self.is_plain: bool = facts["is_plain"]
        self._stored: dict[Records, Stored] = {}

    @property
    def max_size(self) -> int:
        """Largest remote buffer [bytes]."""
        return self._max_size

    def alloc_size(self, tensor: Tensor) -> int:
        """Size of the tensor in remote memory [bytes]."""
        return tensor.nbytes if self.is_plain else self._of(tensor).nbytes

    def suits(self, tensor: Tensor) -> bool:
        """Whether matrix products with this weight are faster from this memory."""
        return self.is_plain or self._of(tensor).suits

    def is_readable(self, tensor: Tensor) -> bool:
        """Whether the bytes of the tensor can be read back."""
        return self.is_plain or self._of(tensor).is_readable

    def stored_layout(self, tensor: Tensor) -> tuple[DType, Ne]:
        """Type and byte strides with which the buffer type stores the tensor."""
        return (tensor.dtype, tensor.nb) if self.is_plain else self._of(tensor)[1:3]

    def packing(self, tensor: Tensor) -> str:
        """Name of the order in which the tensor is repacked; empty if it is not."""
        return "" if self.is_plain else self._of(tensor).packing

    def _of(self, tensor: Tensor) -> Stored:
        record = node_record(tensor)
        if record not in self._stored:
            self._stored[record] = self.device.link.ask(
                "stores", self.device.remote_name, self._number, record
            )
        return self._stored[record]

    def _alloc_buffer(self, nbytes: int) -> Buffer:
        handle = self.device.link.ask("alloc", self.device.remote_name, self._number, nbytes)
        return (RayBuffer if self.is_plain else RayStoringBuffer)(self, handle, nbytes)


class RayBuffer(Buffer):
    """A buffer on another machine, identified by a handle.

    Small writes are batched; the next command that waits raises their errors.

    Attributes:
        link: The connection to the machine.
        handle: The remote buffer's handle.
        piece: Size into which larger transfers are split [bytes].
    """

    buft: RayBufferType
    piece = CHUNK

    def __init__(self, buft: RayBufferType, handle: int, nbytes: int) -> None:
        super().__init__(buft, nbytes)
        self.link = buft.device.link
        self.handle = handle
        self.link.sizes[handle] = nbytes
        self._n_taken = 0
        self._release = weakref.finalize(self, _release, self.link, handle)
        self._release.atexit = False

    @property
    def base(self) -> int:
        """The remote buffer's handle."""
        return self.handle

    def span(self, tensor: Tensor, offset: int = 0, nbytes: int | None = None) -> MemoryRange:
        """Return the address range of `nbytes` of a tensor (default: all) on the remote machine."""
        return MemoryRange(self.handle, tensor.offset + offset, tensor.nbytes if nbytes is None else nbytes)

    def queue_write(self, tensor: Tensor, data: Bytes, offset: int) -> None:
        """Queue a write of `data` to a tensor, `offset` bytes in; `data` must not change until it is sent."""
        for start in range(0, data.nbytes, self.piece):
            piece = data[start : start + self.piece]
            self.link.write(self.span(tensor, offset + start, piece.nbytes), piece)

    def queue_read(self, tensor: Tensor, out: Bytes, offset: int) -> None:
        """Queue a read from a tensor, `offset` bytes in, into `out`, filled when the call is done."""
        for start in range(0, out.nbytes, self.piece):
            piece = out[start : start + self.piece]
            self.link.read(self.span(tensor, offset + start, piece.nbytes), piece)

    def _set_tensor(self, tensor: Tensor, data: Bytes, offset: int) -> None:
        if data.nbytes < APART:
            self.queue_write(tensor, data.copy(), offset)
            return
        part = self.link.files.part_of(data)
        for start in range(0, data.nbytes, self.piece):
            piece = data[start : start + self.piece]
            self._show_progress(piece.nbytes)
            if part is None:
                self.queue_write(tensor, piece, offset + start)
            else:
                span = self.span(tensor, offset + start, piece.nbytes)
                self.link.queue("load", *span, *part._replace(offset=part.offset + start))
                self.link.flush()
        self.link.settle()

    def _show_progress(self, nbytes: int) -> None:
        """Show the progress of an upload, if it takes long."""
        if self._n_taken + nbytes > self.size:
            self._n_taken = 0  # a new upload
        self._n_taken += nbytes
        self.link.show_progress(f"{readable_size(self._n_taken)} of {readable_size(self.size)}")

    def _get_tensor(self, tensor: Tensor, out: Bytes, offset: int) -> None:
        self.queue_read(tensor, out, offset)
        self.link.settle()

    def _get_tensor_2d(self, tensor: Tensor, out: Bytes, pieces: Pieces) -> None:
        for piece, start in pieces.cut(out):
            self.queue_read(tensor, piece, start)
        self.link.settle()

    def _memset_tensor(self, tensor: Tensor, value: int, offset: int, size: int) -> None:
        self.link.queue("fill", *self.span(tensor, offset, size), value)

    def _clear(self, value: int) -> None:
        self.link.queue("clear", self.handle, value)

    def _cpy_tensor(self, src: Tensor, dst: Tensor) -> bool:
        return queue_copy(src, dst)

    def _set_usage(self, usage: BufferUsage) -> None:
        self.link.queue("usage", self.handle, usage)

    def _free(self) -> None:
        self._release()


class RayStoringBuffer(RayBuffer):
    """A remote buffer that repacks tensors: a transfer sends the serialised tensor, and is not split."""

    piece = sys.maxsize

    def span(self, tensor: Tensor, offset: int = 0, nbytes: int | None = None) -> MemoryRange:
        """Return a range of `nbytes` of a tensor (default: all), named by the tensor's serialised record."""
        return MemoryRange(self._record(tensor), offset, tensor.nbytes if nbytes is None else nbytes)

    def _init_tensor(self, tensor: Tensor) -> None:
        self.link.ask("init", self._record(tensor))

    def _record(self, tensor: Tensor) -> Records:
        return node_record(tensor, lambda buffer: self.handle if buffer is self else NONE)


def _release(link: Link, handle: int) -> None:
    link.sizes.pop(handle, None)
    link.release("free", handle)


def queue_copy(src: Tensor, dst: Tensor) -> bool:
    """Queue a copy between remote buffers; return `False` if one is local or repacks tensors."""
    source, target = src.buffer, dst.buffer
    if not (isinstance(source, RayBuffer) and source.buft.is_plain):
        return False
    if not (isinstance(target, RayBuffer) and target.buft.is_plain):
        return False
    if source.link is target.link:
        from_, to = source.span(src), target.span(dst)
        source.link.queue("copy", from_.place, from_.offset, *to)
        return True
    target.link.write_from(target.span(dst), source.link.read_apart(source.span(src)))
    return True
