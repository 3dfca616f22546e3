"""Products of rows of floats, as they lie, with some rows of float activations.

A band of the weight's rows meets the activations piece by piece: of some of their rows, a piece is copied so
that it lies in the nearest cache, whose sets rows at a power of two from each other would share. Its products
with each group of rows of the band are added to sums in lanes, which wait in the thread's memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ggmlb.backends.llvm.codegen.simd import SIZES, load_floats, total
from ggmlb.backends.llvm.codegen.value import F32, Value, vec
from ggmlb.backends.llvm.kernels import tiles
from ggmlb.backends.llvm.kernels.matvec import AHEAD, MatChunk

if TYPE_CHECKING:
    from ggmlb.backends.llvm.codegen.emit import Emitter
    from ggmlb.backends.llvm.codegen.host import Level

GROUPS = 32
"""Groups of rows of a band."""

PIECE_NBYTES = 16384
"""Bytes of a piece of the activations as float32."""

NEAR = 8192
"""Values of activations that stay in the nearest cache as they lie."""

MOST = 64
"""Most rows of activations: with more, a weight is better packed (`float_tiles`)."""

LINE_NBYTES = 64
"""Bytes of a row that are multiplied before more of it is prefetched: a line of the cache."""


def suits(level: Level, k: int, m: int, n: int) -> bool:
    """Whether bands are the fastest for `n` rows of activations of `k` elements, and `m` of a weight."""
    wide = level.lanes == 16
    if n < 4 or n > MOST or m < rows_at_once(level, n):
        return False
    if n <= 8:  # else by `matvec`, which needs more registers
        return not wide or k * n > NEAR
    # Tiles of few elements have epilogues; and the lanes of each sum are added up here.
    return k > tiles.DEPTH and k >= n * (64 if wide else 12)


def columns_at_once(n: int) -> int:
    """Return how many of `n` rows of activations a piece has."""
    return tiles.columns(n, 8)


def _together(level: Level, n: int) -> int:
    """How many rows of activations of a piece meet a group of rows at once."""
    return tiles.columns(columns_at_once(n), 8 if level.lanes == 16 else 4)


def rows_at_once(level: Level, n: int) -> int:
    """Return the rows of a group: as many as there are registers for their sums."""
    return min(4, 24 // _together(level, n)) if level.lanes == 16 else 3


def scratch_nbytes(level: Level, n: int) -> int:
    """Bytes that a thread needs for the sums of a band with `n` rows of activations."""
    at_once = columns_at_once(n)
    return GROUPS * rows_at_once(level, n) * -(-n // at_once) * at_once * 4 * level.lanes


def floats(k: Emitter, dtype: str, b_dtype: str, n_columns: int) -> None:
    """Multiply floats: arguments of a product, scratch and its size per thread.

    `n_columns`: from `columns_at_once`. The weight has at least the rows of a group.
    """
    lanes, n_rows, together = k.level.lanes, rows_at_once(k.level, n_columns), _together(k.level, n_columns)
    place, (scratch, stride) = MatChunk(k, n_rows), k.ints(2)
    room, packed, vector = scratch + k.thread * stride, k.local(PIECE_NBYTES), 4 * lanes
    line, size = vector * n_rows, SIZES[dtype]
    depth = PIECE_NBYTES // (4 * n_columns) // LINE_NBYTES * LINE_NBYTES

    def row_of(group: Value) -> Value:
        return k.least(group * n_rows, place.m - n_rows)  # the last group may do rows again

    def sums_of(column: Value, group: Value) -> Value:
        """Address of a group's sums with a piece, by its first column."""
        return room + column * (GROUPS * line) + group * (n_columns * line)

    with k.loop(place.first, place.last, GROUPS) as first:
        last = k.least(first + GROUPS, place.last)
        with k.loop(0, place.k, depth) as begin, k.loop(0, place.n, n_columns) as column:
            count = k.least(place.k - begin, depth)
            _pack(k, b_dtype, place, (column, n_columns), begin, count, packed)
            with k.loop(first, last) as group:
                at = place.a + row_of(group) * place.a_nb1 + begin * size
                rows = [at + place.a_nb1 * r for r in range(n_rows)]
                onwards = place.a_nb1 * n_rows
                later = k.select(group + 1 < last, onwards - count * size, (first + 1 - last) * onwards)
                sums = sums_of(column, group - first)
                for c in range(0, n_columns, together):
                    some = n_columns, range(c, min(c + together, n_columns))
                    _add(k, dtype, rows, packed, some, (begin, count), sums, None if c else later)
        with k.loop(0, place.n) as column, k.loop(first, last) as group:
            at = sums_of(column - column % n_columns, group - first) + column % n_columns * line
            for r in range(n_rows):
                found = k.load(vec(F32, lanes), at + r * vector, vector)
                k.store(total(k, found), place.result(column) + (row_of(group) + r) * 4)


def _pack(
    k: Emitter, dtype: str, place: MatChunk, columns: tuple[Value, int], begin: Value, count: Value, to: Value
) -> None:
    """Write a piece as float32, vector by vector of each row; what is missing of the last vector is 0."""
    lanes, size, (first, n) = k.level.lanes, SIZES[dtype], columns
    whole = count // lanes * lanes
    rows = [place.column(k.least(first + c, place.n - 1)) + begin * size for c in range(n)]

    def move(i: Value, mask: Value | None = None) -> None:
        for c, row in enumerate(rows):
            values = load_floats(k, dtype, row + i * size, lanes, mask)
            k.store(values, to + i * (4 * n) + c * (4 * lanes), 4 * lanes)

    with k.loop(0, whole, lanes) as i:
        move(i)
    with k.loop(whole, count, lanes) as i:
        move(i, k.first_lanes(lanes, count - i))


def _add(
    k: Emitter,
    dtype: str,
    rows: list[Value],
    packed: Value,
    columns: tuple[int, range],
    elements: tuple[Value, Value],
    to: Value,
    later: Value | None,
) -> None:
    """Add products of rows with some columns of a piece to sums in lanes; begin with the first elements.

    `later`: how far from the end of the elements those that are read next begin, to be prefetched.
    """
    lanes, (begin, count), (n_columns, some) = k.level.lanes, elements, columns
    size, floats, vector = SIZES[dtype], vec(F32, lanes), 4 * lanes
    places = [[to + (c * len(rows) + r) * vector for r in range(len(rows))] for c in some]
    sums = [
        [k.variable(k.select(begin > 0, k.load(floats, at, vector), 0)) for at in line] for line in places
    ]

    def add(i: Value, mask: Value | None = None) -> None:
        weights = [load_floats(k, dtype, row + i * size, lanes, mask) for row in rows]
        for c, line in zip(some, sums, strict=True):
            x = k.load(floats, packed + i * (4 * n_columns) + c * vector, vector)
            for slot, w in zip(line, weights, strict=True):
                slot.set(k.fma(w, x, slot.now))

    unit, ahead = LINE_NBYTES // size, k.least(count, AHEAD // size)
    whole = count // unit * unit
    with k.loop(0, whole, unit) as i:
        if later is not None:
            away = k.select(i + ahead < count, k.i64(0), later) + ahead * size
            for row in rows:
                k.prefetch(row + i * size + away)
        with k.loop(i, i + unit, lanes) as j:  # lest LLVM reads all at once, for which there are no registers
            add(j)
    with k.loop(whole, count, lanes) as i:
        add(i, k.first_lanes(lanes, count - i))
    for line, slots in zip(places, sums, strict=True):
        for at, slot in zip(line, slots, strict=True):
            k.store(slot.now, at, vector)
