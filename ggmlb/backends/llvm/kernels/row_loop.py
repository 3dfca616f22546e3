"""Loops over the rows of several operands, in chunks for threads.

Kernel arguments of a loop (set by `LoweringContext.launch_rows`): row length, three more extents, parts per
row; then for each operand its address and three byte strides. Elements of a row are contiguous.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ggmlb.backends.llvm.codegen.emit import Emitter, Value

ALIGNED = 64
"""Parts of a row begin at multiples of this many elements."""


class RowPart:
    """A row of the operands of a row-wise kernel, or a part of the row.

    Attributes:
        n: Elements of the whole row.
        at: Address of the row in each operand.
        start: The first element of the part.
        stop: Its end (exclusive).
        place: Indices of the row in the three outer dimensions.
    """

    def __init__(
        self, n: Value, at: list[Value], start: Value, stop: Value, place: tuple[Value, Value, Value]
    ) -> None:
        self.n = n
        self.at = at
        self.start = start
        self.stop = stop
        self.place = place


@contextmanager
def each_row(k: Emitter, n_operands: int) -> Iterator[RowPart]:
    """Context manager: code emitted in its body runs for each row (or part of a row) of the chunk.

    `n_operands`: number of operands, in each of which the body gets the row's address.
    """
    n0, n1, n2, n3, n_parts = k.ints(5)
    operands = [k.ints(4) for _ in range(n_operands)]
    n_rows = n1 * n2 * n3
    part, group, n_groups = k.chunk % n_parts, k.chunk // n_parts, k.n_chunks // n_parts
    start = n0 * part // n_parts & -ALIGNED
    stop = k.select((part + 1).equals(n_parts), n0, n0 * (part + 1) // n_parts & -ALIGNED)
    with k.loop(n_rows * group // n_groups, n_rows * (group + 1) // n_groups) as row:
        i1, rest = row % n1, row // n1
        i2, i3 = rest % n2, rest // n2
        at = [p + i1 * nb1 + i2 * nb2 + i3 * nb3 for p, nb1, nb2, nb3 in operands]
        yield RowPart(n0, at, start, stop, (i1, i2, i3))


def each_vector(k: Emitter, start: Value, stop: Value, body: Callable[[Value, Value | None], None]) -> None:
    """Emit a loop of `body(i, mask)` over the vectors of a range; `mask` is `None` for whole vectors."""
    n = k.level.lanes
    whole = start + (stop - start) // n * n
    with k.loop(start, whole, n) as i:
        body(i, None)
    with k.when(whole < stop):
        body(whole, k.first_lanes(n, stop - whole))
