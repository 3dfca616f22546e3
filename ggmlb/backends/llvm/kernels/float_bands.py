"""Products of unpacked float weights with 4 to 64 rows of float activations (small batches).

A band of the weight's rows is multiplied by one panel of the activations after another. A panel is a range of
elements of some rows, copied so that it fits the L1 cache (rows a power of two apart would share cache sets).
Partial sums of each group of rows of the band are vectors in the thread's scratch memory.
"""

from __future__ import annotations

from ggmlb.backends.llvm.codegen.emit import F32, I32, Emitter, Level, Value, vec
from ggmlb.backends.llvm.codegen.simd import SIZES, add_bfloats, load_floats, total
from ggmlb.backends.llvm.kernels import tiles
from ggmlb.backends.llvm.kernels.matvec import MatChunk

AHEAD = 2048
"""Prefetch distance [bytes]: the hardware prefetcher does not follow this many rows."""

GROUPS = 32
"""Groups of rows in a band."""

PANEL_NBYTES = 16384
"""Size of a panel as float32 [bytes]."""

NEAR = 8192
"""Number of activations that stay in the L1 cache without being copied."""

MOST = 64
"""Largest number of rows of activations; with more, packing the weight is faster (`float_tiles`)."""

LINE_NBYTES = 64
"""Size of a cache line, the step of prefetching [bytes]."""


_SIZES = {**SIZES, tiles.PAIRS: 4}


def _load(k: Emitter, dtype: str, address: Value, mask: Value | None) -> Value:
    """Read a vector of floats or pairs; lanes not set in the mask are 0."""
    if dtype != tiles.PAIRS:
        return load_floats(k, dtype, address, k.level.lanes, mask)
    type_ = vec(I32, k.level.lanes)
    return k.load(type_, address) if mask is None else k.load_masked(type_, address, mask)


def suits(level: Level, k: int, m: int, n: int, pairs: bool = False) -> bool:
    """Whether kernel `floats` is fastest for `n` rows of activations and `m` weight rows, of `k` elements."""
    wide = level.lanes == 16
    if n < 4 or n > MOST or m < rows_at_once(level, n):
        return False
    if n <= 8:  # the alternative is `matvec`, which needs more registers
        return not wide or pairs or k * n > NEAR
    # With short rows `float_tiles` can fuse epilogues, and the reduction of lanes here costs too much.
    return k > tiles.DEPTH and k >= n * (32 if pairs else 64 if wide else 12)


def columns_at_once(n: int) -> int:
    """Return the number of rows of activations in a panel (copied to fit the cache), for `n` rows in all."""
    return tiles.columns(n, 8)


def _together(level: Level, n: int) -> int:
    """Return the rows of a panel that are multiplied by a group of rows at once."""
    return tiles.columns(columns_at_once(n), 8 if level.lanes == 16 else 4)


def rows_at_once(level: Level, n: int) -> int:
    """Return the number of weight rows multiplied together (a group), for `n` rows of activations."""
    return min(4, 24 // _together(level, n)) if level.lanes == 16 else 3


def scratch_nbytes(level: Level, n: int) -> int:
    """Scratch memory that a thread needs for the sums of a band (range of the weight's rows) [bytes]."""
    at_once = columns_at_once(n)
    return GROUPS * rows_at_once(level, n) * -(-n // at_once) * at_once * 4 * level.lanes


def floats(k: Emitter, dtype: str, b_dtype: str, n_columns: int) -> None:
    """Multiply a float weight by few rows of activations, a band (range of the weight's rows) at a time.

    Arguments: `matvec.ARGS`, scratch and its size per thread.

    `n_columns`: from `columns_at_once`. The weight has at least as many rows as a group.
    """
    lanes, n_rows, together = k.level.lanes, rows_at_once(k.level, n_columns), _together(k.level, n_columns)
    chunk, (scratch, stride) = MatChunk(k, n_rows), k.ints(2)
    if b_dtype == tiles.PAIRS:  # a pair is an element of both
        dtype, chunk.k = tiles.PAIRS, chunk.k // 2
    room, packed, vector = scratch + k.thread * stride, k.local(PANEL_NBYTES), 4 * lanes
    line, size = vector * n_rows, _SIZES[dtype]
    depth = PANEL_NBYTES // (4 * n_columns) // LINE_NBYTES * LINE_NBYTES

    def row_of(group: Value) -> Value:
        return k.least(group * n_rows, chunk.m - n_rows)  # the last group may repeat rows

    def sums_of(column: Value, group: Value) -> Value:
        """Address of the sums of a group of weight rows, for activations from row `column` on."""
        return room + column * (GROUPS * line) + group * (n_columns * line)

    with k.loop(chunk.first, chunk.last, GROUPS) as first:
        last = k.least(first + GROUPS, chunk.last)
        with k.loop(0, chunk.k, depth) as begin, k.loop(0, chunk.n, n_columns) as column:
            count = k.least(chunk.k - begin, depth)
            _pack(k, b_dtype, chunk, (column, n_columns), begin, count, packed)
            with k.loop(first, last) as group:
                at = chunk.a + row_of(group) * chunk.a_nb1 + begin * size
                rows = [at + chunk.a_nb1 * r for r in range(n_rows)]
                onwards = chunk.a_nb1 * n_rows
                later = k.select(group + 1 < last, onwards - count * size, (first + 1 - last) * onwards)
                sums = sums_of(column, group - first)
                for c in range(0, n_columns, together):
                    some = n_columns, range(c, min(c + together, n_columns))
                    _add(k, dtype, rows, packed, some, (begin, count), sums, None if c else later)
        with k.loop(0, chunk.n) as column, k.loop(first, last) as group:
            at = sums_of(column - column % n_columns, group - first) + column % n_columns * line
            for r in range(n_rows):
                found = k.load(vec(F32, lanes), at + r * vector, vector)
                k.store(total(found), chunk.result(column) + (row_of(group) + r) * 4)


def _pack(
    k: Emitter, dtype: str, chunk: MatChunk, columns: tuple[Value, int], begin: Value, count: Value, to: Value
) -> None:
    """Copy a panel as float32, or pairs: vectors of its rows in turn, the last padded with zeros."""
    lanes, size, (first, n) = k.level.lanes, _SIZES[dtype], columns
    whole = count // lanes * lanes
    rows = [chunk.column(k.least(first + c, chunk.n - 1)) + begin * size for c in range(n)]

    def move(i: Value, mask: Value | None = None) -> None:
        for c, row in enumerate(rows):
            values = _load(k, dtype, row + i * size, mask)
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
    """Add products of a group of rows with rows of a panel to sums; the first panel sets them.

    `later`: distance from the end of these elements to the next ones, for prefetching.
    """
    lanes, (begin, count), (n_columns, some) = k.level.lanes, elements, columns
    size, floats, vector = _SIZES[dtype], vec(F32, lanes), 4 * lanes
    places = [[to + (c * len(rows) + r) * vector for r in range(len(rows))] for c in some]
    sums = [
        [k.variable(k.select(begin > 0, k.load(floats, at, vector), 0)) for at in line] for line in places
    ]

    def add(i: Value, mask: Value | None = None) -> None:
        weights = [_load(k, dtype, row + i * size, mask) for row in rows]
        for c, line in zip(some, sums, strict=True):
            x = k.load(weights[0].type, packed + i * (4 * n_columns) + c * vector, vector)
            for slot, w in zip(line, weights, strict=True):
                slot.set(add_bfloats(k, slot.now, w, x) if dtype == tiles.PAIRS else k.fma(w, x, slot.now))

    unit, ahead = LINE_NBYTES // size, k.least(count, AHEAD // size)
    whole = count // unit * unit
    with k.loop(0, whole, unit) as i:
        if later is not None:
            away = k.select(i + ahead < count, k.i64(0), later) + ahead * size
            for row in rows:
                k.prefetch(row + i * size + away)
        with k.loop(i, i + unit, lanes) as j:  # unrolled, LLVM would load everything first and spill
            add(j)
    with k.loop(whole, count, lanes) as i:
        add(i, k.first_lanes(lanes, count - i))
    for line, slots in zip(places, sums, strict=True):
        for at, slot in zip(line, slots, strict=True):
            k.store(slot.now, at, vector)
