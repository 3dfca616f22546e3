"""Ranges: who last wrote and read each byte of a buffer."""

from __future__ import annotations

import weakref
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field

from ggmlb.core.tensor import Tensor

Clock = dict[int, int]
"""For each stream, the count of its actions up to which its work is known to be done."""


@dataclass(slots=True, eq=False)
class Stamp:
    """One access: by which stream, when in the stream's own count, and what to call it.

    Attributes:
        stream: The stream's number; 0 is the host.
        time: The stream's count of actions when it came.
        by: The stream's name.
        action: What it did: `cpy_tensor_async`, ...
        tensor: What was accessed; weak, as it refers to the buffer that this is kept for.
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
    """Bytes with the same history: their last writer, and who has read them since."""

    write: Stamp | None = None
    reads: dict[int, Stamp] = field(default_factory=dict)


class Ranges:
    """The history of a buffer's bytes, as cells that lie side by side."""

    def __init__(self) -> None:
        self._starts = [0]
        self._cells = [Cell()]

    def cells(self, start: int, stop: int) -> list[Cell]:
        """Return the cells that hold any of the bytes, first to last."""
        return self._cells[bisect_right(self._starts, start) - 1 : bisect_left(self._starts, stop)]

    def settled(self, start: int, stop: int, known: Clock) -> Iterator[tuple[int, int]]:
        """Yield the runs of bytes, of those given, whose last write is known to be done."""
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
        """Note that the bytes were read."""
        for cell in self._cells[self._cut(start) : self._cut(stop)]:
            cell.reads[stamp.stream] = stamp

    def write(self, start: int, stop: int, stamp: Stamp) -> None:
        """Note that the bytes were written: what was read before no longer matters."""
        first, last = self._cut(start), self._cut(stop)
        self._starts[first:last] = [start]
        self._cells[first:last] = [Cell(stamp)]

    def _cut(self, at: int) -> int:
        """Return the index of the cell that begins at a byte, after dividing the one around it if needed."""
        i = bisect_left(self._starts, at)
        if i == len(self._starts) or self._starts[i] != at:
            before = self._cells[i - 1]
            self._starts.insert(i, at)
            self._cells.insert(i, Cell(before.write, dict(before.reads)))
        return i
