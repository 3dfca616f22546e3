"""Products of weights in strips (`interleaved`): sums stay in lanes, one row of the weight each.

For few rows of activations; `tiles` has the products with more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ggmlb.backends.llvm.codegen.simd import SIZES, Dot, load_float, load_floats
from ggmlb.backends.llvm.codegen.value import F32, I8, I32, Value, vec
from ggmlb.backends.llvm.kernels.activations import HIGH, ActivationLayout, begin, counts, parts
from ggmlb.backends.llvm.kernels.blocks import FORMS, Form
from ggmlb.backends.llvm.kernels.interleaved import (
    AHEAD,
    ROWS,
    Interleaved,
    Words,
    fields_of,
    lanes,
    prefetches,
    spread,
)
from ggmlb.backends.llvm.kernels.interleaved_scales import SCALES, Scales
from ggmlb.backends.llvm.kernels.matvec import Chosen, MatChunk

if TYPE_CHECKING:
    from ggmlb.backends.llvm.codegen.emit import Emitter, Variable
    from ggmlb.backends.llvm.codegen.simd import DotSum
    from ggmlb.backends.llvm.kernels.activations import QuantRow

Sums = list[list[Value]]
"""For each vector of a strip's rows, for each row of activations."""


def layout(dtype: str) -> ActivationLayout:
    """How the activations beside blocks lie."""
    return ActivationLayout(FORMS[dtype].wide)


def quantized(k: Emitter, dtype: str, n_columns: int) -> None:
    """Multiply blocks with activations as bytes: arguments of a product."""
    place = MatChunk(k, ROWS)
    with k.loop(place.first, place.last) as strip:
        columns = [place.column(c) for c in range(n_columns)]
        _store(k, _blocks(k, dtype, place, strip, columns), place, strip, range(n_columns))


def chosen_quantized(k: Emitter, dtype: str) -> None:
    """Multiply chosen matrices of blocks, one row of activations at a time; see `matvec.Chosen`."""
    place = Chosen(k, ROWS)
    with k.loop(0, place.n) as column, k.loop(place.first, place.last) as strip:
        _store(k, _blocks(k, dtype, place, strip, [place.column(column)]), place, strip, [column])


def floats(k: Emitter, dtype: str, n_columns: int, b_dtype: str) -> None:
    """Multiply floats with float activations: arguments of a product."""
    place = MatChunk(k, ROWS)
    with k.loop(place.first, place.last) as strip:
        columns = [place.column(c) for c in range(n_columns)]
        _store(k, _floats(k, dtype, b_dtype, place, strip, columns), place, strip, range(n_columns))


def chosen_floats(k: Emitter, dtype: str, b_dtype: str) -> None:
    """Multiply chosen matrices of floats, one row of activations at a time; see `matvec.Chosen`."""
    place = Chosen(k, ROWS)
    with k.loop(0, place.n) as column, k.loop(place.first, place.last) as strip:
        found = _floats(k, dtype, b_dtype, place, strip, [place.column(column)])
        _store(k, found, place, strip, [column])


def vectors(k: Emitter) -> range:
    """The first row of each vector of a strip."""
    return range(0, ROWS, lanes(k.level))


def _store(k: Emitter, sums: Sums, place: MatChunk, strip: Value, columns: Sequence[Value | int]) -> None:
    for first, line in zip(vectors(k), sums, strict=True):
        for c, value in zip(columns, line, strict=True):
            k.store(value, place.result(c) + (strip * ROWS + first) * 4)


def _blocks(k: Emitter, dtype: str, place: MatChunk, strip: Value, columns: list[Value]) -> Sums:
    form, n = FORMS[dtype], lanes(k.level)
    floats, line = vec(F32, n), 4 * n * len(columns)
    sums = k.local(len(vectors(k)) * line)
    for at in range(0, len(vectors(k)) * line, 4 * n):
        k.store(k.const(floats, 0), sums + at)
    n_blocks = place.k // form.block
    base = place.a + strip * (place.a_nb1 * ROWS)
    activations = [parts(column, place.k, layout(dtype)) for column in columns]
    # A loop over vectors keeps what both read of activations from being held in registers for the second.
    with k.loop(0, n_blocks) as block, k.loop(0, ROWS, n) as first:
        ask = spread(prefetches(k, dtype, base, block, first), form.block // form.together // 4)
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
    """A block of each row of a vector: its format, the codes of each run, and scales."""

    form: Form
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
    """Add the products of a block with rows of activations to their sums."""
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
    """Four neighbouring codes of activations, for each row of a vector."""
    n = lanes(k.level)
    return k.load(I32, codes + run * 32 + word * 4).splat(n).bits(vec(I8, 4 * n))


def _of_minimums(k: Emitter, weights: _Weights, run: int, number: Value, x: QuantRow) -> tuple[Value, Value]:
    """Two factors of what the minimums add to the products of a run, the row's run `number`."""
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
    """An empty sum of the products of a group of a block with a row of activations."""
    form, _, scales = weights
    scale = None if scales.scales is None else scales.scales(group)
    number = block * (form.block // form.group) + group
    return begin(Dot(k, lanes(k.level)), form.group, form.offset, form.most, number, x, scale)


def _totals(
    k: Emitter, weights: _Weights, block: Value, activations: list[QuantRow], runs: range, ask: Iterator[None]
) -> list[list[Value]]:
    """The sums of products times integer scales, for each row of activations and each of the runs.

    These runs have bits in the same bytes: what is read of them is used at once.
    """
    form, codes, _ = weights
    per_run, n_runs = 32 // form.group, form.block // 32
    totals: list[list[Value]] = []
    for g in range(per_run):
        sums = [[_group(k, weights, block, run * per_run + g, x) for run in runs] for x in activations]
        for w in range(8 * g // per_run, 8 * (g + 1) // per_run):
            for i, run in enumerate(runs):
                for x, line in zip(activations, sums, strict=True):
                    line[i].add(codes[run][w], _four(k, x.codes, block * n_runs + run, w))
            next(ask)
        found = [[group.total() for group in line] for line in sums]
        if totals:
            pairs = (zip(*lines, strict=True) for lines in zip(totals, found, strict=True))
            found = [[a + b for a, b in line] for line in pairs]
        totals = found
    return totals


def _floats(
    k: Emitter, dtype: str, b_dtype: str, place: MatChunk, strip: Value, columns: list[Value]
) -> Sums:
    n, size, b_size = lanes(k.level), SIZES[dtype], SIZES[b_dtype]
    turns = max(1, 8 // (len(columns) * len(vectors(k))))  # independent sums hide the latency of additions
    zero = k.const(vec(F32, n), 0)
    sums = [[[k.variable(zero) for _ in columns] for _ in vectors(k)] for _ in range(turns)]
    base = place.a + strip * (place.a_nb1 * ROWS)

    def add(at: Value, turn: int) -> None:
        values = [load_float(k, b_dtype, column + at * b_size).splat(n) for column in columns]
        for first, line in zip(vectors(k), sums[turn], strict=True):
            w = load_floats(k, dtype, base + at * (ROWS * size) + first * size, n)
            for slot, x in zip(line, values, strict=True):
                slot.set(k.fma(w, x, slot.now))

    whole = place.k // turns * turns
    with k.loop(0, whole, turns) as i:
        for ahead in range(0, ROWS * size * turns, 64):
            k.prefetch(base + i * (ROWS * size) + (AHEAD + ahead))
        for turn in range(turns):
            add(i + turn, turn)
    with k.loop(whole, place.k) as i:
        add(i, 0)
    found = [[slot.now for slot in line] for line in sums[0]]
    for more in sums[1:]:
        found = [
            [a + slot.now for a, slot in zip(line, slots, strict=True)]
            for line, slots in zip(found, more, strict=True)
        ]
    return found
