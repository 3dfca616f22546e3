"""Products of a quantised or float weight with few rows of activations, some rows of the weight at a time.

The activations are read once for the rows of a group, which keep their sums in registers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ggmlb.backends.numba.kernels.activations import parts
from ggmlb.backends.numba.kernels.blocks import FORMS
from ggmlb.backends.numba.llvm.emit import F32, I8, I32, Kernel, Value, vec
from ggmlb.backends.numba.llvm.simd import SIZES, Dot, load_floats, total

if TYPE_CHECKING:
    from ggmlb.backends.numba.kernels.blocks import Form

ARGS = (
    "a", "a_nb1", "a_nb2", "a_nb3", "b", "b_nb1", "b_nb2", "b_nb3",
    "y", "y_nb1", "y_nb2", "y_nb3", "k", "m", "n", "n2", "n3", "r2", "r3", "parts",
)  # fmt: skip
"""Arguments of all products: where the weight, the activations and the result lie, with byte strides of
rows, matrices and batches; extents; how often the weight repeats; and chunks of a matrix."""


class Place:
    """What a chunk of a product is: its matrix, and its part of the weight's rows.

    Attributes:
        a: Address of the weight's matrix.
        b: Address of the activations.
        y: Address of the result.
        first: The first of the units that it does.
        last: The one after the last.
    """

    def __init__(self, k: Kernel, unit: int) -> None:
        p = dict(zip(ARGS, k.ints(len(ARGS)), strict=True))
        self.args = p
        matrix, part = k.chunk // p["parts"], k.chunk % p["parts"]
        i2, i3 = matrix % p["n2"], matrix // p["n2"]
        self.a = p["a"] + i2 // p["r2"] * p["a_nb2"] + i3 // p["r3"] * p["a_nb3"]
        self.b = p["b"] + i2 * p["b_nb2"] + i3 * p["b_nb3"]
        self.y = p["y"] + i2 * p["y_nb2"] + i3 * p["y_nb3"]
        units = (p["m"] + (unit - 1)) // unit
        self.first = units * part // p["parts"]
        self.last = units * (part + 1) // p["parts"]


def quantized(k: Kernel, dtype: str, n_rows: int, n_columns: int) -> None:
    """Multiply blocks with activations as bytes; `n_columns` rows of activations."""
    place = Place(k, n_rows)
    p = place.args
    with k.loop(place.first, place.last) as group:
        row = k.least(group * n_rows, p["m"] - n_rows)  # the last group may do rows again
        weights = [place.a + (row + r) * p["a_nb1"] for r in range(n_rows)]
        columns = [place.b + p["b_nb1"] * c for c in range(n_columns)]
        found = _rows_by_columns(k, FORMS[dtype], weights, columns, p["k"])
        for r, line in enumerate(found):
            for c, value in enumerate(line):
                k.store(value, place.y + p["y_nb1"] * c + (row + r) * 4)


def _rows_by_columns(
    k: Kernel, form: Form, weights: list[Value], columns: list[Value], size: Value
) -> list[list[Value]]:
    """The products of rows of blocks with rows of bytes, by their addresses."""
    wide = k.level.lanes == 16 and form.block > 32
    runs, step = form.block // 32, 2 if wide else 1
    lanes, groups = 8 * step, form.block // form.group
    pairs = form.pairs if wide else None
    sums = [[k.variable(k.const(vec(F32, lanes), 0)) for _ in columns] for _ in weights]
    rest = [[k.variable(k.const(vec(F32, groups), 0)) for _ in columns] for _ in weights if form.has_min]
    with k.loop(0, size // form.block) as block:
        addresses = [row + block * form.nbytes for row in weights]
        codes = [(pairs or form.codes)(k, address) for address in addresses]
        scales = [form.scales(k, address) for address in addresses]
        for c, column in enumerate(columns):
            q, d, s, counts = parts(column, size)
            factors = k.load(vec(F32, runs), d + block * (4 * runs))
            if rest:
                totals = _group_sums(k, form, factors, s, counts, block)
            for r, (_, minimums) in enumerate(scales):
                if minimums is not None:
                    rest[r][c].set(k.fma(minimums, totals, rest[r][c].now))
            spread = _per_group(factors, form)
            both = [scale * spread for scale, _ in scales]
            for i in range(0, runs, step):
                x = k.load(vec(I8, 32 * step), q + block * form.block + 32 * i)
                dot = Dot(k, lanes)
                start = dot.start(x, form.offset)
                for r, of_row in enumerate(codes):
                    if pairs is not None:
                        w = of_row[i // 2]
                    else:
                        w = of_row[i].join(of_row[i + 1]) if wide else of_row[i]
                    product = dot(start, w, x, form.offset).to_float()
                    factor = both[r].shuffle(_lanes(form, i, lanes))
                    sums[r][c].set(k.fma(product, factor, sums[r][c].now))
    found = [[total(k, slot.now) for slot in line] for line in sums]
    if not rest:
        return found
    return [
        [value + total(k, slot.now) for value, slot in zip(a, b, strict=True)]
        for a, b in zip(found, rest, strict=True)
    ]


def _per_group(factors: Value, form: Form) -> Value:
    """The scales of activations, of 32 each, for each group of a weight's block."""
    n = form.block // form.group
    return factors.shuffle([i * form.group // 32 for i in range(n)])


def _lanes(form: Form, run: int, lanes: int) -> list[int]:
    """Which group the sums in each lane belong to, from run `run` on."""
    return [(32 * run + 4 * i) // form.group for i in range(lanes)]


def _group_sums(k: Kernel, form: Form, factors: Value, s: Value, counts: Value, block: Value) -> Value:
    """The sums of activations over each group of a block: what minimums are multiplied with."""
    groups = form.block // form.group
    if form.group == 32:
        return k.load(vec(F32, groups), s + block * (4 * groups))
    return k.load(vec(I32, groups), counts + block * (4 * groups)).to_float() * _per_group(factors, form)


def floats(k: Kernel, dtype: str, n_rows: int, n_columns: int, b_dtype: str = "f32") -> None:
    """Multiply floats with float activations."""
    place = Place(k, n_rows)
    p, lanes, size = place.args, k.level.lanes, SIZES[dtype]
    turns = 2 if n_rows * n_columns <= 8 else 1  # independent sums hide the latency of additions
    with k.loop(place.first, place.last) as group:
        row = k.least(group * n_rows, p["m"] - n_rows)
        zero = k.const(vec(F32, lanes), 0)
        sums = [[[k.variable(zero) for _ in range(n_columns)] for _ in range(n_rows)] for _ in range(turns)]

        def add(at: Value, turn: int, mask: Value | None = None) -> None:
            x = [
                load_floats(k, b_dtype, place.b + p["b_nb1"] * c + at * SIZES[b_dtype], lanes, mask)
                for c in range(n_columns)
            ]
            for r in range(n_rows):
                w = load_floats(k, dtype, place.a + (row + r) * p["a_nb1"] + at * size, lanes, mask)
                for c in range(n_columns):
                    slot = sums[turn][r][c]
                    slot.set(k.fma(w, x[c], slot.now))

        whole = p["k"] // (lanes * turns) * (lanes * turns)
        with k.loop(0, whole, lanes * turns) as i:
            for turn in range(turns):
                add(i + lanes * turn, turn)
        with k.loop(whole, p["k"], lanes) as i:
            add(i, 0, k.first_lanes(lanes, p["k"] - i))
        for r in range(n_rows):
            for c in range(n_columns):
                value = sums[0][r][c].now
                for turn in range(1, turns):
                    value = value + sums[turn][r][c].now
                k.store(total(k, value), place.y + p["y_nb1"] * c + (row + r) * 4)
