"""Rows from one type to another: floats, integers moved, blocks read and written."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ggmlb.backends.llvm.codegen.simd import SIZES, load_floats, store_floats
from ggmlb.backends.llvm.codegen.value import I8, I16, I32, I64, Value, vec
from ggmlb.backends.llvm.kernels.blocks import FORMS
from ggmlb.backends.llvm.kernels.quantize import WRITERS
from ggmlb.backends.llvm.kernels.tiles import transposed
from ggmlb.backends.llvm.kernels.walk import lanes, rows

if TYPE_CHECKING:
    from ggmlb.backends.llvm.codegen.emit import Emitter

WORDS = {"i8": I8, "i16": I16, "i32": I32, "i64": I64, "f64": I64}
"""Types whose elements are only moved, by the integers that do it."""

_MOVED = {**WORDS, "f32": I32, "f16": I16, "bf16": I16}


def can_convert(src: str, out: str) -> bool:
    """Whether rows of one type become rows of the other."""
    if src == out and (src in _MOVED or src in FORMS):
        return True
    if out in SIZES:
        return src in SIZES or src in FORMS
    return src in SIZES and out in WRITERS


def convert(k: Emitter, out: str, src: str, y: Value, x: Value, start: Value, stop: Value) -> None:
    """Convert the elements from `start` on below `stop` of the row at `x` into the one at `y`."""
    if src == out and src in FORMS:
        form = FORMS[src]
        offset, end = (i // form.block * form.nbytes for i in (start, stop))
        _move(k, I8, y, x, offset, end)
    elif src == out:
        _move(k, _MOVED[src], y, x, start, stop)
    elif src in FORMS:
        _read_blocks(k, out, src, y, x, start, stop)
    elif out in WRITERS:
        _write_blocks(k, out, src, y, x, start, stop)
    else:
        n = k.level.lanes

        def body(i: Value, mask: Value | None) -> None:
            values = load_floats(k, src, x + i * SIZES[src], n, mask)
            store_floats(k, out, values, y + i * SIZES[out], mask)

        lanes(k, start, stop, body)


def _move(k: Emitter, word: Value, y: Value, x: Value, start: Value, stop: Value) -> None:
    size = word.width // 8  # type: ignore[attr-defined]
    n = 4 * k.level.lanes // size
    whole = start + (stop - start) // n * n
    with k.loop(start, whole, n) as i:
        k.store(k.load(vec(word, n), x + i * size), y + i * size)
    with k.loop(whole, stop) as i:
        k.store(k.load(word, x + i * size), y + i * size)


def _read_blocks(k: Emitter, out: str, src: str, y: Value, x: Value, start: Value, stop: Value) -> None:
    form = FORMS[src]
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
    size = FORMS[out].nbytes
    with k.loop(start // 32, (stop + 31) // 32) as block:
        WRITERS[out](k, load_floats(k, src, x + block * (32 * SIZES[src]), 32), y + block * size)


def copy(k: Emitter, out: str, src: str) -> None:
    """Convert rows: operands `y, x`."""
    with rows(k, 2) as row:
        convert(k, out, src, row.at[0], row.at[1], row.start, row.stop)


def copy_strided(k: Emitter, out: str, src: str, sizes: tuple[int, int]) -> None:
    """Copy elements that lie apart: `y_nb0, x_nb0` before the walk of `y, x`."""
    y_step, x_step = k.ints(2)
    with rows(k, 2) as row, k.loop(row.start, row.stop) as i:
        y, x = row.at[0] + i * y_step, row.at[1] + i * x_step
        if src == out:
            k.store(k.load(_MOVED[src], x), y)
        else:
            value = load_floats(k, src, x, 1)
            store_floats(k, out, value, y)


def copy_turned(k: Emitter) -> None:
    """Copy words of 32 bits that lie side by side in the source into rows of the result, whose they are not.

    Arguments: `y`, its byte stride from row to row and in two more dimensions; `x`, its byte stride along the
    result's rows and in these two; then the elements of a row, the rows, and the two other extents.
    """
    y, y_nb1, y_nb2, y_nb3, x, x_nb0, x_nb2, x_nb3, n0, n1, n2, n3 = k.ints(12)
    n, n_outer = k.level.lanes, n2 * n3
    words = vec(I32, n)
    bands = (n1 + (n - 1)) // n
    work = bands * n_outer
    with k.loop(work * k.chunk // k.n_chunks, work * (k.chunk + 1) // k.n_chunks) as unit:
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
    """Read a row number; report one that is out of bounds, and return 0 then, and whether it was right."""
    index = k.load(I64, ids) if dtype == "i64" else k.load(I32, ids).sext(I64)
    bad = (index < 0).raw
    bad = Value(k, k.build.or_(bad, (index >= limit).raw))
    errors, step = report
    with k.when(bad):
        for i, value in enumerate((index, limit, step)):
            k.store(value, errors + 8 * i)
    return k.select(bad, k.i64(0), index), Value(k, k.build.not_(bad.raw))


def get_rows(k: Emitter, out: str, src: str, index: str) -> None:
    """Rows by number: `a, nb1, nb2, nb3, ids, nb0, nb1, nb2, limit, errors, step`, the walk of `y`."""
    a, a_nb1, a_nb2, a_nb3, ids, nb0, nb1, nb2, limit, errors, step = k.ints(11)
    with rows(k, 1) as row:
        i1, i2, i3 = row.place
        number, right = row_number(k, ids + i1 * nb0 + i2 * nb1 + i3 * nb2, index, limit, (errors, step))
        with k.when(right):
            x = a + number * a_nb1 + i2 * a_nb2 + i3 * a_nb3
            convert(k, out, src, row.at[0], x, row.start, row.stop)


def set_rows(k: Emitter, out: str, src: str, index: str) -> None:
    """Put rows by number: `y, nb1, nb2, nb3, ids, nb0, nb1, nb2, ne1, ne2, limit, errors, step`, then `x`."""
    y, y_nb1, y_nb2, y_nb3, ids, nb0, nb1, nb2, ne1, ne2, limit, errors, step = k.ints(13)
    with rows(k, 1) as row:
        i1, i2, i3 = row.place
        at = ids + i1 * nb0 + i2 % ne1 * nb1 + i3 % ne2 * nb2
        number, right = row_number(k, at, index, limit, (errors, step))
        with k.when(right):
            target = y + number * y_nb1 + i2 * y_nb2 + i3 * y_nb3
            convert(k, out, src, target, row.at[0], row.start, row.stop)
