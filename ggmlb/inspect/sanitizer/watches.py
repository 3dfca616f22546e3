"""Watches: checksums of host memory that must not change while queued work reads it.

Programs can write to host memory directly, through views (`as_array`, `numpy.asarray`, DLPack) and arrays
under buffers. A checksum of the memory is taken when work is queued, and compared when it is known to be
done.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ggmlb.core.tensor import Ne
from ggmlb.interface import Buffer
from ggmlb.interface.observe import Access

if TYPE_CHECKING:
    from ggmlb.inspect.sanitizer.ranges import Clock, Ranges, Stamp

Span = tuple[int, int]
"""A byte range of a buffer: start, stop."""

_Key = tuple[int, Span, "Ne | None"]
"""The reading stream, the bytes, and the strides of memory with gaps."""


@dataclass(slots=True, eq=False)
class Watch:
    """Host memory that must not change until queued work has read it, with its checksum.

    Attributes:
        stamp: The last access that needs it, with the tensor read.
        memory: The watched bytes.
        checksum: Checksum of the memory when the first access was queued.
        is_data: Whether it is an array given to a transfer, not the memory of a buffer.
    """

    stamp: Stamp
    memory: npt.NDArray[Any]
    checksum: int
    is_data: bool = False

    @property
    def is_changed(self) -> bool:
        """Whether the watched memory has changed since its checksum was taken."""
        return checksum(self.memory) != self.checksum


class Watches:
    """All current watches (checksums of host memory that queued work reads), by buffer or array."""

    def __init__(self) -> None:
        self._data: list[Watch] = []
        self._buffers: weakref.WeakKeyDictionary[Buffer, dict[_Key, Watch]] = weakref.WeakKeyDictionary()

    def data(self, memory: npt.NDArray[Any], stamp: Stamp) -> None:
        """Watch the caller's array `memory`, which a queued transfer reads; `stamp` records this access."""
        self._data.append(Watch(stamp, memory, checksum(memory), is_data=True))

    def read(self, access: Access, stamp: Stamp, ranges: Ranges, known: Clock) -> Watch | None:
        """Watch the host memory that queued work reads, except bytes with writes not yet `known` done.

        Returns:
            A watch of the same stream on the same bytes whose memory has changed; it is removed.
        """
        buffer, start, stop, _, tensor = access
        host = buffer.host_memory
        if host is None:
            return None
        spans = list(ranges.settled(start, stop, known))
        gaps = None if tensor is None or tensor.is_contiguous() else tensor.nb
        if tensor is not None and gaps and (spans != [(start, stop)] or stop - start < tensor.nbytes):
            return None
        mine = self._buffers.setdefault(buffer, {})
        for span in spans:
            key = stamp.stream, span, gaps
            before = mine.get(key)
            if before is None:
                memory = _elements(host, access) if gaps else host[slice(*span)]
                mine[key] = Watch(stamp, memory, checksum(memory))
            elif before.is_changed:
                return mine.pop(key)
            else:
                before.stamp = stamp
        return None

    def wrote(self, access: Access) -> None:
        """Remove the watches that overlap bytes which an observed call writes: that change is intended."""
        mine = self._buffers.get(access.buffer)
        if mine:
            for key in [k for k in mine if k[1][0] < access.stop and access.start < k[1][1]]:
                del mine[key]

    def done(self, known: Clock) -> Iterator[Watch]:
        """Remove and yield the watches whose work is done according to the vector clock `known`."""
        ended = [w for w in self._data if _is_done(w, known)]
        if ended:
            self._data = [w for w in self._data if not _is_done(w, known)]
        yield from ended
        for mine in list(self._buffers.values()):
            for key in [k for k, w in mine.items() if _is_done(w, known)]:
                yield mine.pop(key)


def checksum(memory: npt.NDArray[Any]) -> int:
    """Return a checksum of an array's bytes."""
    return zlib.crc32(np.ascontiguousarray(memory).data)


def _is_done(watch: Watch, known: Clock) -> bool:
    return known.get(watch.stamp.stream, 0) >= watch.stamp.time


def _elements(host: npt.NDArray[Any], access: Access) -> npt.NDArray[Any]:
    """View the elements of a strided tensor, without gaps."""
    tensor = access.tensor
    assert tensor is not None
    block = tensor.dtype.block_size
    ne = (tensor.ne[0] // block, *tensor.ne[1:])
    shape, strides = (*ne[::-1], tensor.dtype.type_size), (*tensor.nb[::-1], 1)
    return np.ndarray(shape, np.uint8, host, access.start, strides)
