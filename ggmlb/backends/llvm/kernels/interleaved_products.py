"""Products of weights in strips (`interleaved`) with few rows of activations (decoding), and fused epilogues.

Each lane sums the product of one row of the weight. Products with more rows of activations are in `tiles`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ggmlb.backends.llvm.codegen.emit import F32, I8, I32, Emitter, Value, Variable, vec
from ggmlb.backends.llvm.codegen.simd import SIZES, Dot, DotSum, load_float, load_floats, store_floats
from ggmlb.backends.llvm.kernels import matvec
from ggmlb.backends.llvm.kernels.activations import HIGH, QuantRow, begin, counts, layout_for_strips, parts
from ggmlb.backends.llvm.kernels.blocks import FORMATS, SCALES, BlockFormat, Scales
from ggmlb.backends.llvm.kernels.elementwise import FUNCTIONS, N_LIMITS
from ggmlb.backends.llvm.kernels.interleaved import (
    ROWS,
    Interleaved,
    Words,
    fields_of,
    lanes,
    prefetches,
    spread,
)
from ggmlb.backends.llvm.kernels.matvec import ExpertChunk, MatChunk
from ggmlb.backends.llvm.kernels.row_loop import each_vector
from ggmlb.backends.llvm.kernels.tiles import columns

AT_ONCE = 4
"""Rows of activations multiplied by a strip of blocks, which is read again, from the cache, for others."""

Sums = list[list[Value]]
"""Sums for each vector of a strip's rows, for each row of activations."""


def few(k: Emitter, dtype: str, n_columns: int, b_dtype: str, hint: int) -> None:
    """Multiply a weight in strips (16 interleaved rows) by `n_columns` rows of activations.

    Arguments: `matvec.ARGS`. `hint`: of prefetching.
    """
    chunk = MatChunk(k, ROWS)
    at_once = columns(n_columns, AT_ONCE) if dtype in FORMATS else n_columns
    with k.loop(chunk.first, chunk.last) as strip:
        for first in range(0, n_columns, at_once):
            some = range(first, min(first + at_once, n_columns))
            _strip(k, (dtype, b_dtype), chunk, strip, some, hint)


def few_experts(k: Emitter, dtype: str, b_dtype: str, hint: int) -> None:
    """Multiply experts in strips (16 interleaved rows) by activations, row by row (mul_mat_id)."""
    chunk = ExpertChunk(k, ROWS)
    with k.loop(0, chunk.n) as column, k.loop(chunk.first, chunk.last) as strip:
        _strip(k, (dtype, b_dtype), chunk, strip, [column], hint)


def _strip(
    k: Emitter,
    types: tuple[str, str],
    chunk: MatChunk,
    strip: Value,
    columns: Sequence[Value | int],
    hint: int,
) -> None:
    """Write the products of a strip."""
    at, (dtype, b_dtype) = [chunk.column(c) for c in columns], types
    if dtype in FORMATS:
        sums = _blocks(k, dtype, chunk, strip, at, hint)
    else:
        sums = _floats(k, dtype, b_dtype, chunk, strip, at, hint)
    for first, line in zip(vectors(k), sums, strict=True):
        for c, value in zip(columns, line, strict=True):
            k.store(value, chunk.result(c) + (strip * ROWS + first) * 4)


def vectors(k: Emitter) -> range:
    """First row of each vector of a strip (16 interleaved rows): 0, or 0 and 8."""
    return range(0, ROWS, lanes(k.level))


def _blocks(k: Emitter, dtype: str, chunk: MatChunk, strip: Value, columns: list[Value], hint: int) -> Sums:
    form, n = FORMATS[dtype], lanes(k.level)
    floats, line = vec(F32, n), 4 * n * len(columns)
    sums = k.local(len(vectors(k)) * line)
    for at in range(0, len(vectors(k)) * line, 4 * n):
        k.store(k.const(floats, 0), sums + at)
    n_blocks = chunk.k // form.block
    base = chunk.a + strip * (chunk.a_nb1 * ROWS)
    activations = [parts(column, chunk.k, layout_for_strips(dtype)) for column in columns]
    # A loop over vectors: unrolled, LLVM would keep the activations in registers for the second vector.
    with k.loop(0, n_blocks) as block, k.loop(0, ROWS, n) as first:
        calls = prefetches(k, dtype, base, block, first, chunk.ahead, hint)
        ask = spread(calls, form.block // form.together // 4)
        where = Interleaved(k, fields_of(dtype), base, block, first)
        weights = _Weights(form, form.codes(k, where), SCALES[dtype](where))
        to = [sums + first // n * line + 4 * n * c for c in range(len(columns))]
        slots = [k.variable(k.load(floats, address, 4 * n)) for address in to]
        _add_block(k, weights, block, activations, slots, ask)
        for slot, address in zip(slots, to, strict=True):
            k.store(slot.now, address, 4 * n)
    return [
        [k.load(floats, sums + first // n * line + 4 * n * c) for c in range(len(columns))]
        for first in vectors(k)
    ]


class _Weights(NamedTuple):
    """A block of the rows of a vector: its format, the codes of each run, and the scales."""

    form: BlockFormat
    codes: list[Words]
    scales: Scales


def _add_block(
    k: Emitter,
    weights: _Weights,
    block: Value,
    activations: list[QuantRow],
    slots: list[Variable],
    ask: Iterator[None],
) -> None:
    """Add the products of a block with each row of activations to the sums."""
    form, _, scales = weights
    n, n_runs = lanes(k.level), form.block // 32
    products: dict[int, Value] = {}
    minimums: dict[int, Value] = {}
    for first in range(0, n_runs, form.together):
        runs = range(first, first + form.together)
        totals = _totals(k, weights, block, activations, runs, ask)
        for c, x in enumerate(activations):
            for run, total in zip(runs, totals[c], strict=True):
                number = block * n_runs + run
                factor = k.load(F32, x.scales + number * 4).splat(n)
                products[c] = _more(k, products.get(c), total.to_float(), factor)
                if scales.m is not None:
                    minimums[c] = _more(k, minimums.get(c), *_of_minimums(k, weights, run, number, x))
    for c, (x, slot) in enumerate(zip(activations, slots, strict=True)):
        slot.set(_more(k, slot.now, products[c], scales.d))
        if scales.m is not None:
            slot.set(_more(k, slot.now, minimums[c], scales.m))
        if x.high is not None and x.flags is not None:
            with k.when(k.load(I8, x.flags + block).zext(I32) > 0):
                high = Dot(k, n).group(form.offset, form.most)
                for w in range(8):
                    high.add(weights.codes[0][w], _four(k, x.high, block, w))
                factor = (k.load(F32, x.scales + block * 4) * float(HIGH)).splat(n)
                slot.set(_more(k, slot.now, high.total().to_float() * factor, scales.d))


def _more(k: Emitter, sum_: Value | None, a: Value, b: Value) -> Value:
    return a * b if sum_ is None else k.fma(a, b, sum_)


def _four(k: Emitter, codes: Value, run: Value, word: int) -> Value:
    """Four neighbouring codes of activations, broadcast to each row of a vector."""
    n = lanes(k.level)
    return k.load(I32, codes + run * 32 + word * 4).splat(n).bits(vec(I8, 4 * n))


def _of_minimums(k: Emitter, weights: _Weights, run: int, number: Value, x: QuantRow) -> tuple[Value, Value]:
    """Return two factors whose product, times `scales.m`, is the minimums' part of a run's dot product."""
    form, _, scales = weights
    n = lanes(k.level)
    total = k.load(F32, x.sums + number * 4).splat(n)
    if scales.minimums is None:
        return total, k.const(total.type, 1)
    if form.group == 32:
        return scales.minimums(run).to_float(), total
    dot = Dot(k, n)
    both = [
        dot.pairs(dot.twice(scales.minimums(2 * run + g)), *counts(k, n, form.group, number * 2 + g, x))
        for g in (0, 1)
    ]
    return (both[0] + both[1]).to_float(), k.load(F32, x.scales + number * 4).splat(n)


def _group(k: Emitter, weights: _Weights, block: Value, group: int, x: QuantRow) -> DotSum:
    """Return a new accumulator for a group of a block with a row of activations."""
    form, _, scales = weights
    scale = None if scales.scales is None else scales.scales(group)
    number = block * (form.block // form.group) + group
    return begin(Dot(k, lanes(k.level)), form.group, form.offset, form.most, number, x, scale)


def _totals(
    k: Emitter, weights: _Weights, block: Value, activations: list[QuantRow], runs: range, ask: Iterator[None]
) -> list[list[Value]]:
    """Return sums scaled by the integer scales, for each row of activations and each run.

    The runs share bytes of the block, which are loaded once.
    """
    form, codes, _ = weights
    per_run, n_runs, n_lanes = 32 // form.group, form.block // 32, k.level.lanes
    totals: list[list[Value]] = []
    for g in range(per_run):
        sums = [[_group(k, weights, block, run * per_run + g, x) for run in runs] for x in activations]
        for w in range(8 * g // per_run, 8 * (g + 1) // per_run):
            for i, run in enumerate(runs):
                for x, line in zip(activations, sums, strict=True):
                    line[i].add(codes[run][w], _four(k, x.codes, block * n_runs + run, w))
            next(ask)
            if n_lanes == 16:  # of fewer, registers are scarce
                k.keep_order()  # the hardware prefetcher follows the stream
        found = [[group.total() for group in line] for line in sums]
        if totals:
            pairs = (zip(*lines, strict=True) for lines in zip(totals, found, strict=True))
            found = [[a + b for a, b in line] for line in pairs]
        totals = found
    return totals


def _floats(
    k: Emitter, dtype: str, b_dtype: str, chunk: MatChunk, strip: Value, columns: list[Value], hint: int
) -> Sums:
    n, size, b_size = lanes(k.level), SIZES[dtype], SIZES[b_dtype]
    unroll = max(1, 8 // (len(columns) * len(vectors(k))))  # independent sums hide the latency of additions
    zero = k.const(vec(F32, n), 0)
    sums = [[[k.variable(zero) for _ in columns] for _ in vectors(k)] for _ in range(unroll)]
    base = chunk.a + strip * (chunk.a_nb1 * ROWS)

    def add(at: Value, chain: int) -> None:
        values = [load_float(k, b_dtype, column + at * b_size).splat(n) for column in columns]
        for first, line in zip(vectors(k), sums[chain], strict=True):
            w = load_floats(k, dtype, base + at * (ROWS * size) + first * size, n)
            for slot, x in zip(line, values, strict=True):
                slot.set(k.fma(w, x, slot.now))

    whole = chunk.k // unroll * unroll
    with k.loop(0, whole, unroll) as i:
        for ahead in range(0, ROWS * size * unroll, 64):
            k.prefetch(base + i * (ROWS * size) + chunk.ahead + ahead, hint)
        for chain in range(unroll):
            add(i + chain, chain)
    with k.loop(whole, chunk.k) as i:
        add(i, 0)
    found = [[slot.now for slot in line] for line in sums[0]]
    for more in sums[1:]:
        found = [
            [a + slot.now for a, slot in zip(line, slots, strict=True)]
            for line, slots in zip(found, more, strict=True)
        ]
    return found


# -- products with an epilogue ---------------------------------------------------------------------


def with_epilogue(
    k: Emitter,
    dtype: str,
    is_interleaved: bool,
    n_rows: int,
    n_columns: int,
    b_dtype: str,
    hint: int,
    adds: Sequence[bool],
    gate: str | None,
) -> None:
    """Multiply by one or two weights into scratch memory; then add bias or residual, and apply `gate`.

    Arguments: those of each product; the limits of the gate (`N_LIMITS`); `m, parts, y, nb1`; then for each
    product the address of its result (`m` float32 per row), and of the rows to add, if any, with their `nb1`.

    Args:
        k: The emitted kernel.
        dtype: Type of the weights.
        is_interleaved: Whether weights are in strips.
        n_rows: Rows of the weight multiplied together; divides `m`.
        n_columns: Rows of activations.
        b_dtype: As in `matvec.few`.
        hint: Of prefetching.
        adds: For each product, whether a bias or residual is added.
        gate: With two products, the gated linear unit; with one, a function or `None`.
    """
    for _ in adds:
        if is_interleaved:
            few(k, dtype, n_columns, b_dtype, hint)
        else:
            matvec.few(k, dtype, n_rows, n_columns, b_dtype, hint)
    n = k.level.lanes
    params = [k.float_arg().splat(n) for _ in range(N_LIMITS.get(gate or "", 0))]
    m, parts, y, y_nb1 = k.ints(4)
    products = [(k.int_arg(), k.ints(2) if add else None) for add in adds]
    units, part = m // n_rows, k.chunk % parts
    first, last = units * part // parts * n_rows, units * (part + 1) // parts * n_rows
    for c in range(n_columns):

        def body(i: Value, mask: Value | None, c: int = c) -> None:
            values = []
            for at, added in products:
                value = load_floats(k, "f32", at + (m * c + i) * 4, n, mask)
                if added is not None:
                    value = value + load_floats(k, "f32", added[0] + added[1] * c + i * 4, n, mask)
                values.append(value)
            result = FUNCTIONS[gate or "copy"](k, *values, *params)
            store_floats(k, "f32", result, y + y_nb1 * c + i * 4, mask)

        each_vector(k, first, last, body)
