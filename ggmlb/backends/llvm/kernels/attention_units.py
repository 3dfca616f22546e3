"""Shared parts of the attention kernels: arguments, units of work, and the online soft max.

A unit of work is some queries with the same KV head: of several tokens, or of several heads that share it
(grouped-query attention).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from ggmlb.backends.llvm.codegen.simd import SIZES, exp, load_floats, tanh, total
from ggmlb.backends.llvm.codegen.value import F32, I8, I32, Value, vec
from ggmlb.backends.llvm.kernels.blocks import FORMATS
from ggmlb.core.dtypes import DType

if TYPE_CHECKING:
    from ggmlb.backends.llvm.codegen.emit import Emitter

TILE = 64
"""Keys and values of a tile."""

MANY_ROWS = 24
"""Queries of a unit, with many queries."""

BLOCK_ROWS = 6
"""Queries whose sums are kept in registers together."""

LOWEST = -1e30
"""Finite substitute of minus infinity: differences of infinities are NaN."""


class HeadParams(NamedTuple):
    """Parameters of a specialised kernel: head sizes, types, options."""

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
    """Return the scratch size of a thread with many queries [bytes]."""
    tiles = TILE * (shape.d_k + shape.d_v + MANY_ROWS)
    return 4 * (tiles + MANY_ROWS * shape.d_k) + MANY_ROWS * record_nbytes(shape.d_v)


def record_nbytes(d_v: int) -> int:
    """Return the size of a query's state (weighted values, maximum, sum), in whole cache lines [bytes]."""
    return -(-4 * (d_v + 2) // 64) * 64


def width_for(k: Emitter, *sizes: int) -> int:
    """The most lanes of a vector that divide the head sizes."""
    return next(w for w in (16, 8, 4, 2, 1) if w <= k.level.lanes and not any(s % w for s in sizes))


def load_cached(k: Emitter, dtype: str, row: Value, i: Value, n: int) -> Value:
    """Load `n` elements of a row of keys or values from element `i` on, a multiple of `n`, as float32."""
    if dtype in SIZES:
        return load_floats(k, dtype, row + i * SIZES[dtype], n)
    return block_reader(k, dtype, row, i >> 5, n)(i & 31)


def block_reader(k: Emitter, dtype: str, row: Value, number: Value, n: int) -> Callable[[Value], Value]:
    """Return a function that loads `n` elements of a block from a multiple of `n` on; scales load once."""
    scales, minimums = FORMATS[dtype].scales(k, [row + number * FORMATS[dtype].nbytes])
    codes = codes_reader(k, dtype, row, number, n)

    def read(i: Value) -> Value:
        value = codes(i) * scales[0].splat(n)
        return value if minimums is None else value + minimums[0].splat(n)

    return read


def codes_reader(k: Emitter, dtype: str, row: Value, number: Value, n: int) -> Callable[[Value], Value]:
    """Return such a function for `code - offset`, without scale and minimum."""
    form = FORMATS[dtype]
    block = row + number * form.nbytes
    if dtype == "q8_0":
        codes = block + DType.Q8_0.codec.offsets["qs"]
    else:
        (run,), codes = form.codes(k, block), k.local(32)
        k.store(run - form.offset if form.offset else run, codes)
    return lambda i: k.load(vec(I8, n), codes + i).sext(I32).to_float()


class Unit:
    """A unit of work, with the addresses of its operands."""

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
        """The token and the head of query `r`; those of the last query beyond it."""
        at = self.k.least(self.first + r, self.rows - 1)
        n_q = self.p["n_q"]
        return at % n_q, self.head * self.p["group"] + at // n_q

    def query(self, r: int | Value) -> Value:
        """Address of a query."""
        token, head = self.row(r)
        p = self.p
        return p["q"] + token * p["q1"] + head * p["q2"] + self.batch * p["q3"]

    def result(self, r: int | Value) -> Value:
        """Address of a query's result."""
        token, head = self.row(r)
        p = self.p
        return p["y"] + head * p["y1"] + token * p["y2"] + self.batch * p["y3"]

    def sink(self, r: int | Value) -> Value:
        """The attention sink of a query's head: a logit without a value."""
        _, head = self.row(r)
        return self.k.load(F32, self.p["sinks"] + head * 4)

    def mask(self, r: int | Value) -> tuple[Value, Value]:
        """Address of a query's row of the mask, and the ALiBi slope."""
        token, head = self.row(r)
        p = self.p
        row = p["mask"] + token * p["m1"] + head % p["m_ne2"] * p["m2"] + self.batch % p["m_ne3"] * p["m3"]
        return row, self.k.load(F32, p["slopes"] + head * 4)


def arguments(k: Emitter) -> tuple[dict[str, Value], Value, Value]:
    """Read the arguments: scale, softcap, and `ARGS` by name."""
    scale, softcap = k.float_arg(), k.float_arg()
    return dict(zip(ARGS, k.ints(len(ARGS)), strict=True)), scale, softcap


def n_units_of(p: dict[str, Value], n_rows: int) -> Value:
    """Return the number of units of `n_rows` queries."""
    return (p["n_q"] * p["group"] + (n_rows - 1)) // n_rows * p["n_heads_kv"] * p["batches"]


class KeyRange:
    """The keys of a unit: all, or a part if there are fewer units than threads.

    Parts have two arguments more: their number, and memory for partial results, which `merge` combines.

    Attributes:
        first: The first key.
        stop: The one after the last.
    """

    def __init__(self, k: Emitter, n_kv: Value, index: Value, n_parts: Value, parts: Value | None) -> None:
        part, n_tiles = index % n_parts, (n_kv + (TILE - 1)) // TILE
        self.first = n_tiles * part // n_parts * TILE
        self.stop = k.least(n_kv, n_tiles * (part + 1) // n_parts * TILE)
        self._index, self._parts = index, parts

    def records(self, own: Value, nbytes: Value | int) -> Value:
        """Return the address of the unit's partial results of `nbytes`; `own` if the unit has all keys."""
        return own if self._parts is None else self._parts + self._index * nbytes


@contextmanager
def units(k: Emitter, p: dict[str, Value], n_rows: int, split: bool) -> Iterator[tuple[Unit, KeyRange]]:
    """Emit the block for each unit of the chunk, or part of one."""
    n_parts, parts = k.ints(2) if split else (k.i64(1), None)
    n = n_units_of(p, n_rows) * n_parts
    with k.loop(n * k.chunk // k.n_chunks, n * (k.chunk + 1) // k.n_chunks) as index:
        yield Unit(k, p, index // n_parts, n_rows), KeyRange(k, p["n_kv"], index, n_parts, parts)


def finished(
    k: Emitter, shape: HeadParams, x: Value, softcap: Value, bias: Value | None, slope: Value
) -> Value:
    """Return logits: scaled products with softcap, plus the mask times the slope."""
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
        """Return the state in a record of `record_nbytes`."""
        return cls(k, record + d_v * 4, record + (d_v + 1) * 4, record)

    def begin(self, d_v: int, width: int) -> None:
        """Set the state of no keys."""
        k = self.k
        k.store(k.const(F32, float("-inf")), self.maximum)
        k.store(k.const(F32, 0), self.total)
        with k.loop(0, d_v, width) as i:
            k.store(k.const(vec(F32, width), 0), self.values + i * 4)

    def rescale(self, row_max: Value, d_v: int, width: int) -> Value:
        """Update the row maximum and rescale sum and values; return the maximum to subtract from logits."""
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
        """Replace a tile of logits in memory by weights, and add them to the sum."""
        k, lanes = self.k, self.k.level.lanes
        sums = k.variable(k.const(vec(F32, lanes), 0))
        with k.loop(0, n, lanes) as j:
            weights = exp(k, k.load(vec(F32, lanes), logits + j * 4) - level.splat(lanes))
            k.store(weights, logits + j * 4)
            sums.set(sums.now + weights)
        k.store(k.load(F32, self.total) + total(k, sums.now), self.total)

    def merge(self, other: Softmax, d_v: int, width: int) -> None:
        """Add the state of the same query for other keys."""
        k = self.k
        most = k.load(F32, other.maximum)
        factor = exp(k, most - self.rescale(most, d_v, width))
        k.store(k.fma(k.load(F32, other.total), factor, k.load(F32, self.total)), self.total)
        spread = factor.splat(width)
        with k.loop(0, d_v, width) as i:
            more = k.load(vec(F32, width), other.values + i * 4)
            k.store(k.fma(more, spread, k.load(vec(F32, width), self.values + i * 4)), self.values + i * 4)

    def end(self, to: Value, sink: Value | None, d_v: int, width: int) -> None:
        """Write the weighted values divided by the sum."""
        k = self.k
        if sink is not None:
            level = self.rescale(sink, d_v, width)
            k.store(k.load(F32, self.total) + exp(k, sink - level), self.total)
        sum_ = k.load(F32, self.total)
        factor = k.select(sum_ > 0.0, 1.0 / sum_, 0.0).splat(width)
        with k.loop(0, d_v, width) as i:
            k.store(k.load(vec(F32, width), self.values + i * 4) * factor, to + i * 4)
