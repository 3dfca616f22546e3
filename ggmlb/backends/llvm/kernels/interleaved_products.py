"""Products of weights in strips (`interleaved`): sums stay in lanes, one row of the weight each.

For few rows of activations; `tiles` has the products with more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ggmlb.backends.llvm.codegen.simd import SIZES, Dot, load_float, load_floats
from ggmlb.backends.llvm.codegen.value import F32, I8, I32, Value, vec
from ggmlb.backends.llvm.kernels.activations import HIGH, parts
from ggmlb.backends.llvm.kernels.blocks import FORMS
from ggmlb.backends.llvm.kernels.interleaved import AHEAD, ROWS, Interleaved, fields_of, lanes, prefetch
from ggmlb.backends.llvm.kernels.interleaved_scales import SCALES
from ggmlb.backends.llvm.kernels.matvec import Chosen, Place

if TYPE_CHECKING:
    from ggmlb.backends.llvm.codegen.emit import Kernel, Variable
    from ggmlb.backends.llvm.kernels.activations import Parts
    from ggmlb.backends.llvm.kernels.blocks import Form
    from ggmlb.backends.llvm.kernels.interleaved_scales import Scales

Sums = list[list[Value]]
"""For each vector of a strip's rows, for each row of activations."""


def quantized(k: Kernel, dtype: str, n_columns: int) -> None:
    """Multiply blocks with activations as bytes: arguments of a product."""
    place = Place(k, ROWS)
    with k.loop(place.first, place.last) as strip:
        columns = [place.column(c) for c in range(n_columns)]
        _store(k, _blocks(k, dtype, place, strip, columns), place, strip, range(n_columns))


def chosen_quantized(k: Kernel, dtype: str) -> None:
    """Multiply chosen matrices of blocks, one row of activations at a time; see `matvec.Chosen`."""
    place = Chosen(k, ROWS)
    with k.loop(0, place.n) as column, k.loop(place.first, place.last) as strip:
        _store(k, _blocks(k, dtype, place, strip, [place.column(column)]), place, strip, [column])


def floats(k: Kernel, dtype: str, n_columns: int, b_dtype: str) -> None:
    """Multiply floats with float activations: arguments of a product."""
    place = Place(k, ROWS)
    with k.loop(place.first, place.last) as strip:
        columns = [place.column(c) for c in range(n_columns)]
        _store(k, _floats(k, dtype, b_dtype, place, strip, columns), place, strip, range(n_columns))


def chosen_floats(k: Kernel, dtype: str, b_dtype: str) -> None:
    """Multiply chosen matrices of floats, one row of activations at a time; see `matvec.Chosen`."""
    place = Chosen(k, ROWS)
    with k.loop(0, place.n) as column, k.loop(place.first, place.last) as strip:
        found = _floats(k, dtype, b_dtype, place, strip, [place.column(column)])
        _store(k, found, place, strip, [column])


def vectors(k: Kernel) -> range:
    """The first row of each vector of a strip."""
    return range(0, ROWS, lanes(k.level))


def _store(k: Kernel, sums: Sums, place: Place, strip: Value, columns: Sequence[Value | int]) -> None:
    for first, line in zip(vectors(k), sums, strict=True):
        for c, value in zip(columns, line, strict=True):
            k.store(value, place.result(c) + (strip * ROWS + first) * 4)


def _blocks(k: Kernel, dtype: str, place: Place, strip: Value, columns: list[Value]) -> Sums:
    form, n = FORMS[dtype], lanes(k.level)
    zero = k.const(vec(F32, n), 0)
    sums = [[k.variable(zero) for _ in columns] for _ in vectors(k)]
    n_blocks = place.k // form.block
    base = place.a + strip * (place.a_nb1 * ROWS)
    activations = [parts(column, place.k, FORMS[dtype].wide) for column in columns]
    with k.loop(0, n_blocks) as block:
        prefetch(k, dtype, (base, n_blocks, block))
        for first, line in zip(vectors(k), sums, strict=True):
            at = Interleaved(k, fields_of(dtype), base, n_blocks, block, first)
            scales, minimums = SCALES[dtype](at)
            for i, words in enumerate(form.codes(k, at)):
                run = block * (form.block // 32) + i
                for slot, parts_ in zip(line, activations, strict=True):
                    _add_run(k, form, slot, words.values, (scales, minimums), i, run, parts_)
    return [[slot.now for slot in line] for line in sums]


def _add_run(
    k: Kernel,
    form: Form,
    slot: Variable,
    words: list[Value],
    of_block: Scales,
    i: int,
    run: Value,
    x: Parts,
) -> None:
    """Add the products of run `i` of a block, the row's run number `run`, with a row of activations."""
    n, per_run, per_group = lanes(k.level), 32 // form.group, form.group // 4
    scales, minimums = of_block
    factor = k.load(F32, x.scales + run * 4)
    counts = [k.load(I32, x.counts + run * 8 + 4 * half) for half in range(2)]
    if per_run == 1:
        counts = [counts[0] + counts[1]]
    dot = Dot(k, n)
    for g in range(per_run):
        group = i * per_run + g
        scale = scales[group] * factor.splat(n)

        def add(codes: Value, sums: Value, scale: Value, g: int = g) -> None:
            for w in range(g * per_group, (g + 1) * per_group):
                of = k.load(I32, codes + run * 32 + w * 4).splat(n).bits(vec(I8, 4 * n))
                sums = dot(sums, words[w], of, form.offset)
            slot.set(k.fma(sums.to_float(), scale, slot.now))

        # What an offset takes away of whole codes is taken at once.
        add(x.codes, dot.start_from(counts[g], form.offset), scale)
        if x.high is not None and x.flags is not None:
            with k.when(k.load(I8, x.flags + run).zext(I32) > 0):
                add(x.high, k.const(vec(I32, n), 0), scale * float(HIGH))
        if minimums is not None:
            total = k.load(F32, x.sums + run * 4) if per_run == 1 else counts[g].to_float(F32) * factor
            slot.set(k.fma(minimums[group], total.splat(n), slot.now))


def _floats(k: Kernel, dtype: str, b_dtype: str, place: Place, strip: Value, columns: list[Value]) -> Sums:
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
