"""Ranges: the last write and later reads of each byte of a buffer."""

from __future__ import annotations

import weakref
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field

from ggmlb.core.tensor import Tensor

Clock = dict[int, int]
"""For each stream, the number of its actions known to be done."""


@dataclass(slots=True, eq=False)
class Stamp:
    """One recorded access to memory: by which stream, when (its action count), and by which method.

    Attributes:
        stream: The stream's number; 0 is the host.
        time: The stream's count of actions at the access.
        by: The stream's name.
        action: The method: `cpy_tensor_async`, ...
        tensor: The accessed tensor; a weak reference, because it refers to the buffer that owns this stamp.
        where: Line of the caller's program: `"train.py:12"`.
    """

    stream: int
    time: int
    by: str
    action: str
    tensor: weakref.ref[Tensor] | None
    where: str


@dataclass(slots=True)
class Cell:
    """A run of bytes with the same last write and the same reads since."""

    write: Stamp | None = None
    reads: dict[int, Stamp] = field(default_factory=dict)


class Ranges:
    """The access history of a buffer's bytes, as adjacent cells."""

    def __init__(self) -> None:
        self._starts = [0]
        self._cells = [Cell()]

    def cells(self, start: int, stop: int) -> list[Cell]:
        """Return the cells that overlap the bytes from `start` to `stop`, in order of address."""
        return self._cells[bisect_right(self._starts, start) - 1 : bisect_left(self._starts, stop)]

    def settled(self, start: int, stop: int, known: Clock) -> Iterator[tuple[int, int]]:
        """Yield byte runs in `start` to `stop` whose last write the vector clock `known` covers (is done)."""
        begin = None
        for i in range(bisect_right(self._starts, start) - 1, bisect_left(self._starts, stop)):
            write = self._cells[i].write
            if write is None or known.get(write.stream, 0) >= write.time:
                begin = max(self._starts[i], start) if begin is None else begin
            elif begin is not None:
                yield begin, self._starts[i]
                begin = None
        if begin is not None:
            yield begin, stop

    def read(self, start: int, stop: int, stamp: Stamp) -> None:
        """Record the access `stamp` as a read of the bytes from `start` to `stop`."""
        for cell in self._cells[self._cut(start) : self._cut(stop)]:
            cell.reads[stamp.stream] = stamp

    def write(self, start: int, stop: int, stamp: Stamp) -> None:
        """Record the access `stamp` as the bytes' last write, and forget their earlier reads."""
        first, last = self._cut(start), self._cut(stop)
        self._starts[first:last] = [start]
        self._cells[first:last] = [Cell(stamp)]

    def _cut(self, at: int) -> int:
        """Split the cell at a byte if needed; return the index of the cell that begins there."""
        i = bisect_left(self._starts, at)
        if i == len(self._starts) or self._starts[i] != at:
            before = self._cells[i - 1]
            self._starts.insert(i, at)
            self._cells.insert(i, Cell(before.write, dict(before.reads)))
        return i
