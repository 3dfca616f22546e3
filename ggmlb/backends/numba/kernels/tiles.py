"""Products with many rows of activations: tiles of a weight, packed for the purpose, with some of the rows.

A tile is some rows of the weight, transposed so that lanes are rows: each value (or four neighbouring bytes)
of an activation row meets a whole vector of weights. A thread packs a tile into memory of its own, which
stays in its cache, and multiplies all activations with it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ggmlb.backends.numba.kernels.activations import FLAGS, HIGH, parts
from ggmlb.backends.numba.kernels.blocks import FORMS
from ggmlb.backends.numba.kernels.matvec import Chosen, Place
from ggmlb.backends.numba.kernels.strip import AHEAD, FIELDS, ROWS, Strip, lanes, prefetch
from ggmlb.backends.numba.kernels.strip_scales import SCALES
from ggmlb.backends.numba.llvm.simd import SIZES, Dot, load_float, load_floats
from ggmlb.backends.numba.llvm.value import F32, I8, I32, Value, vec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ggmlb.backends.numba.kernels.activations import Parts
    from ggmlb.backends.numba.kernels.blocks import Form
    from ggmlb.backends.numba.llvm.emit import Kernel
    from ggmlb.backends.numba.llvm.host import Level

BYTE_ROWS = 16
"""Rows of a tile of bytes."""

DEPTH = 256
"""Elements of a row that are packed at a time."""


def columns(n: int, most: int) -> int:
    """Of how many rows of activations at a time to take `n`, where `most` fit the registers.

    As few turns as can be, and as even: the last one does all of its rows, needed or not.
    """
    return -(-n // -(-n // most))


def byte_columns(level: Level) -> int:
    """Most rows of activations that meet a tile of bytes together."""
    return 8 if level.lanes == 16 else 3


def float_rows(level: Level) -> int:
    """Rows of a tile of floats."""
    return 2 * level.lanes


def float_columns(level: Level) -> int:
    """Most rows of activations that meet a tile of floats together."""
    return 12 if level.lanes == 16 else 6


def byte_scratch(k: int, dtype: str) -> int:
    """Bytes that a thread needs to pack a tile of rows of `k` elements."""
    form, whole = FORMS[dtype], -(-k // DEPTH) * DEPTH
    floats = whole // form.group * (2 if form.has_min else 1)
    flags = -(-k // 32 // FLAGS) * FLAGS if form.wide else 0
    return BYTE_ROWS * (whole + 4 * floats) + flags


def float_scratch(level: Level) -> int:
    """Bytes that a thread needs to pack a tile of floats."""
    return float_rows(level) * DEPTH * 4


def transposed(vectors: Sequence[Value]) -> list[Value]:
    """Vectors whose lanes are the given ones' rows: as many vectors as each has lanes."""
    n = len(vectors)
    low = [i // 2 + n * (i % 2) for i in range(n)]
    high = [i + n // 2 for i in low]
    found, turns = list(vectors), n.bit_length() - 1
    for _ in range(turns):
        pairs = [(found[i], found[i + n // 2]) for i in range(n // 2)]
        found = [a.shuffle(order, b) for a, b in pairs for order in (low, high)]
    return found


def _transpose(k: Kernel, source: Value, stride: int, to: Value, n_rows: int, words: Value) -> None:
    """Turn rows of 32-bit words, `stride` bytes apart, into columns of `n_rows` words."""
    n = k.level.lanes
    for first in range(0, n_rows, n):
        with k.loop(0, words, n) as w:
            rows = [k.load(vec(I32, n), source + (first + r) * stride + w * 4) for r in range(n)]
            for i, column in enumerate(transposed(rows)):
                k.store(column, to + (w + i) * (n_rows * 4) + first * 4)


# -- bytes -----------------------------------------------------------------------------------------


class _Packed:
    """Where the parts of a packed tile are: codes, scales, minimums; and flags of activations."""

    def __init__(self, form: Form, size: Value, scratch: Value) -> None:
        whole = (size + (DEPTH - 1)) // DEPTH * DEPTH
        self.codes = scratch
        self.scales = scratch + whole * BYTE_ROWS
        self.minimums = self.scales + whole // form.group * (4 * BYTE_ROWS)
        self.flags = self.minimums  # types with the one have not the other


def _centered(k: Kernel, form: Form, codes: Value) -> Value:
    """Codes as the product of tiles takes them: with minimums as they are, else signed, or 128 above."""
    if form.has_min:
        return codes
    if k.level.dot == "vnni":
        return codes ^ -128 if form.offset is None else codes + (128 - form.offset)
    return codes - form.offset if form.offset else codes


def _pack_bytes(k: Kernel, form: Form, packed: _Packed, rows: list[Value], size: Value, nb1: Value) -> None:
    tile, first, last = rows
    local = k.local(BYTE_ROWS * DEPTH)
    per_turn = DEPTH // form.block
    n_blocks = size // form.block
    with k.loop(0, n_blocks, per_turn) as begin:
        count = k.least(n_blocks - begin, per_turn)
        with k.loop(0, BYTE_ROWS) as r:
            row = tile + k.least(first + r, last) * nb1
            with k.loop(0, count) as b:
                at = row + (begin + b) * form.nbytes
                for i, run in enumerate(form.codes(k, at)):
                    k.store(_centered(k, form, run), local + r * DEPTH + b * form.block + 32 * i)
                scales, minimums = form.scales(k, at)
                groups = form.block // form.group
                to = (begin + b) * (groups * 4 * BYTE_ROWS) + r * 4
                for g in range(groups):
                    k.store(scales[g], packed.scales + to + g * 4 * BYTE_ROWS)
                    if minimums is not None:
                        k.store(minimums[g], packed.minimums + to + g * 4 * BYTE_ROWS)
        to = packed.codes + begin * (form.block * BYTE_ROWS)
        _transpose(k, local, DEPTH, to, BYTE_ROWS, k.i64(DEPTH // 4))


def _unpack_strip(k: Kernel, dtype: str, packed: _Packed, place: Place, strip: Value) -> None:
    form, n_blocks = FORMS[dtype], place.k // FORMS[dtype].block
    base = place.a + strip * (place.a_nb1 * ROWS)
    row = 4 * ROWS
    with k.loop(0, n_blocks) as block:
        prefetch(k, FIELDS[dtype], (base, n_blocks, block))
        for first in range(0, ROWS, lanes(k.level)):
            at = Strip(k, FIELDS[dtype], base, n_blocks, block, first)
            words = [word for run in form.codes(k, at) for word in run.values]
            to = packed.codes + block * (form.block * ROWS) + 4 * first
            for i, word in enumerate(words):
                k.store(_centered(k, form, word), to + row * i)
            scales, minimums = SCALES[dtype](at)
            to = block * (form.block // form.group * row) + 4 * first
            for g, scale in enumerate(scales):
                k.store(scale, packed.scales + to + row * g)
                if minimums is not None:
                    k.store(minimums[g], packed.minimums + to + row * g)


def quantized(k: Kernel, dtype: str, in_strips: bool, n_columns: int) -> None:
    """Multiply blocks with activations as bytes: arguments of a product, scratch and its size per thread."""
    _quantized(k, dtype, in_strips, n_columns, Place(k, BYTE_ROWS))


def chosen_quantized(k: Kernel, dtype: str, in_strips: bool) -> None:
    """Multiply chosen matrices of blocks; see `matvec.Chosen`."""
    _quantized(k, dtype, in_strips, byte_columns(k.level), Chosen(k, BYTE_ROWS))


def _quantized(k: Kernel, dtype: str, in_strips: bool, n_columns: int, place: Place) -> None:
    form = FORMS[dtype]
    scratch, stride = k.ints(2)
    packed = _Packed(form, place.k, scratch + k.thread * stride)
    with k.loop(place.first, place.last) as tile:
        first = tile * BYTE_ROWS
        if in_strips:
            _unpack_strip(k, dtype, packed, place, tile)
        else:
            _pack_bytes(k, form, packed, [place.a, first, place.m - 1], place.k, place.a_nb1)
        with k.loop(0, place.n, n_columns) as column:
            # Beyond the last row of activations the last one is read again.
            rows = [place.column(k.least(column + c, place.n - 1)) for c in range(n_columns)]
            sums = _multiply_bytes(k, form, packed, rows, place.k)
            _store_tile(k, sums, place, first, column, BYTE_ROWS)


def _multiply_bytes(
    k: Kernel, form: Form, packed: _Packed, rows: list[Value], size: Value
) -> list[list[Value]]:
    """Return the sums for each vector of rows and each column."""
    n, n_columns = k.level.lanes, len(rows)
    vectors = range(0, BYTE_ROWS, n)
    floats, ints = vec(F32, n), vec(I32, n)
    zero = k.const(floats, 0)
    sums = [[k.variable(zero) for _ in range(n_columns)] for _ in vectors]
    columns = [parts(row, size, form.wide) for row in rows]
    dot, flags = Dot(k, n), packed.flags
    if form.wide:
        _any_flags(k, columns, size, flags)
    shifted = k.level.dot == "vnni" and not form.has_min
    with k.loop(0, size >> 5) as block:
        for group in range(32 // form.group):
            per_group = form.group // 16
            at = (block * (32 // form.group) + group) * (4 * BYTE_ROWS)
            counts = [
                sum(
                    (k.load(I32, x.counts + block * 8 + (group + i) * 4) for i in range(1, per_group)),
                    start=k.load(I32, x.counts + block * 8 + group * 4),
                )
                for x in columns
            ]
            starts = [(count * -128).splat(n) if shifted else k.const(ints, 0) for count in counts]

            def add(codes: list[Value], starts: list[Value], times: float, group: int = group) -> None:
                products = [list(starts) for _ in vectors]
                for word in range(group * form.group // 4, (group + 1) * form.group // 4):
                    of = packed.codes + (block * 8 + word) * (4 * BYTE_ROWS)
                    weights = [k.load(vec(I8, 4 * n), of + v * 4, 4) for v in vectors]
                    for c, term in enumerate(codes):
                        x = k.load(I32, term + block * 32 + word * 4).splat(n).bits(vec(I8, 4 * n))
                        for v in range(len(vectors)):
                            products[v][c] = dot.packed(products[v][c], weights[v], x, form.has_min)
                for v, first in enumerate(vectors):
                    scale = k.load(floats, packed.scales + at + first * 4)  # noqa: B023
                    for c, column in enumerate(columns):
                        factor = k.load(F32, column.scales + block * 4) * times
                        slot = sums[v][c]
                        slot.set(k.fma(products[v][c].to_float(), scale * factor.splat(n), slot.now))

            add([x.codes for x in columns], starts, 1.0)
            high = [x.high for x in columns if x.high is not None]
            if high:
                with k.when(k.load(I8, flags + block).zext(I32) > 0):
                    add(high, [k.const(ints, 0)] * n_columns, float(HIGH))
            if not form.has_min:
                continue
            for v, first in enumerate(vectors):
                minimum = k.load(floats, packed.minimums + at + first * 4)
                for c, column in enumerate(columns):
                    if form.group == 32:
                        total = k.load(F32, column.sums + block * 4)
                    else:
                        total = counts[c].to_float() * k.load(F32, column.scales + block * 4)
                    slot = sums[v][c]
                    slot.set(k.fma(minimum, total.splat(n), slot.now))
    return [[slot.now for slot in row] for row in sums]


def _any_flags(k: Kernel, columns: list[Parts], size: Value, to: Value) -> None:
    """Write which blocks have high parts in any of some rows of activations."""
    flags = vec(I8, FLAGS)
    with k.loop(0, size >> 5, FLAGS) as i:
        any_ = k.const(flags, 0)
        for x in columns:
            if x.flags is not None:
                any_ = any_ | k.load(flags, x.flags + i)
        k.store(any_, to + i)


def _store_tile(
    k: Kernel, sums: list[list[Value]], place: Place, first: Value, column: Value, n_rows: int
) -> None:
    """Write what lies inside the result."""
    n = k.level.lanes
    with k.build.if_else((first + n_rows <= place.m).raw) as (whole, partly):
        for inside, context in ((True, whole), (False, partly)):
            with context:
                for c in range(len(sums[0])):
                    with k.when(column + c < place.n):
                        to = place.result(column + c) + first * 4
                        for v, row in enumerate(sums):
                            if inside:
                                k.store(row[c], to + v * n * 4)
                            else:
                                mask = k.first_lanes(n, place.m - first - v * n)
                                k.store_masked(row[c], to + v * n * 4, mask)


# -- floats ----------------------------------------------------------------------------------------


def floats(k: Kernel, dtype: str, b_dtype: str, in_strips: bool, n_columns: int) -> None:
    """Multiply floats with float activations: arguments of a product, scratch and its size per thread."""
    _all_floats(k, (dtype, b_dtype), in_strips, n_columns, Place(k, float_rows(k.level)))


def chosen_floats(k: Kernel, dtype: str, b_dtype: str, in_strips: bool) -> None:
    """Multiply chosen matrices of floats; see `matvec.Chosen`."""
    place = Chosen(k, float_rows(k.level))
    _all_floats(k, (dtype, b_dtype), in_strips, float_columns(k.level), place)


def _all_floats(k: Kernel, types: tuple[str, str], in_strips: bool, n_columns: int, place: Place) -> None:
    (dtype, b_dtype), n_rows, n = types, float_rows(k.level), k.level.lanes
    scratch, stride = k.ints(2)
    packed = scratch + k.thread * stride
    b_size = SIZES[b_dtype]
    with k.loop(place.first, place.last) as tile:
        first = tile * n_rows
        with k.loop(0, place.k, DEPTH) as begin:
            depth = k.least(place.k - begin, DEPTH)
            if in_strips:  # they are as a tile is
                tiles, step, stored = _strip_vectors(k, place, first, begin, SIZES[dtype]), ROWS, dtype
            else:
                _pack_floats(k, dtype, place, first, begin, depth, packed)
                tiles, step, stored = [packed, packed + 4 * n], n_rows, "f32"
            with k.loop(0, place.n, n_columns) as column:
                sums = [[k.variable(k.const(vec(F32, n), 0)) for _ in range(n_columns)] for _ in range(2)]
                # Beyond the last row of activations the last one is read again.
                rows = [
                    place.column(k.least(column + c, place.n - 1)) + begin * b_size for c in range(n_columns)
                ]
                with k.loop(0, depth) as i:
                    if in_strips:
                        for at in tiles:
                            k.prefetch(at + i * (step * SIZES[stored]) + AHEAD)
                    weights = [load_floats(k, stored, at + i * (step * SIZES[stored]), n) for at in tiles]
                    for c, row in enumerate(rows):
                        x = load_float(k, b_dtype, row + i * b_size).splat(n)
                        for v in range(2):
                            sums[v][c].set(k.fma(weights[v], x, sums[v][c].now))
                values = [[slot.now for slot in row] for row in sums]
                with k.when(begin > 0):
                    _add_to_tile(k, values, place, first, column, n_rows)
                with k.when(begin.equals(0)):
                    _store_tile(k, values, place, first, column, n_rows)


def _strip_vectors(k: Kernel, place: Place, first: Value, begin: Value, size: int) -> list[Value]:
    """Where the values of the rows of a tile begin, vector by vector."""
    n, found = k.level.lanes, []
    for v in range(2):
        row = k.least(first + v * n, place.m - n)
        strip = place.a + row // ROWS * ROWS * place.a_nb1
        found.append(strip + begin * (ROWS * size) + row % ROWS * size)
    return found


def _pack_floats(
    k: Kernel, dtype: str, place: Place, first: Value, begin: Value, depth: Value, packed: Value
) -> None:
    n, size = k.level.lanes, SIZES[dtype]
    n_rows = float_rows(k.level)
    for v in range(0, n_rows, n):
        rows = [place.a + k.least(first + v + r, place.m - 1) * place.a_nb1 + begin * size for r in range(n)]
        whole = depth // n * n
        with k.loop(0, whole, n) as i:
            loaded = [load_floats(k, dtype, row + i * size, n) for row in rows]
            for j, column in enumerate(transposed(loaded)):
                k.store(column, packed + (i + j) * (4 * n_rows) + v * 4, 4)
        with k.loop(whole, depth) as i:
            for r, row in enumerate(rows):
                k.store(load_float(k, dtype, row + i * size), packed + i * (4 * n_rows) + (v + r) * 4)


def _add_to_tile(
    k: Kernel, sums: list[list[Value]], place: Place, first: Value, column: Value, n_rows: int
) -> None:
    """Add to what was written for the elements before."""
    n = k.level.lanes
    for c in range(len(sums[0])):
        with k.when(column + c < place.n):
            to = place.result(column + c) + first * 4
            for v, row in enumerate(sums):
                mask = k.first_lanes(n, place.m - first - v * n)
                before = k.load_masked(vec(F32, n), to + v * n * 4, mask)
                k.store_masked(row[c] + before, to + v * n * 4, mask)
