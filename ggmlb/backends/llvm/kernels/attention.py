"""Attention in one pass over keys and values, with a running maximum and sum of each query's weights.

With few queries (decoding), keys and values are read once in place. With many (a prompt), tiles of them
are first converted to float32, keys transposed, and then multiplied in registers.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ggmlb.backends.llvm.codegen.simd import SIZES, folds, greatest, load_float, load_floats
from ggmlb.backends.llvm.codegen.value import F32, I64, Value, vec
from ggmlb.backends.llvm.kernels.attention_units import (
    BLOCK_ROWS,
    MANY_ROWS,
    TILE,
    Shape,
    Softmax,
    Unit,
    arguments,
    block_reader,
    codes_reader,
    finished,
    highest,
    load_cached,
    n_units_of,
    record_nbytes,
    units,
    width_for,
)
from ggmlb.backends.llvm.kernels.blocks import FORMS
from ggmlb.backends.llvm.kernels.tiles import transposed
from ggmlb.core.dtypes import DType

if TYPE_CHECKING:
    from ggmlb.backends.llvm.codegen.emit import Kernel, Variable


KEYS_AT_ONCE = 4
"""Keys that are multiplied together, with few queries: asked for in larger numbers, lines of memory wait for
each other."""

# -- few queries -----------------------------------------------------------------------------------


def few(k: Kernel, shape: Shape, n_rows: int, split: bool) -> None:
    """Attention of up to `n_rows` queries per unit; `scale, softcap`, `ARGS`, then those of `Part`."""
    shape = Shape(*shape)
    p, scale, softcap = arguments(k)
    d_k, d_v = shape.d_k, shape.d_v
    width = width_for(k, d_k, d_v)
    logits, queries = (k.local(4 * n_rows * n) for n in (TILE, d_k))
    record = record_nbytes(d_v)
    own = k.local(n_rows * record)
    with units(k, p, n_rows, split) as (unit, part):
        found = part.records(own, n_rows * record)
        rows = [Softmax.at(k, found + r * record, d_v) for r in range(n_rows)]
        for r, row in enumerate(rows):
            row.begin(d_v, width)
            _scaled_query(k, shape, unit.query(r), queries + r * d_k * 4, scale, width)
        with k.loop(part.first, part.stop, TILE) as begin:
            count = k.least(p["n_kv"] - begin, TILE)
            if shape.mask:
                count = _n_seen(k, unit, begin, count, k.i64(n_rows))
            with k.when(count > 0):
                _few_products(k, shape, unit, begin, count, queries, logits, n_rows, width)
                for r, row in enumerate(rows):
                    _finish_logits(k, shape, unit, r, begin, count, logits + r * TILE * 4, softcap)
                    level = row.rescale(highest(k, logits + r * TILE * 4), d_v, width)
                    row.weigh(logits + r * TILE * 4, TILE, level)
                _few_values(k, shape, unit, begin, count, logits, rows, width)
        if not split:
            for r, row in enumerate(rows):
                row.end(unit.result(r), unit.sink(r) if shape.sinks else None, d_v, width)


def merge(k: Kernel, shape: Shape, n_rows: int) -> None:
    """Put together what was found of each query in the parts of the keys; takes the same arguments."""
    shape = Shape(*shape)
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
                row.take_in(Softmax.at(k, at + part * (n_rows * record), d_v), d_v, width)
            row.end(unit.result(r), unit.sink(r) if shape.sinks else None, d_v, width)


def _sums_at_once(k: Kernel) -> int:
    """Sums that are kept in registers, among what is added to them."""
    return 16 if k.level.lanes == 16 else 8


def _scaled_query(k: Kernel, shape: Shape, query: Value, to: Value, scale: Value, width: int) -> None:
    with k.loop(0, shape.d_k, width) as i:
        q = load_floats(k, shape.q, query + i * SIZES[shape.q], width)
        k.store(q * scale.splat(width), to + i * 4)


def _few_products(
    k: Kernel, shape: Shape, unit: Unit, begin: Value, count: Value, queries: Value, logits: Value,
    n_rows: int, width: int,
) -> None:  # fmt: skip
    """Write the products of all queries with the tile's keys."""
    together = max(1, min(width, KEYS_AT_ONCE, _sums_at_once(k) // n_rows))
    together = 1 << (together.bit_length() - 1)
    zero = k.const(vec(F32, width), 0)
    with k.loop(0, count, together) as j:
        places = [k.least(begin + j + i, begin + count - 1) for i in range(together)]
        keys = [unit.keys + place * unit.p["k1"] for place in places]
        for place in places:
            _prefetch(k, unit.values + place * unit.p["v1"], shape.v, shape.d_v)
        sums = [[k.variable(zero) for _ in range(together)] for _ in range(n_rows)]

        def add(i: Value, x: list[Value], sums: list[list[Variable]] = sums) -> None:
            for r in range(n_rows):
                q = k.load(vec(F32, width), queries + (i + r * shape.d_k) * 4)
                for slot, of in zip(sums[r], x, strict=True):
                    slot.set(k.fma(of, q, slot.now))

        if shape.k in SIZES:
            with k.loop(0, shape.d_k, width) as i:
                add(i, [load_cached(k, shape.k, key, i, width) for key in keys])
        else:
            with k.loop(0, shape.d_k // 32) as block:
                readers = [block_reader(k, shape.k, key, block, width) for key in keys]
                with k.loop(0, 32, width) as i:
                    add(block * 32 + i, [read(i) for read in readers])
        for r in range(n_rows):
            k.store(folds([slot.now for slot in sums[r]], operator.add), logits + r * TILE * 4 + j * 4)


def _prefetch(k: Kernel, row: Value, dtype: str, n: int) -> None:
    """Ask for a row: the cache lies where no stride of the processor's own prefetching finds it in time."""
    for at in range(0, DType.parse(dtype).row_size(n), 64):
        k.prefetch(row + at)


def _finish_logits(
    k: Kernel,
    shape: Shape,
    unit: Unit,
    r: int | Value,
    begin: Value,
    count: Value,
    at: Value,
    softcap: Value,
) -> None:
    """Turn products of a tile into logits; what lies beyond the last key becomes minus infinity."""
    lanes = k.level.lanes
    row, slope = unit.mask(r)
    with k.loop(0, TILE, lanes) as j:
        inside = k.first_lanes(lanes, count - j)
        bias = None
        if shape.mask:
            bias = load_floats(k, "f16", row + (begin + j) * 2, lanes, inside)
        x = finished(k, shape, k.load(vec(F32, lanes), at + j * 4), softcap, bias, slope)
        k.store(k.select(inside, x, float("-inf")), at + j * 4)


def _few_values(
    k: Kernel, shape: Shape, unit: Unit, begin: Value, count: Value, weights: Value, rows: Sequence[Softmax],
    width: int,
) -> None:  # fmt: skip
    """Add the tile's values, as weighed, to those of each query."""
    nb1, step = unit.p["v1"], max(1, _sums_at_once(k) // len(rows)) * width
    n_blocks = shape.d_v // 32

    def ask(j: Value, part: Value, n_parts: int) -> None:
        """Ask for a part of the row of the key that is a tile further on."""
        size = -(-DType.parse(shape.k).row_size(shape.d_k) // n_parts)
        row = unit.keys + (begin + j + TILE) * unit.p["k1"] + part * size
        for at in range(0, size, 64):
            k.prefetch(row + at)

    if shape.v in SIZES or FORMS[shape.v].has_min:
        for first in range(0, shape.d_v, step):
            columns = [k.i64(i) for i in range(first, min(shape.d_v, first + step), width)]

            def read(j: Value, columns: list[Value] = columns, first: int = first) -> list[Value]:
                row = unit.values + (begin + j) * nb1
                if not first:
                    ask(j, k.i64(0), 1)
                return [load_cached(k, shape.v, row, c, width) for c in columns]

            _add_values(k, count, weights, rows, columns, read, width)
        return
    scaled, form, n = k.local(4 * TILE * len(rows)), FORMS[shape.v], k.level.lanes
    with k.loop(0, n_blocks) as block:
        with k.loop(0, count, n) as j:  # scales make weights, so that codes need not be multiplied
            places = [begin + k.least(j + i, count - 1) for i in range(n)]
            scales, _ = form.scales(k, [unit.values + place * nb1 + block * form.nbytes for place in places])
            for at in range(0, 4 * TILE * len(rows), 4 * TILE):
                k.store(k.load(vec(F32, n), weights + j * 4 + at) * scales, scaled + j * 4 + at)
        step = min(step & -step, 32)
        for first in range(0, 32, step):
            places = [k.i64(i) for i in range(first, first + step, width)]

            def read_codes(
                j: Value, block: Value = block, places: list[Value] = places, first: int = first
            ) -> list[Value]:
                if not first:
                    ask(j, block, n_blocks)
                codes = codes_reader(k, shape.v, unit.values + (begin + j) * nb1, block, width)
                return [codes(i) for i in places]

            columns = [block * 32 + i for i in places]
            _add_values(k, count, scaled, rows, columns, read_codes, width)


def _add_values(
    k: Kernel, count: Value, weights: Value, rows: Sequence[Softmax], columns: list[Value],
    read: Callable[[Value], list[Value]], width: int,
) -> None:  # fmt: skip
    """Add some columns of a tile's values, read by the number of the key, to those of each query."""
    slots = [[k.variable(k.load(vec(F32, width), row.values + c * 4)) for c in columns] for row in rows]
    with k.loop(0, count) as j:
        x = read(j)
        for r, line in enumerate(slots):
            weight = k.load(F32, weights + r * TILE * 4 + j * 4).splat(width)
            for slot, of in zip(line, x, strict=True):
                slot.set(k.fma(of, weight, slot.now))
    for of_row, line in zip(rows, slots, strict=True):
        for slot, c in zip(line, columns, strict=True):
            k.store(slot.now, of_row.values + c * 4)


# -- many queries ----------------------------------------------------------------------------------


def many(k: Kernel, shape: Shape, split: bool) -> None:
    """Attention of `MANY_ROWS` queries per unit; `scale, softcap`, `ARGS`, then those of `Part`."""
    shape = Shape(*shape)
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
                    _finish_logits(k, shape, unit, r, begin, count, at, softcap)
                    level = softmax(r).rescale(highest(k, at), d_v, width)
                    softmax(r).weigh(at, TILE, level)
                _blocks(k, logits, TILE, cached, d_v, values, record // 4, padded, count, d_v, True)
        if not split:
            with k.loop(0, n_rows) as r:
                softmax(r).end(unit.result(r), unit.sink(r) if shape.sinks else None, d_v, width)


def _n_seen(k: Kernel, unit: Unit, begin: Value, count: Value, n_rows: Value) -> Value:
    """The keys of the tile up to the last that the mask lets any of the queries see; 0 if there is none."""
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
    k: Kernel, shape: Shape, unit: Unit, begin: Value, count: Value, keys: Value, cached: Value
) -> None:
    """Make float32 of the tile's keys, transposed, and of its values."""
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
    k: Kernel, a: Value, a_row: int, b: Value, b_row: int, y: Value, y_row: int, n_rows: Value, depth: Value,
    n_columns: int, add: bool,
) -> None:  # fmt: skip
    """`y = a b`, or add that: float32 matrices, rows of so many elements; six rows at once."""
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
