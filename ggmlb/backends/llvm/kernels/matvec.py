"""Products of a quantised or float weight with few rows of activations.

The activations are read once for a group of rows of the weight, whose sums stay in registers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ggmlb.backends.llvm.codegen.simd import SIZES, Dot, load_floats, total
from ggmlb.backends.llvm.codegen.value import F32, I8, I32, I64, Value, lanes_of, vec
from ggmlb.backends.llvm.kernels.activations import HIGH, both_parts, parts
from ggmlb.backends.llvm.kernels.blocks import FORMS

if TYPE_CHECKING:
    from ggmlb.backends.llvm.codegen.emit import Kernel, Variable
    from ggmlb.backends.llvm.kernels.blocks import Form

ARGS = (
    "a", "a_nb1", "a_nb2", "a_nb3", "b", "b_nb1", "b_nb2", "b_nb3",
    "y", "y_nb1", "y_nb2", "y_nb3", "k", "m", "n", "n2", "n3", "r2", "r3", "parts",
)  # fmt: skip
"""Arguments of all products: where the weight, the activations and the result lie, with byte strides of
rows, matrices and batches; extents; how often the weight repeats; and chunks of a matrix."""


Product = Callable[[list["Value"], list["Value"], "Value"], "list[list[Value]]"]


class Place:
    """A chunk of a product: its matrix, and its part of the weight's rows.

    Attributes:
        a: Address of the weight's matrix.
        a_nb1: Bytes from one of its rows to the next.
        k: Elements of a row.
        m: Rows.
        n: Rows of activations.
        step: Byte stride of these; `None` if they are not evenly spaced.
        first: First unit of the chunk.
        last: End of its units (exclusive).
    """

    step: Value | None = None

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
        self.n, self.m, self.k, self.a_nb1 = p["n"], p["m"], p["k"], p["a_nb1"]
        self.step = p["b_nb1"]

    def column(self, c: Value | int) -> Value:
        """Address of the row `c` of activations."""
        return self.b + self.args["b_nb1"] * c

    def result(self, c: Value | int) -> Value:
        """Address of its result."""
        return self.y + self.args["y_nb1"] * c


AHEAD = 1024
"""Prefetch distance [bytes], because processors follow few streams at once."""

CHOSEN_ARGS = (
    "a", "a_nb1", "a_nb2", "b", "b_nb1", "b_nb2", "b_ne1", "y", "y_nb1", "y_nb2",
    "k", "m", "n_used", "parts", "starts", "order",
)  # fmt: skip
"""Arguments of products with chosen matrices: `order` has the numbers of tokens' choices, sorted by matrix,
and `starts` where those of each matrix begin."""


class Chosen(Place):
    """A chunk of a product with chosen matrices (mul_mat_id)."""

    def __init__(self, k: Kernel, unit: int) -> None:
        p = dict(zip(CHOSEN_ARGS, k.ints(len(CHOSEN_ARGS)), strict=True))
        self.args, self._kernel = p, k
        matrix, part = k.chunk // p["parts"], k.chunk % p["parts"]
        self._begin = k.load(I64, p["starts"] + matrix * 8)
        self.n = k.load(I64, p["starts"] + matrix * 8 + 8) - self._begin
        self.a = p["a"] + matrix * p["a_nb2"]
        self.m, self.k, self.a_nb1 = p["m"], p["k"], p["a_nb1"]
        units = k.select(self.n > 0, (p["m"] + (unit - 1)) // unit, 0)
        self.first = units * part // p["parts"]
        self.last = units * (part + 1) // p["parts"]

    def _choice(self, c: Value | int) -> tuple[Value, Value]:
        """Return the token and the index of its choice."""
        number = self._kernel.load(I64, self.args["order"] + (self._begin + c) * 8)
        return number // self.args["n_used"], number % self.args["n_used"]

    def column(self, c: Value | int) -> Value:
        """Address of the row `c` of activations."""
        token, use = self._choice(c)
        p = self.args
        return p["b"] + use % p["b_ne1"] * p["b_nb1"] + token * p["b_nb2"]

    def result(self, c: Value | int) -> Value:
        """Address of its result."""
        token, use = self._choice(c)
        return self.args["y"] + use * self.args["y_nb1"] + token * self.args["y_nb2"]


def sort(k: Kernel) -> None:
    """Sort choices by matrix: `ids, nb0, nb1, n_used, n_tokens, n_matrices, starts, order, errors, step`."""
    ids, nb0, nb1, n_used, n_tokens, n_matrices, starts, order, errors, step = k.ints(10)
    ends = starts + 8  # while counting, the place of each matrix is its successor's
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


def quantized(k: Kernel, dtype: str, n_rows: int, n_columns: int) -> None:
    """Multiply blocks with activations as bytes; `n_columns` rows of activations."""

    def product(weights: list[Value], columns: list[Value], size: Value) -> list[list[Value]]:
        return _blocks(k, FORMS[dtype], weights, columns, size)

    _all_rows(k, Place(k, n_rows), n_rows, n_columns, product)


def floats(k: Kernel, dtype: str, n_rows: int, n_columns: int, b_dtype: str = "f32") -> None:
    """Multiply floats with float activations."""

    def product(weights: list[Value], columns: list[Value], size: Value) -> list[list[Value]]:
        return _floats(k, dtype, b_dtype, weights, columns, size)

    _all_rows(k, Place(k, n_rows), n_rows, n_columns, product)


def chosen(k: Kernel, dtype: str, n_rows: int, b_dtype: str) -> None:
    """Multiply the chosen matrices with activations, one row of them at a time; see `Chosen`."""
    place = Chosen(k, n_rows)
    with k.loop(0, place.n) as column, k.loop(place.first, place.last) as group:
        row = k.least(group * n_rows, place.m - n_rows)
        weights = [place.a + (row + r) * place.a_nb1 for r in range(n_rows)]
        x = [place.column(column)]
        if dtype in FORMS:
            found = _blocks(k, FORMS[dtype], weights, x, place.k)
        else:
            found = _floats(k, dtype, b_dtype, weights, x, place.k)
        for r, (value,) in enumerate(found):
            k.store(value, place.result(column) + (row + r) * 4)


def _all_rows(k: Kernel, place: Place, n_rows: int, n_columns: int, product: Product) -> None:
    with k.loop(place.first, place.last) as group:
        row = k.least(group * n_rows, place.m - n_rows)  # the last group may do rows again
        weights = [place.a + (row + r) * place.a_nb1 for r in range(n_rows)]
        found = product(weights, [place.column(c) for c in range(n_columns)], place.k)
        for r, line in enumerate(found):
            for c, value in enumerate(line):
                k.store(value, place.result(c) + (row + r) * 4)


def _blocks(
    k: Kernel, form: Form, weights: list[Value], columns: list[Value], size: Value
) -> list[list[Value]]:
    """Return the products of rows of blocks with rows of bytes, by address."""
    wide = k.level.lanes == 16 and form.block > 32
    runs, step = form.block // 32, 2 if wide else 1
    lanes, groups = 8 * step, form.block // form.group
    pairs = form.pairs if wide else None
    sums = [[k.variable(k.const(vec(F32, lanes), 0)) for _ in columns] for _ in weights]
    rest = [[k.variable(k.const(vec(F32, groups), 0)) for _ in columns] for _ in weights if form.has_min]
    n_blocks = size // form.block
    next_rows = n_blocks * (form.nbytes * len(weights))
    with k.loop(0, n_blocks) as block:
        addresses = [row + block * form.nbytes for row in weights]
        later = block + -(-AHEAD // form.nbytes)
        to_later = k.select(later < n_blocks, later, later - n_blocks) * form.nbytes
        to_later = to_later + k.select(later < n_blocks, k.i64(0), next_rows)
        for row in weights:
            for ahead in range(0, form.nbytes, 64):
                k.prefetch(row + to_later + ahead)
        codes = [(pairs or form.codes)(k, address) for address in addresses]
        scales = [form.scales(k, address) for address in addresses]
        for c, column in enumerate(columns):
            x = parts(column, size, form.wide)
            factors = k.load(vec(F32, runs), x.scales + block * (4 * runs))
            if rest:
                totals = _group_sums(k, form, factors, x.sums, x.counts, block)
            for r, (_, minimums) in enumerate(scales):
                if minimums is not None:
                    rest[r][c].set(k.fma(minimums, totals, rest[r][c].now))
            spread = _per_group(factors, form)
            both = [scale * spread for scale, _ in scales]
            for i in range(0, runs, step):
                at = block * form.block + 32 * i
                if pairs is not None:
                    of_rows = [of_row[i // 2] for of_row in codes]
                else:
                    of_rows = [of_row[i].join(of_row[i + 1]) if wide else of_row[i] for of_row in codes]
                factors_ = [of_row.shuffle(_lanes(form, i, lanes)) for of_row in both]
                slots = [line[c] for line in sums]
                _add_run(k, form.offset, x.codes + at, of_rows, factors_, slots)
                if x.high is not None and x.flags is not None:
                    with k.when(k.load(I8, x.flags + block).zext(I32) > 0):
                        higher = [factor * float(HIGH) for factor in factors_]
                        _add_run(k, form.offset, x.high + at, of_rows, higher, slots)
    found = [[total(k, slot.now) for slot in line] for line in sums]
    if not rest:
        return found
    return [
        [value + total(k, slot.now) for value, slot in zip(a, b, strict=True)]
        for a, b in zip(found, rest, strict=True)
    ]


def _add_run(
    k: Kernel, offset: int | None, x: Value, codes: list[Value], factors: list[Value], slots: list[Variable]
) -> None:
    """Add the products of a run of each row with activations as bytes, by their address."""
    of = k.load(codes[0].type, x)
    dot = Dot(k, lanes_of(codes[0].type) // 4)
    start = dot.start(of, offset)
    for w, factor, slot in zip(codes, factors, slots, strict=True):
        slot.set(k.fma(dot(start, w, of, offset).to_float(), factor, slot.now))


def _per_group(factors: Value, form: Form) -> Value:
    """The scales of activations, of 32 each, for each group of a weight's block."""
    n = form.block // form.group
    return factors.shuffle([i * form.group // 32 for i in range(n)])


def _lanes(form: Form, run: int, lanes: int) -> list[int]:
    """Return the group of the sums in each lane, from run `run` on."""
    return [(32 * run + 4 * i) // form.group for i in range(lanes)]


def _group_sums(k: Kernel, form: Form, factors: Value, s: Value, counts: Value, block: Value) -> Value:
    """Return the sums of activations over each group of a block, the factors of minimums."""
    groups = form.block // form.group
    if form.group == 32:
        return k.load(vec(F32, groups), s + block * (4 * groups))
    found = both_parts(k.load(vec(I32, groups), counts + block * (4 * groups)))
    return found.to_float() * _per_group(factors, form)


def _floats(
    k: Kernel, dtype: str, b_dtype: str, weights: list[Value], columns: list[Value], size: Value
) -> list[list[Value]]:
    """Return the products of rows of floats, by address."""
    lanes = k.level.lanes
    turns = 2 if len(weights) * len(columns) <= 8 else 1  # independent sums hide the latency of additions
    zero = k.const(vec(F32, lanes), 0)
    sums = [[[k.variable(zero) for _ in columns] for _ in weights] for _ in range(turns)]

    def add(at: Value, turn: int, mask: Value | None = None) -> None:
        x = [load_floats(k, b_dtype, column + at * SIZES[b_dtype], lanes, mask) for column in columns]
        for row, line in zip(weights, sums[turn], strict=True):
            w = load_floats(k, dtype, row + at * SIZES[dtype], lanes, mask)
            for slot, of in zip(line, x, strict=True):
                slot.set(k.fma(w, of, slot.now))

    whole = size // (lanes * turns) * (lanes * turns)
    with k.loop(0, whole, lanes * turns) as i:
        for row in weights:
            for ahead in range(0, lanes * turns * SIZES[dtype], 64):
                k.prefetch(row + i * SIZES[dtype] + (AHEAD + ahead))
        for turn in range(turns):
            add(i + lanes * turn, turn)
    with k.loop(whole, size, lanes) as i:
        add(i, 0, k.first_lanes(lanes, size - i))
    for turn in range(1, turns):
        for line, more in zip(sums[0], sums[turn], strict=True):
            for slot, other in zip(line, more, strict=True):
                slot.set(slot.now + other.now)
    return [[total(k, slot.now) for slot in line] for line in sums[0]]
