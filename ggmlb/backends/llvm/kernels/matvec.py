"""Products of a weight in ggml's layout with few rows of activations, as in decoding (GEMV).

Several rows of the weight are multiplied together, so that activations are read once for all. A *run* is a
block of 32 quantised activations; a *group*, 16 or 32 elements with one scale of the weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from llvmlite import ir

from ggmlb.backends.llvm.codegen.emit import F32, I8, I32, I64, Emitter, Level, Value, Variable, vec
from ggmlb.backends.llvm.codegen.simd import SIZES, Dot, load_floats, total
from ggmlb.backends.llvm.kernels.activations import HIGH, QuantRow, layout_for_rows, parts
from ggmlb.backends.llvm.kernels.blocks import FORMATS, BlockFormat

ARGS = (
    "a", "a_nb1", "a_nb2", "a_nb3", "b", "b_nb1", "b_nb2", "b_nb3",
    "y", "y_nb1", "y_nb2", "y_nb3", "k", "m", "n", "n2", "n3", "r2", "r3", "parts", "ahead",
)  # fmt: skip
"""Arguments of all products: addresses of weight, activations and result, with byte strides of rows, matrices
and batches; extents; broadcast factors of the weight (ne12/ne02, ne13/ne03); chunks per matrix; and the
prefetch distance."""


class MatChunk:
    """A chunk of a matrix product: one matrix, and a range of the weight's rows.

    Attributes:
        a: Address of the weight's matrix.
        a_nb1: Bytes from one of its rows to the next.
        k: Elements of a row.
        m: Rows.
        n: Rows of activations.
        step: Byte stride of the rows of activations; `None` if they are not evenly spaced.
        first: First unit of the chunk.
        last: End of its units (exclusive).
        ahead: Prefetch distance [bytes].
        start: First row of activations.
    """

    step: Value | None = None
    start: Value | int = 0

    def __init__(self, k: Emitter, unit: int) -> None:
        p = self.args = k.named(*ARGS)
        matrix, part = k.chunk // p["parts"], k.chunk % p["parts"]
        i2, i3 = matrix % p["n2"], matrix // p["n2"]
        self.a = p["a"] + i2 // p["r2"] * p["a_nb2"] + i3 // p["r3"] * p["a_nb3"]
        self.b = p["b"] + i2 * p["b_nb2"] + i3 * p["b_nb3"]
        self.y = p["y"] + i2 * p["y_nb2"] + i3 * p["y_nb3"]
        units = (p["m"] + (unit - 1)) // unit
        self.first = units * part // p["parts"]
        self.last = units * (part + 1) // p["parts"]
        self.n, self.m, self.k, self.a_nb1 = p["n"], p["m"], p["k"], p["a_nb1"]
        self.step, self.ahead = p["b_nb1"], p["ahead"]

    def column(self, c: Value | int) -> Value:
        """Address of row `c` of the activations."""
        return self.b + self.args["b_nb1"] * c

    def result(self, c: Value | int) -> Value:
        """Address of row `c` of the result."""
        return self.y + self.args["y_nb1"] * c


EXPERT_ARGS = (
    "a", "a_nb1", "a_nb2", "b", "b_nb1", "b_nb2", "b_ne1", "y", "y_nb1", "y_nb2",
    "k", "m", "n_used", "parts", "starts", "order", "ahead",
)  # fmt: skip
"""Arguments of mul_mat_id: `order` has the numbers of (token, expert) pairs, sorted by expert; `starts` has
each expert's first index in it."""


class ExpertChunk(MatChunk):
    """A chunk of mul_mat_id: an expert, a range of its rows, and all tokens that selected it."""

    def __init__(self, k: Emitter, unit: int) -> None:
        p = self.args = k.named(*EXPERT_ARGS)
        self._kernel = k
        matrix, part = k.chunk // p["parts"], k.chunk % p["parts"]
        self._begin = k.load(I64, p["starts"] + matrix * 8)
        self.n = k.load(I64, p["starts"] + matrix * 8 + 8) - self._begin
        self.a = p["a"] + matrix * p["a_nb2"]
        self.m, self.k, self.a_nb1, self.ahead = p["m"], p["k"], p["a_nb1"], p["ahead"]
        units = k.select(self.n > 0, (p["m"] + (unit - 1)) // unit, 0)
        self.first = units * part // p["parts"]
        self.last = units * (part + 1) // p["parts"]

    def _pair(self, c: Value | int) -> tuple[Value, Value]:
        """Return the token of pair `c`, and the expert's index among the token's."""
        number = self._kernel.load(I64, self.args["order"] + (self._begin + c) * 8)
        return number // self.args["n_used"], number % self.args["n_used"]

    def column(self, c: Value | int) -> Value:
        """Address of the activations of the expert's token number `c`."""
        token, use = self._pair(c)
        p = self.args
        return p["b"] + use % p["b_ne1"] * p["b_nb1"] + token * p["b_nb2"]

    def result(self, c: Value | int) -> Value:
        """Address of the result for the expert's token number `c`."""
        token, use = self._pair(c)
        return self.args["y"] + use * self.args["y_nb1"] + token * self.args["y_nb2"]


def sort_experts(k: Emitter) -> None:
    """Sort the (token, expert) pairs of mul_mat_id by expert.

    Arguments: `ids, nb0, nb1, n_used, n_tokens, n_matrices, starts, order, errors, step`.
    """
    ids, nb0, nb1, n_used, n_tokens, n_matrices, starts, order, errors, step = k.ints(10)
    ends = starts + 8  # while counting, a matrix uses its successor's entry
    n = n_used * n_tokens

    def matrix(i: Value) -> Value:
        return k.load(I32, ids + i % n_used * nb0 + i // n_used * nb1).sext(I64)

    def is_right(number: Value) -> Value:
        return Value(k, k.build.icmp_unsigned("<", number.raw, n_matrices.raw))

    with k.loop(0, n_matrices + 2) as i:
        k.store(k.i64(0), starts + i * 8)
    with k.loop(0, n) as i:
        number = matrix(i)
        with k.build.if_else(is_right(number).raw) as (right, wrong):
            with right:
                at = ends + (number + 1) * 8
                k.store(k.load(I64, at) + 1, at)
            with wrong:
                for j, value in enumerate((number, n_matrices, step)):
                    k.store(value, errors + 8 * j)
    with k.loop(1, n_matrices + 1) as i:
        k.store(k.load(I64, ends + i * 8) + k.load(I64, ends + i * 8 - 8), ends + i * 8)
    with k.loop(0, n) as i:
        number = matrix(i)
        with k.when(is_right(number)):
            at = k.load(I64, ends + number * 8)
            k.store(i, order + at * 8)
            k.store(at + 1, ends + number * 8)


UNIT = 256
"""Elements of a row multiplied per iteration: one block of 256, or eight of 32."""


def _lanes(level: Level) -> int:
    return max(8, level.lanes)


def few(k: Emitter, dtype: str, n_rows: int, n_columns: int, b_dtype: str, hint: int) -> None:
    """Multiply a weight by `n_columns` rows of activations, `n_rows` rows of the weight at a time.

    Arguments: `ARGS`. `b_dtype`: type of the activations; `QUANTIZED` if the weight is quantised. `hint`: of
    prefetching, as the hardware prefetcher does not follow this many rows.
    """
    chunk = MatChunk(k, n_rows)
    with k.loop(chunk.first, chunk.last) as group:
        _rows(k, (dtype, b_dtype), chunk, group, n_rows, list(range(n_columns)), hint)


def few_experts(k: Emitter, dtype: str, n_rows: int, b_dtype: str, hint: int) -> None:
    """Multiply experts, `n_rows` rows at a time, by activations, row by row (mul_mat_id)."""
    chunk = ExpertChunk(k, n_rows)
    with k.loop(0, chunk.n) as column, k.loop(chunk.first, chunk.last) as group:
        _rows(k, (dtype, b_dtype), chunk, group, n_rows, [column], hint)


def _rows(
    k: Emitter,
    types: tuple[str, str],
    chunk: MatChunk,
    group: Value,
    n_rows: int,
    columns: Sequence[Value | int],
    hint: int,
) -> None:
    """Write the products of a group of rows."""
    row = k.least(group * n_rows, chunk.m - n_rows)  # the last group may repeat rows
    if types[0] in FORMATS:
        _blocks(k, types[0], chunk, row, n_rows, columns, hint)
        return
    weights = [chunk.a + (row + r) * chunk.a_nb1 for r in range(n_rows)]
    found = _floats(k, *types, weights, [chunk.column(c) for c in columns], chunk, hint)
    for r, line in enumerate(found):
        for c, value in zip(columns, line, strict=True):
            k.store(value, chunk.result(c) + (row + r) * 4)


def _blocks(
    k: Emitter, dtype: str, chunk: MatChunk, row: Value, n_rows: int, columns: Sequence[Value | int],
    hint: int,
) -> None:  # fmt: skip
    """Write the products of quantised rows, from `row` on, with rows of quantised activations."""
    form, n = FORMATS[dtype], _lanes(k.level)
    activations = [parts(chunk.column(c), chunk.k, layout_for_rows(dtype, k.level)) for c in columns]
    floats, line = vec(F32, n), 4 * n * len(columns)
    base, n_runs = chunk.a + row * chunk.a_nb1, UNIT // 32
    sums = k.local(n_rows * line)
    for at in range(0, n_rows * line, 4 * n):
        k.store(k.const(floats, 0), sums + at)

    def add(run: Value, count: int, to_later: Value | None = None) -> None:
        """Add products of `count` runs from `run` (even) on; a loop over rows, as registers hold one."""
        runs = [_ActivationRuns.of(k, form, x, run, count) for x in activations]
        with k.loop(0, n_rows) as r:
            start = base + r * chunk.a_nb1 + (run * 32) // form.block * form.nbytes
            blocks = [start + i * form.nbytes for i in range(max(1, count * 32 // form.block))]
            slots = [k.variable(k.load(floats, sums + r * line + 4 * n * c)) for c in range(len(columns))]
            _add_runs(k, form, blocks, runs, slots)
            for c, slot in enumerate(slots):
                k.store(slot.now, sums + r * line + 4 * n * c)
            if to_later is not None:  # last, as LLVM moves no load across a prefetch
                for ahead in range(0, len(blocks) * form.nbytes, 64):
                    k.prefetch(start + to_later + ahead, hint)

    whole, unit_nbytes = chunk.k // UNIT, UNIT // form.block * form.nbytes
    ahead, next_rows = (chunk.ahead + (unit_nbytes - 1)) // unit_nbytes, chunk.a_nb1 * (n_rows - 1)
    with k.loop(0, whole) as unit:
        later = k.select(unit + ahead < whole, k.i64(0), next_rows)
        add(unit * n_runs, n_runs, later + ahead * unit_nbytes)
    if form.block < UNIT:
        last = (chunk.k >> 5) - 1
        with k.loop(whole * n_runs, last, 2) as run:
            add(run, 2)
        with k.when((last & 1).equals(0)):
            add(last, 1)
    with k.loop(0, n_rows) as r:
        for c, column in enumerate(columns):
            value = total(k.load(floats, sums + r * line + 4 * n * c))
            k.store(value, chunk.result(column) + (row + r) * 4)


class _ActivationRuns(NamedTuple):
    """Some runs of a row of quantised activations.

    Attributes:
        codes: Address of the codes.
        sums: Address of the sums.
        n: Number of runs.
        factors: The scales: a vector with one per group of the weight; or, if that has integer scales
            (`_in_ints`), a vector per pair of runs.
        starts: Initial accumulators for signed weight codes, per vector of activations.
        high: Address of the high parts, and whether there are any; `None` if the layout has none.
    """

    codes: Value
    sums: Value
    n: int
    factors: list[Value]
    starts: list[Value]
    high: tuple[Value, Value] | None

    @classmethod
    def of(cls, k: Emitter, form: BlockFormat, x: QuantRow, run: Value, count: int) -> _ActivationRuns:
        """Return `count` runs of a row, from run number `run` (even) on."""
        scales, half, high = k.load(vec(F32, count), x.scales + run * 4), _lanes(k.level) // 2, None
        if _in_ints(k, form):
            factors = [scales.shuffle([i] * half + [i + 1] * half) for i in range(0, count, 2)]
        else:
            factors = [scales.shuffle([i * form.group // 32 for i in range(count * 32 // form.group)])]
        if x.high is not None and x.flags is not None:
            flags = k.load(vec(I8, count), x.flags + run).bits(ir.IntType(8 * count))
            high = x.high + run * 32, flags.zext(I64) > 0
        codes, sums = x.codes + run * 32, x.sums + run * (128 // form.group)
        return cls(codes, sums, count, factors, _starts(k, form, codes, count), high)


def _starts(k: Emitter, form: BlockFormat, x: Value, count: int) -> list[Value]:
    """Initial accumulators for signed weight codes, per vector of activations; none for unsigned codes."""
    n = _lanes(k.level)
    if form.offset is not None:
        return []
    return [
        Dot(k, n).start(k.load(vec(I8, 4 * n), x + i), None) for i in range(0, -(-count // 2) * 64, 4 * n)
    ]


def _in_ints(k: Emitter, form: BlockFormat) -> bool:
    """Whether to apply integer scales to integer sums: on AVX2 `vpmaddwd` does that for free."""
    return form.whole is not None and k.level.dot == "maddubs"


def _add_runs(
    k: Emitter, form: BlockFormat, blocks: list[Value], columns: list[_ActivationRuns], slots: list[Variable]
) -> None:
    """Add the products of one row's runs to the sums of each row of activations."""
    n, count = _lanes(k.level), columns[0].n
    pairs = [form.pair(k, blocks if count > 1 else 2 * blocks, i, 4 * n) for i in range(-(-count // 2))]
    if form.whole is not None and _in_ints(k, form):
        d, ints, m, minimums = form.whole(k, blocks[0])
        for x, slot in zip(columns, slots, strict=True):
            if m is not None and minimums is not None:
                slot.set(k.fma(_of_groups(k, minimums.to_float(), x, n), m.splat(n), slot.now))
            found = _int_scaled_sums(k, form, pairs, x, ints)
            if form.offset:
                offset = k.const(found.type, -form.offset)
                found = k.fma(_of_groups(k, ints.to_float(), x, n), offset, found)
            slot.set(k.fma(found, d.splat(n), slot.now))
        return
    scales, minimums = form.scales(k, blocks)
    if form.offset:  # subtracting an offset is adding a minimum
        minimums = scales * float(-form.offset)
    for x, slot in zip(columns, slots, strict=True):
        if minimums is not None:
            slot.set(_of_groups(k, minimums, x, n, slot.now))
        factors = _filled(k, scales * x.factors[0], 2)
        _add_pairs(k, form, pairs, x.codes, x.starts, factors, slot)
        if x.high is not None:
            with k.when(x.high[1]):
                starts = _starts(k, form, x.high[0], count)
                _add_pairs(k, form, pairs, x.high[0], starts, factors * float(HIGH), slot)


def _of_groups(k: Emitter, numbers: Value, x: _ActivationRuns, n: int, sum_: Value | None = None) -> Value:
    """Multiply a number per group by the group's sum of activations; add up to `n` lanes."""
    n_groups = numbers.type.count
    sums = k.load(vec(F32, n_groups), x.sums)
    for first in range(0, n_groups, n):
        some = range(first, min(n_groups, first + n))
        a, b = (_filled(k, v.shuffle(some), n) for v in (numbers, sums))
        sum_ = a * b if sum_ is None else k.fma(a, b, sum_)
    assert sum_ is not None
    return sum_


def _add_pairs(
    k: Emitter, form: BlockFormat, pairs: list[list[Value]], x: Value, starts: list[Value], factors: Value,
    slot: Variable,
) -> None:  # fmt: skip
    """Add products of pairs of runs with activations at an address, times a factor per group."""
    for i, weights in enumerate(pairs):
        for lanes, products in _operands(k, form, i, weights, x, starts).items():
            found = _sum(k, form, products).to_float()
            slot.set(k.fma(found, factors.shuffle(lanes), slot.now))


def _int_scaled_sums(
    k: Emitter, form: BlockFormat, pairs: list[list[Value]], x: _ActivationRuns, ints: Value
) -> Value:
    """The products of pairs of runs, times the integer scale of each group, summed in lanes."""
    half, sums = _lanes(k.level) // 2, k.variable(k.const(vec(F32, _lanes(k.level)), 0))
    # Both halves of a vector have the integers of two pairs, so that one shuffle broadcasts them.
    of_two = [k.opaque(ints.shuffle([*range(i, i + 8)] * 2)) for i in (0, 8)]
    for i, (weights, factor) in enumerate(zip(pairs, x.factors, strict=True)):
        found = []
        for lanes, products in _operands(k, form, i, weights, x.codes, x.starts).items():
            places = [g % 8 + j // half * 8 for j, g in enumerate(lanes) for _ in range(2)]
            found.append(_sum(k, form, products, of_two[i // 2].shuffle(places)))
        sums.set(k.fma(sum(found[1:], found[0]).to_float(), factor, sums.now))
    return sums.now


class _Product(NamedTuple):
    """Weight codes, the activations to multiply, and the initial accumulator for signed codes."""

    w: Value
    x: Value
    start: Value | None


def _operands(
    k: Emitter, form: BlockFormat, pair: int, weights: list[Value], x: Value, starts: list[Value]
) -> dict[tuple[int, ...], list[_Product]]:
    """Return the codes of a pair of runs with their activations, keyed by the group of each lane."""
    half = _lanes(k.level) // 2
    found: dict[tuple[int, ...], list[_Product]] = {}
    for h, w in enumerate(weights):
        places = [(2 * pair + i // half) * 32 + 4 * (h * half + i % half) for i in range(2 * half)]
        start = starts[pair * len(weights) + h] if starts else None
        product = _Product(w, k.load(w.type, x + (64 * pair + 8 * half * h)), start)
        found.setdefault(tuple(i // form.group for i in places), []).append(product)
    return found


def _sum(k: Emitter, form: BlockFormat, products: Sequence[_Product], scale: Value | None = None) -> Value:
    """Return the dot products of codes as stored (offset not subtracted) and activations."""
    most = form.most + (form.offset or 0)
    starts = [p.start for p in products if p.start is not None]
    start = sum(starts[1:], starts[0]) if starts else None
    group = Dot(k, _lanes(k.level)).group(None if form.offset is None else 0, most, scale, start=start)
    for w, x, _ in products:
        group.add(w, x)
    return group.total()


def _filled(k: Emitter, v: Value, n: int) -> Value:
    """The vector, padded with zeros to at least `n` lanes."""
    given = v.type.count
    if given >= n:
        return v
    return v.shuffle([min(i, given) for i in range(n)], k.const(v.type, 0))


def _floats(
    k: Emitter, dtype: str, b_dtype: str, weights: list[Value], columns: list[Value], chunk: MatChunk,
    hint: int,
) -> list[list[Value]]:  # fmt: skip
    """Return the products of rows of floats at these addresses."""
    lanes, size = k.level.lanes, chunk.k
    n_sums = len(weights) * len(columns)
    unroll = 4 if n_sums == 1 else 2 if n_sums <= 8 else 1  # independent sums hide the latency of additions
    zero = k.const(vec(F32, lanes), 0)
    sums = [[[k.variable(zero) for _ in columns] for _ in weights] for _ in range(unroll)]

    def add(at: Value, chain: int, mask: Value | None = None) -> None:
        x = [load_floats(k, b_dtype, column + at * SIZES[b_dtype], lanes, mask) for column in columns]
        for row, line in zip(weights, sums[chain], strict=True):
            w = load_floats(k, dtype, row + at * SIZES[dtype], lanes, mask)
            for slot, of in zip(line, x, strict=True):
                slot.set(k.fma(w, of, slot.now))

    whole = size // (lanes * unroll) * (lanes * unroll)
    with k.loop(0, whole, lanes * unroll) as i:
        for row in weights:
            for ahead in range(0, lanes * unroll * SIZES[dtype], 64):
                k.prefetch(row + i * SIZES[dtype] + chunk.ahead + ahead, hint)
        for chain in range(unroll):
            add(i + lanes * chain, chain)
    with k.loop(whole, size, lanes) as i:
        add(i, 0, k.first_lanes(lanes, size - i))
    for chain in range(1, unroll):
        for line, more in zip(sums[0], sums[chain], strict=True):
            for slot, other in zip(line, more, strict=True):
                slot.set(slot.now + other.now)
    return [[total(slot.now) for slot in line] for line in sums[0]]
