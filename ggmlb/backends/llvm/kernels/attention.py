"""Flash attention: one pass over keys and values, with an online soft max per query.

With few queries (decoding), keys and values are read once, in place. With many (prompts), tiles of them are
converted to float32, keys transposed, and multiplied in registers. A unit of work is some queries of one KV
head: of several tokens, or of the heads that share it (grouped-query attention).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from ggmlb.backends.llvm.codegen.emit import F32, I8, I32, I64, Emitter, Value, vec
from ggmlb.backends.llvm.codegen.simd import SIZES, exp, folds, greatest, load_float, load_floats, tanh, total
from ggmlb.backends.llvm.kernels.attention_codes import Queries, add_values, greatest_divisor
from ggmlb.backends.llvm.kernels.blocks import FORMATS
from ggmlb.backends.llvm.kernels.tiles import transposed
from ggmlb.core.dtypes import DType

# -- units of work, online soft max ----------------------------------------------------------------

TILE = 64
"""Keys and values of a tile."""

MANY_ROWS = 24
"""Queries of a unit, with many queries."""

BLOCK_ROWS = 6
"""Queries whose sums are kept in registers together."""

LOWEST = -1e30
"""Finite substitute for minus infinity, as the difference of two infinities is NaN."""


class HeadParams(NamedTuple):
    """Compile-time parameters of an attention kernel: head sizes, types, options."""

    d_k: int
    d_v: int
    q: str
    k: str
    v: str
    mask: bool
    sinks: bool
    softcap: bool


ARGS = (
    "q", "q1", "q2", "q3", "k", "k1", "k2", "k3", "v", "v1", "v2", "v3", "y", "y1", "y2", "y3",
    "mask", "m1", "m2", "m3", "m_ne2", "m_ne3", "slopes", "sinks",
    "n_kv", "n_q", "n_heads_kv", "group", "batches", "rk3", "rv3", "scratch", "stride",
)  # fmt: skip


def scratch_nbytes(shape: HeadParams) -> int:
    """Return the scratch memory that a thread needs in `many`, the kernel for prompts [bytes]."""
    tiles = TILE * (shape.d_k + shape.d_v + MANY_ROWS)
    return 4 * (tiles + MANY_ROWS * shape.d_k) + MANY_ROWS * record_nbytes(shape.d_v)


def record_nbytes(d_v: int) -> int:
    """Return the size of a query's soft max state (values, maximum, sum), padded to cache lines [bytes]."""
    return -(-4 * (d_v + 2) // 64) * 64


def width_for(k: Emitter, *sizes: int) -> int:
    """The largest vector width, in lanes, that divides all of the given sizes."""
    return next(w for w in (16, 8, 4, 2, 1) if w <= k.level.lanes and not any(s % w for s in sizes))


def load_cached(k: Emitter, dtype: str, row: Value, i: Value, n: int) -> Value:
    """Load elements `i` to `i + n - 1` (`i` a multiple of `n`) of a row of keys or values as float32."""
    if dtype in SIZES:
        return load_floats(k, dtype, row + i * SIZES[dtype], n)
    return block_reader(k, dtype, row, i >> 5, n)(i & 31)


def block_reader(k: Emitter, dtype: str, row: Value, number: Value, n: int) -> Callable[[Value], Value]:
    """Return a function of `i` that loads elements `i` to `i + n - 1` of block `number` as float32."""
    scales, minimums = FORMATS[dtype].scales(k, [row + number * FORMATS[dtype].nbytes])
    codes = codes_reader(k, dtype, row, number, n)

    def read(i: Value) -> Value:
        value = codes(i) * scales[0].splat(n)
        return value if minimums is None else value + minimums[0].splat(n)

    return read


def codes_reader(k: Emitter, dtype: str, row: Value, number: Value, n: int) -> Callable[[Value], Value]:
    """Return a `read(i)` that loads `code - offset` of elements `i` to `i + n - 1` of block `number`."""
    form = FORMATS[dtype]
    block = row + number * form.nbytes
    if dtype == "q8_0":
        codes = block + DType.Q8_0.codec.offsets["qs"]
    else:
        (run,), codes = form.codes(k, block), k.local(32)
        k.store(run - form.offset if form.offset else run, codes)
    return lambda i: k.load(vec(I8, n), codes + i).sext(I32).to_float()


class Unit:
    """A unit of work (`n_rows` queries that share a KV head), with the addresses of its operands."""

    def __init__(self, k: Emitter, p: dict[str, Value], unit: Value, n_rows: int) -> None:
        self.k, self.p, self.n_rows = k, p, n_rows
        self.rows = p["n_q"] * p["group"]
        blocks = (self.rows + (n_rows - 1)) // n_rows
        block, rest = unit % blocks, unit // blocks
        self.head, self.batch = rest % p["n_heads_kv"], rest // p["n_heads_kv"]
        self.first = block * n_rows
        self.keys = p["k"] + self.head * p["k2"] + self.batch // p["rk3"] * p["k3"]
        self.values = p["v"] + self.head * p["v2"] + self.batch // p["rv3"] * p["v3"]

    def row(self, r: int | Value) -> tuple[Value, Value]:
        """Indices of token and head of the unit's query `r`; past the end, of the last query."""
        at = self.k.least(self.first + r, self.rows - 1)
        n_q = self.p["n_q"]
        return at % n_q, self.head * self.p["group"] + at // n_q

    def query(self, r: int | Value) -> Value:
        """Address of the unit's query `r`."""
        token, head = self.row(r)
        p = self.p
        return p["q"] + token * p["q1"] + head * p["q2"] + self.batch * p["q3"]

    def result(self, r: int | Value) -> Value:
        """Address of the result of the unit's query `r`."""
        token, head = self.row(r)
        p = self.p
        return p["y"] + head * p["y1"] + token * p["y2"] + self.batch * p["y3"]

    def sink(self, r: int | Value) -> Value:
        """The attention sink of the head of query `r`: a logit without a value."""
        _, head = self.row(r)
        return self.k.load(F32, self.p["sinks"] + head * 4)

    def mask(self, r: int | Value) -> tuple[Value, Value]:
        """Address of the mask's row for query `r`, and the ALiBi slope of its head."""
        token, head = self.row(r)
        p = self.p
        row = p["mask"] + token * p["m1"] + head % p["m_ne2"] * p["m2"] + self.batch % p["m_ne3"] * p["m3"]
        return row, self.k.load(F32, p["slopes"] + head * 4)


def arguments(k: Emitter) -> tuple[dict[str, Value], Value, Value]:
    """Read the kernel arguments: return those listed in `ARGS` by name, scale and softcap."""
    scale, softcap = k.float_arg(), k.float_arg()
    return k.named(*ARGS), scale, softcap


def n_units_of(p: dict[str, Value], n_rows: int) -> Value:
    """Return the number of units of work, of `n_rows` queries each."""
    return (p["n_q"] * p["group"] + (n_rows - 1)) // n_rows * p["n_heads_kv"] * p["batches"]


class KeyRange:
    """The keys that a unit of work processes: all, or a part if there are fewer units than threads.

    With parts the kernel has two more arguments: their number, and memory for partial results (see `merge`).

    Attributes:
        first: The first key.
        stop: The end of the range (exclusive).
    """

    def __init__(self, k: Emitter, n_kv: Value, index: Value, n_parts: Value, parts: Value | None) -> None:
        part, n_tiles = index % n_parts, (n_kv + (TILE - 1)) // TILE
        self.first = n_tiles * part // n_parts * TILE
        self.stop = k.least(n_kv, n_tiles * (part + 1) // n_parts * TILE)
        self._index, self._parts = index, parts

    def records(self, own: Value, nbytes: Value | int) -> Value:
        """Return the address for the unit's partial results (`nbytes`); `own` if keys are not split."""
        return own if self._parts is None else self._parts + self._index * nbytes


@contextmanager
def units(k: Emitter, p: dict[str, Value], n_rows: int, split: bool) -> Iterator[tuple[Unit, KeyRange]]:
    """Context manager: loop over the chunk's units of work (some queries, with parts of keys if `split`)."""
    n_parts, parts = k.ints(2) if split else (k.i64(1), None)
    with k.units(n_units_of(p, n_rows) * n_parts) as index:
        yield Unit(k, p, index // n_parts, n_rows), KeyRange(k, p["n_kv"], index, n_parts, parts)


def biased_logits(
    k: Emitter, shape: HeadParams, x: Value, softcap: Value, bias: Value | None, slope: Value
) -> Value:
    """Return logits from scaled dot products `x`: apply the softcap, add the mask times the ALiBi slope."""
    n = x.type.count
    if shape.softcap:
        x = softcap.splat(n) * tanh(k, x)
    return x if bias is None else x + bias * slope.splat(n)


class Softmax:
    """The online soft max of one query: running maximum, sum and weighted values, in memory."""

    def __init__(self, k: Emitter, maximum: Value, total: Value, values: Value) -> None:
        self.k, self.maximum, self.total, self.values = k, maximum, total, values

    @classmethod
    def at(cls, k: Emitter, record: Value, d_v: int) -> Softmax:
        """Return the state stored at address `record`, in `record_nbytes` bytes."""
        return cls(k, record + d_v * 4, record + (d_v + 1) * 4, record)

    def begin(self, d_v: int, width: int) -> None:
        """Initialise the state before the first key, with `d_v` sums in vectors of `width` lanes."""
        k = self.k
        k.store(k.const(F32, float("-inf")), self.maximum)
        k.store(k.const(F32, 0), self.total)
        with k.loop(0, d_v, width) as i:
            k.store(k.const(vec(F32, width), 0), self.values + i * 4)

    def rescale(self, row_max: Value, d_v: int, width: int) -> Value:
        """Raise the maximum to `row_max`; rescale sum and values; return what to subtract from logits."""
        k = self.k
        before = k.load(F32, self.maximum)
        after = k.maximum(before, row_max)
        level = k.maximum(after, LOWEST)
        with k.when(after > before):
            factor = exp(k, before - level)
            k.store(after, self.maximum)
            k.store(k.load(F32, self.total) * factor, self.total)
            spread = factor.splat(width)
            with k.loop(0, d_v, width) as i:
                k.store(k.load(vec(F32, width), self.values + i * 4) * spread, self.values + i * 4)
        return level

    def weigh(self, logits: Value, n: Value | int, level: Value) -> None:
        """Replace `n` logits in memory by `exp(logit - level)`, and add these to the sum."""
        k, lanes = self.k, self.k.level.lanes
        sums = k.variable(k.const(vec(F32, lanes), 0))
        with k.loop(0, n, lanes) as j:
            weights = exp(k, k.load(vec(F32, lanes), logits + j * 4) - level.splat(lanes))
            k.store(weights, logits + j * 4)
            sums.set(sums.now + weights)
        k.store(k.load(F32, self.total) + total(sums.now), self.total)

    def merge(self, other: Softmax, d_v: int, width: int) -> None:
        """Merge in the state of the same query for other keys."""
        k = self.k
        most = k.load(F32, other.maximum)
        factor = exp(k, most - self.rescale(most, d_v, width))
        k.store(k.fma(k.load(F32, other.total), factor, k.load(F32, self.total)), self.total)
        spread = factor.splat(width)
        with k.loop(0, d_v, width) as i:
            more = k.load(vec(F32, width), other.values + i * 4)
            k.store(k.fma(more, spread, k.load(vec(F32, width), self.values + i * 4)), self.values + i * 4)

    def end(self, to: Value, sink: Value | None, d_v: int, width: int) -> None:
        """Write the result to address `to`: the weighted values divided by the sum (with the sink's)."""
        k = self.k
        if sink is not None:
            level = self.rescale(sink, d_v, width)
            k.store(k.load(F32, self.total) + exp(k, sink - level), self.total)
        sum_ = k.load(F32, self.total)
        factor = k.select(sum_ > 0.0, 1.0 / sum_, 0.0).splat(width)
        with k.loop(0, d_v, width) as i:
            k.store(k.load(vec(F32, width), self.values + i * 4) * factor, to + i * 4)


KEYS_AT_ONCE = 4
"""Keys multiplied together in `few`; more would exceed the outstanding cache misses."""

AHEAD = 32
"""Prefetch distance of float keys and values [keys]."""

UNROLLED = 64
"""Unrolled vector products of floats."""

# -- few queries -----------------------------------------------------------------------------------

FLOAT_TILE, CODE_TILE = 256, 128
"""Keys per tile in `few`: of floats, and of quantised blocks, where a whole tile is prefetched."""


def few(k: Emitter, shape: HeadParams, n_rows: int, split: bool) -> None:
    """Compute attention of few queries (decoding), `n_rows` at a time; `split`: over parts of the keys.

    Arguments: `scale, softcap`, `ARGS`, `KeyRange`'s if `split`.
    """
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
    """Merge each query's partial results over parts of the keys; takes the arguments of `few` or `many`."""
    shape = HeadParams(*shape)
    p, _, _ = arguments(k)
    (n_parts, parts), d_v = k.ints(2), shape.d_v
    width, record = width_for(k, d_v), record_nbytes(d_v)
    with k.units(n_units_of(p, n_rows)) as index:
        unit = Unit(k, p, index, n_rows)
        with k.loop(0, k.least(unit.rows - unit.first, n_rows)) as r:
            at = parts + (index * n_parts * n_rows + r) * record
            row = Softmax.at(k, at, d_v)
            with k.loop(1, n_parts) as part:
                row.merge(Softmax.at(k, at + part * (n_rows * record), d_v), d_v, width)
            row.end(unit.result(r), unit.sink(r) if shape.sinks else None, d_v, width)


def _sums_at_once(k: Emitter) -> int:
    """Number of accumulator vectors that fit in registers beside their operands."""
    return 16 if k.level.lanes == 16 else 8


def _scaled_query(k: Emitter, shape: HeadParams, query: Value, to: Value, scale: Value, width: int) -> None:
    with k.loop(0, shape.d_k, width) as i:
        q = load_floats(k, shape.q, query + i * SIZES[shape.q], width)
        k.store(q * scale.splat(width), to + i * 4)


def _few_tile(shape: HeadParams) -> int:
    """Keys of a tile in `few`."""
    return FLOAT_TILE if shape.k in SIZES else CODE_TILE


def _few_products(
    k: Emitter, shape: HeadParams, unit: Unit, begin: Value, count: Value, queries: Value, logits: Value,
    n_rows: int, width: int,
) -> None:  # fmt: skip
    """Write the dot products of all queries with the tile's keys."""
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
    """Write the dot products of all queries with the tile's quantised keys."""
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
    """Turn a tile's dot products into logits, minus infinity beyond the last key; return the row maximum."""
    lanes = k.level.lanes
    row, slope = unit.mask(r)
    most = k.variable(k.const(vec(F32, lanes), float("-inf")))
    with k.loop(0, count, lanes) as j:
        inside = k.first_lanes(lanes, count - j)
        bias = None
        if shape.mask:
            bias = load_floats(k, "f16", row + (begin + j) * 2, lanes, inside)
        x = biased_logits(k, shape, k.load(vec(F32, lanes), at + j * 4), softcap, bias, slope)
        x = k.select(inside, x, float("-inf"))
        k.store(x, at + j * 4)
        most.set(k.maximum(most.now, x))
    return greatest(k, most.now)


def _few_values(
    k: Emitter, shape: HeadParams, unit: Unit, begin: Value, count: Value, weights: Value,
    rows: Sequence[Softmax], width: int,
) -> None:  # fmt: skip
    """Add the tile's weighted values to each query's state."""
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
    """Compute attention of many queries (prompts); `split`: over parts of the keys.

    Arguments: those of `few`.
    """
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
    """The number of the tile's keys up to the last one that some query may see, by the mask."""
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
    """`y = a b`, or `y += a b`, for float32 matrices with the given row strides."""
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
