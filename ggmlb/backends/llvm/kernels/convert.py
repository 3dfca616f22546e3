"""Conversion and copies of rows (floats, integers, quantised blocks); get_rows, set_rows and add_id.

Quantising rounds as ggml's reference does (quantize_row_*_ref): comparisons ignore NaN, and NaN or a value
out of range gets code 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

from ggmlb.backends.llvm.codegen.emit import F32, I1, I8, I16, I32, I64, Emitter, Value, vec
from ggmlb.backends.llvm.codegen.simd import (
    SIZES,
    fold,
    greatest,
    load_floats,
    look_up,
    store_floats,
    to_half,
)
from ggmlb.backends.llvm.kernels.blocks import FORMATS, IQ4, Fields
from ggmlb.backends.llvm.kernels.row_loop import each_row, each_vector
from ggmlb.backends.llvm.kernels.tiles import transposed
from ggmlb.core.dtypes import DType

# -- block writers: 32 floats to a block ------------------------------------------------------------

MOST_FLOAT = 3.4028234663852886e38
"""The largest number in float32."""


def _inverse(k: Emitter, d: Value) -> Value:
    """Return `1 / d` in each lane; 0 where `d` is 0."""
    return k.select(d.equals(0.0), k.const(F32, 0), 1.0 / d).splat(32)


def _magnitude(k: Emitter, x: Value) -> Value:
    """Return the largest absolute value, ignoring NaN."""
    return greatest(k, k.maximum(k.generic("fabs", x), 0.0))


def _largest(k: Emitter, x: Value) -> Value:
    """The first value of largest magnitude; 0 if all are 0 or NaN."""
    magnitude = _magnitude(k, x)
    return k.select(magnitude > 0.0, _first(k, x, k.generic("fabs", x).equals(magnitude.splat(32))), 0.0)


def _first(k: Emitter, x: Value, mask: Value) -> Value:
    """The value in the first lane set in a mask; any value if none is."""
    return x[k.call("llvm.cttz.i32", I32, mask.bits(I32), k.const(I1, 0)) & 31]


def _codes(k: Emitter, x: Value, most: int) -> Value:
    """`x` truncated to codes of at most `most`; 0 where it is NaN or out of range."""
    is_code = (x > -1.0) & (x < 256.0)
    return k.minimum(k.select(is_code, x, 0.0).to_int(), most).trunc(I8)


def _total_in_order(x: Value) -> Value:
    """The sum of the lanes, added in order, as ggml does."""
    total = x[0]
    for lane in range(1, 32):
        total = total + x[lane]
    return total


def _put_codes(at: Fields, k: Emitter, codes: Value, p: Value) -> None:
    """Store codes of four bits, or of five."""
    if "qh" in at:
        k.store(((codes & 16) > 0).bits(I32), p + at["qh"])
    low, high = (codes & 15).split()
    k.store(low | (high << 4), p + at["qs"])


def _q8_0(at: Fields, k: Emitter, x: Value, p: Value) -> None:
    d = _magnitude(k, x) / 127.0
    k.store(to_half(k, d), p + at["d"])
    codes = k.generic("round", x * _inverse(k, d))
    is_code = k.generic("fabs", codes) < 129.0
    k.store(k.select(is_code, codes, 0.0).to_int().trunc(I8), p + at["qs"])


def _symmetric(at: Fields, k: Emitter, x: Value, p: Value) -> None:
    """q4_0 and q5_0: the value of largest magnitude has the lowest code."""
    half = 16 if "qh" in at else 8
    d = _largest(k, x) / float(-half)
    codes = _codes(k, x.times(_inverse(k, d)) + (half + 0.5), 2 * half - 1)
    k.store(to_half(k, d), p + at["d"])
    _put_codes(at, k, codes, p)


def _from_least(at: Fields, k: Emitter, x: Value, p: Value) -> None:
    """q4_1 and q5_1: the least value has code 0."""
    most, end = 31 if "qh" in at else 15, k.const(x.type, MOST_FLOAT)
    least = fold(k.select(x < end, x, end), k.minimum)
    least = k.select(least.equals(0.0), _first(k, x, x.equals(0.0)), least)
    d = (greatest(k, k.select(x > -end, x, -end)) - least) / float(most) + 0.0  # turns -0 into +0
    codes = _codes(k, (x - least.splat(32)).times(_inverse(k, d)) + 0.5, most)
    k.store(to_half(k, d), p + at["d"])
    k.store(to_half(k, least), p + at["m"])
    _put_codes(at, k, codes, p)


def _iq4_nl(at: Fields, k: Emitter, x: Value, p: Value) -> None:
    """Nearest table value for each element; then the scale of least error, weighted by the squares."""
    largest = _largest(k, x)
    d = largest / float(IQ4[0])
    scaled = x * _inverse(k, d)
    codes = k.const(vec(I32, 32), 15)
    for low, high in pairwise(IQ4):
        codes = codes - (scaled < (low + high) / 2).zext(I32)  # NaN gets the last code, as in ggml
    codes = codes.trunc(I8)
    levels = look_up(k, IQ4, codes).sext(I32).to_float()
    weighed = x.times(x).times(levels)
    squares = _total_in_order(weighed.times(levels))
    fitting = k.select(squares > 0.0, _total_in_order(weighed.times(x)) / squares, 0.0)
    k.store(to_half(k, k.select(k.generic("fabs", largest) < 1e-15, k.const(F32, 0), fitting)), p + at["d"])
    _put_codes(at, k, codes, p)


WRITERS: dict[str, Callable[[Emitter, Value, Value], None]] = {
    name: partial(write, DType.parse(name).codec.offsets)
    for name, write in (
        ("q4_0", _symmetric), ("q4_1", _from_least), ("q5_0", _symmetric), ("q5_1", _from_least),
        ("q8_0", _q8_0), ("iq4_nl", _iq4_nl),
    )
}  # fmt: skip
"""Writers of a quantised block, by type: `write(kernel, 32 floats, address)`."""

# -- rows ------------------------------------------------------------------------------------------

WORDS = {"i8": I8, "i16": I16, "i32": I32, "i64": I64, "f64": I64}
"""Types that are copied but not converted, and the integer types used to copy them."""

_MOVED = {**WORDS, "f32": I32, "f16": I16, "bf16": I16}


def can_convert(src: str, out: str) -> bool:
    """Whether rows of type `src` can be converted to type `out`."""
    if src == out and (src in _MOVED or src in FORMATS):
        return True
    if out in SIZES:
        return src in SIZES or src in FORMATS
    return src in SIZES and out in WRITERS


def convert(k: Emitter, out: str, src: str, y: Value, x: Value, start: Value, stop: Value) -> None:
    """Convert elements `start` to `stop - 1` of the row at `x` to the row at `y`."""
    if src == out and src in FORMATS:
        form = FORMATS[src]
        offset, end = (i // form.block * form.nbytes for i in (start, stop))
        _move(k, I8, y, x, offset, end)
    elif src == out:
        _move(k, _MOVED[src], y, x, start, stop)
    elif src in FORMATS:
        _read_blocks(k, out, src, y, x, start, stop)
    elif out in WRITERS:
        _write_blocks(k, out, src, y, x, start, stop)
    else:
        n = k.level.lanes

        def body(i: Value, mask: Value | None) -> None:
            values = load_floats(k, src, x + i * SIZES[src], n, mask)
            store_floats(k, out, values, y + i * SIZES[out], mask)

        each_vector(k, start, stop, body)


def repeat_each(k: Emitter, out: str, src: str, times: int) -> None:
    """Write each element of rows `times` times. Arguments: `row_loop`'s, for result and operand."""
    n = k.level.lanes
    with each_row(k, 2) as row:

        def body(i: Value, mask: Value | None) -> None:
            values = load_floats(k, src, row.at[1] + i * SIZES[src], n, mask)
            for at in range(0, times * n, n):
                some = None if mask is None else k.first_lanes(n, (row.stop - i) * times - at)
                several = values.shuffle([j // times for j in range(at, at + n)])
                store_floats(k, out, several, row.at[0] + (i * times + at) * SIZES[out], some)

        each_vector(k, row.start, row.stop, body)


def _move(k: Emitter, word: Value, y: Value, x: Value, start: Value, stop: Value) -> None:
    size = word.width // 8  # type: ignore[attr-defined]
    n = 4 * k.level.lanes // size
    whole = start + (stop - start) // n * n
    with k.loop(start, whole, n) as i:
        k.store(k.load(vec(word, n), x + i * size), y + i * size)
    with k.loop(whole, stop) as i:
        k.store(k.load(word, x + i * size), y + i * size)


def _read_blocks(k: Emitter, out: str, src: str, y: Value, x: Value, start: Value, stop: Value) -> None:
    form = FORMATS[src]
    with k.loop(start // form.block, stop // form.block) as block:
        at = x + block * form.nbytes
        codes = form.codes(k, at)
        scales, minimums = form.scales(k, [at])
        for i, run in enumerate(codes):
            group = [(32 * i + j) // form.group for j in range(32)]
            wide = run.sext(I32) if form.offset is None else run.zext(I32) - form.offset
            values = wide.to_float() * scales.shuffle(group)
            if minimums is not None:
                values = values + minimums.shuffle(group)
            store_floats(k, out, values, y + (block * form.block + 32 * i) * SIZES[out])


def _write_blocks(k: Emitter, out: str, src: str, y: Value, x: Value, start: Value, stop: Value) -> None:
    size = FORMATS[out].nbytes
    with k.loop(start // 32, (stop + 31) // 32) as block:
        WRITERS[out](k, load_floats(k, src, x + block * (32 * SIZES[src]), 32), y + block * size)


def copy(k: Emitter, out: str, src: str) -> None:
    """Copy contiguous rows, converted from type `src` to `out`. Arguments: `row_loop`'s for `y, x`."""
    with each_row(k, 2) as row:
        convert(k, out, src, row.at[0], row.at[1], row.start, row.stop)


def copy_strided(k: Emitter, out: str, src: str) -> None:
    """Copy rows with strided elements, converted from type `src` to `out`.

    Arguments: `y_nb0, x_nb0`, then `row_loop`'s for `y, x`.
    """
    y_step, x_step = k.ints(2)
    with each_row(k, 2) as row, k.loop(row.start, row.stop) as i:
        y, x = row.at[0] + i * y_step, row.at[1] + i * x_step
        if src == out:
            k.store(k.load(_MOVED[src], x), y)
        else:
            value = load_floats(k, src, x, 1)
            store_floats(k, out, value, y)


def transpose(k: Emitter) -> None:
    """Transpose 32-bit elements: rows are contiguous in the result, columns in the source.

    Arguments: `y, y_nb1, y_nb2, y_nb3, x, x_nb0, x_nb2, x_nb3, ne0, ne1, ne2, ne3`.
    """
    y, y_nb1, y_nb2, y_nb3, x, x_nb0, x_nb2, x_nb3, n0, n1, n2, n3 = k.ints(12)
    n, n_outer = k.level.lanes, n2 * n3
    words = vec(I32, n)
    bands = (n1 + (n - 1)) // n
    with k.units(bands * n_outer) as unit:
        band, outer = unit % bands * n, unit // bands
        i2, i3 = outer % n2, outer // n2
        source = x + i2 * x_nb2 + i3 * x_nb3 + band * 4
        target = y + i2 * y_nb2 + i3 * y_nb3 + band * y_nb1
        n_rows = k.least(n1 - band, n)
        whole = k.select(n_rows.equals(n), n0 // n * n, 0)
        with k.loop(0, whole, n) as i:
            found = transposed([k.load(words, source + (i + r) * x_nb0) for r in range(n)])
            for r, row in enumerate(found):
                k.store(row, target + y_nb1 * r + i * 4)
        inside = k.first_lanes(n, n_rows)
        with k.loop(whole, n0, n) as i:
            at = [source + k.least(i + r, n0 - 1) * x_nb0 for r in range(n)]
            mask = k.first_lanes(n, n0 - i)
            for r, row in enumerate(transposed([k.load_masked(words, a, inside) for a in at])):
                with k.when(n_rows > r):
                    k.store_masked(row, target + y_nb1 * r + i * 4, mask)


def row_number(
    k: Emitter, ids: Value, dtype: str, limit: Value, report: tuple[Value, Value]
) -> tuple[Value, Value]:
    """Load a row index; return it (0 if invalid, after a report) and whether it is in `range(limit)`."""
    index = k.load(I64, ids) if dtype == "i64" else k.load(I32, ids).sext(I64)
    bad = (index < 0).raw
    bad = Value(k, k.build.or_(bad, (index >= limit).raw))
    errors, step = report
    with k.when(bad):
        for i, value in enumerate((index, limit, step)):
            k.store(value, errors + 8 * i)
    return k.select(bad, k.i64(0), index), Value(k, k.build.not_(bad.raw))


def get_rows(k: Emitter, out: str, src: str, index: str) -> None:
    """Gather rows by indices of type `index`, converted from type `src` to `out`.

    Arguments: `a, nb1..3, ids, nb0..2, limit, errors, step`; `row_loop`'s for `y`.
    """
    a, a_nb1, a_nb2, a_nb3, ids, nb0, nb1, nb2, limit, errors, step = k.ints(11)
    with each_row(k, 1) as row:
        i1, i2, i3 = row.place
        number, right = row_number(k, ids + i1 * nb0 + i2 * nb1 + i3 * nb2, index, limit, (errors, step))
        with k.when(right):
            x = a + number * a_nb1 + i2 * a_nb2 + i3 * a_nb3
            convert(k, out, src, row.at[0], x, row.start, row.stop)


def set_rows(k: Emitter, out: str, src: str, index: str) -> None:
    """Scatter rows by indices of type `index`, converted from type `src` to `out`.

    Arguments: `y, nb1..3, ids, nb0..2, ne1, ne2, limit, errors, step`; `row_loop`'s for `x`.
    """
    y, y_nb1, y_nb2, y_nb3, ids, nb0, nb1, nb2, ne1, ne2, limit, errors, step = k.ints(13)
    with each_row(k, 1) as row:
        i1, i2, i3 = row.place
        at = ids + i1 * nb0 + i2 % ne1 * nb1 + i3 % ne2 * nb2
        number, right = row_number(k, at, index, limit, (errors, step))
        with k.when(right):
            target = y + number * y_nb1 + i2 * y_nb2 + i3 * y_nb3
            convert(k, out, src, target, row.at[0], row.start, row.stop)


def add_id(k: Emitter, dtypes: Sequence[str]) -> None:
    """Add to each row of `x` the row of `b` of its index.

    Arguments: `b, nb1, ids, nb0, nb1, limit, errors, step`, then `row_loop`'s for `y, x`.
    """
    n, (out, src, bias) = k.level.lanes, dtypes
    b, b_nb1, ids, nb0, nb1, limit, errors, step = k.ints(8)
    with each_row(k, 2) as row:
        i1, i2, _ = row.place
        number, is_right = row_number(k, ids + i1 * nb0 + i2 * nb1, "i32", limit, (errors, step))

        def body(i: Value, mask: Value | None) -> None:
            value = load_floats(k, src, row.at[1] + i * SIZES[src], n, mask)
            value = value + load_floats(k, bias, b + number * b_nb1 + i * SIZES[bias], n, mask)
            store_floats(k, out, value, row.at[0] + i * SIZES[out], mask)

        with k.when(is_right):
            each_vector(k, row.start, row.stop, body)
