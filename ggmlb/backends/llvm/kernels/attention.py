"""Flash attention: one pass over keys and values with a running maximum and sum per query.

With few queries (decoding), keys and values are read once, in place. With many (a prompt), tiles of them
are converted to float32, keys transposed, and multiplied in registers.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ggmlb.backends.llvm.codegen.simd import SIZES, folds, greatest, load_float, load_floats
from ggmlb.backends.llvm.codegen.value import F32, I64, Value, vec
from ggmlb.backends.llvm.kernels.attention_codes import Queries, add_values, greatest_divisor
from ggmlb.backends.llvm.kernels.attention_units import (
    BLOCK_ROWS,
    MANY_ROWS,
    TILE,
    HeadParams,
    Softmax,
    Unit,
    arguments,
    finished,
    load_cached,
    n_units_of,
    record_nbytes,
    units,
    width_for,
)
from ggmlb.backends.llvm.kernels.blocks import FORMATS
from ggmlb.backends.llvm.kernels.tiles import transposed
from ggmlb.core.dtypes import DType

if TYPE_CHECKING:
    from ggmlb.backends.llvm.codegen.emit import Emitter


KEYS_AT_ONCE = 4
"""Keys that are multiplied together, with few queries; more would exceed the outstanding cache misses."""

AHEAD = 32
"""Prefetch distance of float keys and values [keys]."""

UNROLLED = 64
"""Products of vectors of floats that are unrolled."""

# -- few queries -----------------------------------------------------------------------------------

FLOAT_TILE, CODE_TILE = 256, 128
"""Keys per tile with few queries: of floats; of blocks, of which a whole tile is prefetched."""


def few(k: Emitter, shape: HeadParams, n_rows: int, split: bool) -> None:
    """Attention of up to `n_rows` queries per unit; `scale, softcap`, `ARGS`, then those of `KeyRange`."""
    shape = HeadParams(*shape)
    p, scale, softcap = arguments(k)
    d_k, d_v = shape.d_k, shape.d_v
    width, tile = width_for(k, d_k, d_v), _few_tile(shape)
    weights, queries = (k.local(4 * n_rows * n) for n in (tile, d_k))
    codes = None if shape.k in SIZES else Queries(k, d_k, n_rows, FORMATS[shape.k].has_min)
    record = record_nbytes(d_v)
    own = k.local(n_rows * record)
    with units(k, p, n_rows, split) as (unit, part):
        found = part.records(own, n_rows * record)
        rows = [Softmax.at(k, found + r * record, d_v) for r in range(n_rows)]
        for r, row in enumerate(rows):
            row.begin(d_v, width)
            query = queries + r * d_k * 4
            _scaled_query(k, shape, unit.query(r), query, scale, width)
            if codes is not None:
                codes.take(r, query)
        with k.loop(part.first, part.stop, tile) as begin:
            count = k.least(part.stop - begin, tile)
            if shape.mask:
                count = _n_seen(k, unit, begin, count, k.i64(n_rows))
            with k.when(count > 0):
                if codes is None:
                    _few_products(k, shape, unit, begin, count, queries, weights, n_rows, width)
                else:
                    _few_codes(k, shape, unit, begin, count, codes, weights)
                for r, row in enumerate(rows):
                    at = weights + r * tile * 4
                    most = _finish_logits(k, shape, unit, r, begin, count, at, softcap)
                    row.weigh(at, count, row.rescale(most, d_v, width))
                _few_values(k, shape, unit, begin, count, weights, rows, width)
        if not split:
            for r, row in enumerate(rows):
                row.end(unit.result(r), unit.sink(r) if shape.sinks else None, d_v, width)


def merge(k: Emitter, shape: HeadParams, n_rows: int) -> None:
    """Merge the partial results of each query for parts of the keys; takes the same arguments."""
    shape = HeadParams(*shape)
    p, _, _ = arguments(k)
    (n_parts, parts), d_v = k.ints(2), shape.d_v
    width, record = width_for(k, d_v), record_nbytes(d_v)
    n_units = n_units_of(p, n_rows)
    with k.loop(n_units * k.chunk // k.n_chunks, n_units * (k.chunk + 1) // k.n_chunks) as index:
        unit = Unit(k, p, index, n_rows)
        with k.loop(0, k.least(unit.rows - unit.first, n_rows)) as r:
            at = parts + (index * n_parts * n_rows + r) * record
            row = Softmax.at(k, at, d_v)
            with k.loop(1, n_parts) as part:
                row.merge(Softmax.at(k, at + part * (n_rows * record), d_v), d_v, width)
            row.end(unit.result(r), unit.sink(r) if shape.sinks else None, d_v, width)


def _sums_at_once(k: Emitter) -> int:
    """Vectors of sums that fit in registers beside their operands."""
    return 16 if k.level.lanes == 16 else 8


def _scaled_query(k: Emitter, shape: HeadParams, query: Value, to: Value, scale: Value, width: int) -> None:
    with k.loop(0, shape.d_k, width) as i:
        q = load_floats(k, shape.q, query + i * SIZES[shape.q], width)
        k.store(q * scale.splat(width), to + i * 4)


def _few_tile(shape: HeadParams) -> int:
    """Keys of a tile with few queries."""
    return FLOAT_TILE if shape.k in SIZES else CODE_TILE


def _few_products(
    k: Emitter, shape: HeadParams, unit: Unit, begin: Value, count: Value, queries: Value, logits: Value,
    n_rows: int, width: int,
) -> None:  # fmt: skip
    """Write the products of all queries with the tile's keys."""
    together = max(1, min(width, KEYS_AT_ONCE, _sums_at_once(k) // n_rows))
    together = 1 << (together.bit_length() - 1)
    step = width * greatest_divisor(shape.d_k // width, UNROLLED // (together * n_rows))
    zero = k.const(vec(F32, width), 0)
    with k.loop(0, count, together) as j:
        places = [begin + k.least(j + i, count - 1) for i in range(together)]
        keys = [unit.keys + place * unit.p["k1"] for place in places]
        for key in keys:
            _prefetch(k, key + AHEAD * unit.p["k1"], shape.k, shape.d_k)
        sums = [[k.variable(zero) for _ in range(together)] for _ in range(n_rows)]
        with k.loop(0, shape.d_k, step) as first:
            for i in (first + at for at in range(0, step, width)):
                x = [load_floats(k, shape.k, key + i * SIZES[shape.k], width) for key in keys]
                for r in range(n_rows):
                    q = k.load(vec(F32, width), queries + (i + r * shape.d_k) * 4)
                    for slot, of in zip(sums[r], x, strict=True):
                        slot.set(k.fma(of, q, slot.now))
        for r in range(n_rows):
            k.store(
                folds([slot.now for slot in sums[r]], operator.add), logits + (j + r * _few_tile(shape)) * 4
            )


def _few_codes(
    k: Emitter, shape: HeadParams, unit: Unit, begin: Value, count: Value, codes: Queries, logits: Value
) -> None:
    """Write the products of all queries with the tile's quantised keys."""
    lanes = k.level.lanes
    with k.loop(0, count, lanes) as j:
        places = [begin + k.least(j + i, count - 1) for i in range(lanes)]
        keys = [unit.keys + place * unit.p["k1"] for place in places]
        for place in places:  # the next tile's keys are prefetched while values are read
            _prefetch(k, unit.values + place * unit.p["v1"], shape.v, shape.d_v)
        products = codes.products(shape.k, keys)
        for r, product in enumerate(products):
            k.store(product, logits + (j + r * _few_tile(shape)) * 4)


def _prefetch(k: Emitter, row: Value, dtype: str, n: int) -> None:
    """Prefetch a row: the hardware prefetcher does not follow a KV cache's strides in time."""
    for at in range(0, DType.parse(dtype).row_size(n), 64):
        k.prefetch(row + at)


def _finish_logits(
    k: Emitter,
    shape: HeadParams,
    unit: Unit,
    r: int | Value,
    begin: Value,
    count: Value,
    at: Value,
    softcap: Value,
) -> Value:
    """Turn products of a tile into logits, minus infinity beyond the last key; return the row maximum."""
    lanes = k.level.lanes
    row, slope = unit.mask(r)
    most = k.variable(k.const(vec(F32, lanes), float("-inf")))
    with k.loop(0, count, lanes) as j:
        inside = k.first_lanes(lanes, count - j)
        bias = None
        if shape.mask:
            bias = load_floats(k, "f16", row + (begin + j) * 2, lanes, inside)
        x = finished(k, shape, k.load(vec(F32, lanes), at + j * 4), softcap, bias, slope)
        x = k.select(inside, x, float("-inf"))
        k.store(x, at + j * 4)
        most.set(k.maximum(most.now, x))
    return greatest(k, most.now)


def _few_values(
    k: Emitter, shape: HeadParams, unit: Unit, begin: Value, count: Value, weights: Value,
    rows: Sequence[Softmax], width: int,
) -> None:  # fmt: skip
    """Add the tile's weighted values to the sums of each query."""
    tile = _few_tile(shape)

    def value(j: Value) -> Value:
        return unit.values + (begin + j) * unit.p["v1"]

    def prefetch(j: Value, block: Value) -> None:
        """Prefetch a part of two keys of the next tile."""
        size = -(-DType.parse(shape.k).row_size(shape.d_k) // (shape.d_v // 32))
        for i in range(2):
            row = unit.keys + (begin + j + (tile + i)) * unit.p["k1"] + block * size
            for at in range(0, size, 64):
                k.prefetch(row + at)

    if shape.v not in SIZES:
        to = [row.values for row in rows]
        add_values(k, shape.v, shape.d_v, value, count, tile, weights, to, _sums_at_once(k), prefetch)
        return
    ahead, together = AHEAD * unit.p["v1"], 2 if k.level.lanes == 16 else 1
    step = max(1, _sums_at_once(k) // len(rows)) * width
    for first in range(0, shape.d_v, step):
        columns = range(first, min(shape.d_v, first + step), width)
        slots = [[k.variable(k.load(vec(F32, width), row.values + c * 4)) for c in columns] for row in rows]
        with k.loop(0, count, together) as j:  # beyond the last key weights are 0
            for i in range(together):
                at = value(k.least(j + i, count - 1) if i else j)
                if not first:
                    _prefetch(k, at + ahead, shape.v, shape.d_v)
                for c, of_column in zip(columns, zip(*slots, strict=True), strict=True):
                    x = load_floats(k, shape.v, at + c * SIZES[shape.v], width)
                    for r, slot in enumerate(of_column):
                        weight = k.load(F32, weights + (j + (i + r * tile)) * 4).splat(width)
                        slot.set(k.fma(x, weight, slot.now))
        for row, line in zip(rows, slots, strict=True):
            for slot, c in zip(line, columns, strict=True):
                k.store(slot.now, row.values + c * 4)


# -- many queries ----------------------------------------------------------------------------------


def many(k: Emitter, shape: HeadParams, split: bool) -> None:
    """Attention of `MANY_ROWS` queries per unit; `scale, softcap`, `ARGS`, then those of `KeyRange`."""
    shape = HeadParams(*shape)
    p, scale, softcap = arguments(k)
    d_k, d_v = shape.d_k, shape.d_v
    width = width_for(k, d_k, d_v)
    keys = p["scratch"] + k.thread * p["stride"]
    cached = keys + TILE * d_k * 4
    logits = cached + TILE * d_v * 4
    queries = logits + MANY_ROWS * TILE * 4
    own, record = queries + MANY_ROWS * d_k * 4, record_nbytes(d_v)
    with units(k, p, MANY_ROWS, split) as (unit, part):
        values = part.records(own, MANY_ROWS * record)

        def softmax(r: Value, values: Value = values) -> Softmax:
            return Softmax.at(k, values + r * record, d_v)

        n_rows = k.least(unit.rows - unit.first, MANY_ROWS)
        padded = (n_rows + (BLOCK_ROWS - 1)) // BLOCK_ROWS * BLOCK_ROWS
        with k.loop(0, padded) as r:
            softmax(r).begin(d_v, width)
            _scaled_query(k, shape, unit.query(r), queries + r * (d_k * 4), scale, width)
        with k.loop(part.first, part.stop, TILE) as begin:
            count = k.least(p["n_kv"] - begin, TILE)
            if shape.mask:
                count = _n_seen(k, unit, begin, count, n_rows)
            with k.when(count > 0):
                _load_tile(k, shape, unit, begin, count, keys, cached)
                _blocks(k, queries, d_k, keys, TILE, logits, TILE, padded, k.i64(d_k), TILE, False)
                with k.loop(0, n_rows) as r:
                    at = logits + r * (TILE * 4)
                    most = _finish_logits(k, shape, unit, r, begin, count, at, softcap)
                    softmax(r).weigh(at, count, softmax(r).rescale(most, d_v, width))
                _blocks(k, logits, TILE, cached, d_v, values, record // 4, padded, count, d_v, True)
        if not split:
            with k.loop(0, n_rows) as r:
                softmax(r).end(unit.result(r), unit.sink(r) if shape.sinks else None, d_v, width)


def _n_seen(k: Emitter, unit: Unit, begin: Value, count: Value, n_rows: Value) -> Value:
    """The number of keys up to the last one in the tile that the mask does not hide from all queries."""
    lanes = k.level.lanes
    ends = k.table(vec(F32, lanes), range(1, lanes + 1))
    last = k.variable(k.const(ends.type, 0))
    with k.loop(0, n_rows) as r:
        row, _ = unit.mask(r)
        with k.loop(0, count, lanes) as j:
            inside = k.first_lanes(lanes, count - j)
            bias = load_floats(k, "f16", row + (begin + j) * 2, lanes, inside)
            end = ends + j.to_float(F32).splat(lanes)
            is_seen = Value(k, k.build.and_(inside.raw, (bias > float("-inf")).raw))
            last.set(k.maximum(last.now, k.select(is_seen, end, 0.0)))
    return greatest(k, last.now).to_int(I64)


def _load_tile(
    k: Emitter, shape: HeadParams, unit: Unit, begin: Value, count: Value, keys: Value, cached: Value
) -> None:
    """Convert the tile's keys, transposed, and its values to float32."""
    last, p = begin + count - 1, unit.p
    n = width_for(k, shape.d_k, TILE)
    with k.loop(0, TILE, n) as j:
        rows = [unit.keys + k.least(begin + j + i, last) * p["k1"] for i in range(n)]
        with k.loop(0, shape.d_k, n) as d:
            found = [load_cached(k, shape.k, row, d, n) for row in rows]
            for i, column in enumerate(transposed(found)):
                k.store(column, keys + (d + i) * (TILE * 4) + j * 4)
    n = width_for(k, shape.d_v)
    with k.loop(0, count) as j:
        row = unit.values + (begin + j) * p["v1"]
        with k.loop(0, shape.d_v, n) as d:
            k.store(load_cached(k, shape.v, row, d, n), cached + j * (shape.d_v * 4) + d * 4)


def _blocks(
    k: Emitter, a: Value, a_row: int, b: Value, b_row: int, y: Value, y_row: int, n_rows: Value, depth: Value,
    n_columns: int, add: bool,
) -> None:  # fmt: skip
    """`y = a b`, or `y += a b`, for float32 matrices with these row strides; `BLOCK_ROWS` rows at once."""
    n = width_for(k, n_columns)
    most = 4 if k.level.lanes == 16 else 2
    with k.loop(0, n_rows, BLOCK_ROWS) as r:
        for first in range(0, n_columns, most * n):
            columns = list(range(first, min(n_columns, first + most * n), n))
            to = [y + (r + i) * (y_row * 4) for i in range(BLOCK_ROWS)]
            slots = [
                [
                    k.variable(k.load(vec(F32, n), row + c * 4) if add else k.const(vec(F32, n), 0))
                    for c in columns
                ]
                for row in to
            ]
            with k.loop(0, depth) as d:
                x = [k.load(vec(F32, n), b + d * (b_row * 4) + c * 4) for c in columns]
                for i in range(BLOCK_ROWS):
                    factor = load_float(k, "f32", a + (r + i) * (a_row * 4) + d * 4).splat(n)
                    for slot, of in zip(slots[i], x, strict=True):
                        slot.set(k.fma(of, factor, slot.now))
            for row, line in zip(to, slots, strict=True):
                for slot, c in zip(line, columns, strict=True):
                    k.store(slot.now, row + c * 4)
