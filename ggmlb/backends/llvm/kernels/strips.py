"""Rows of a weight into strips (`interleaved`), and back: small transpositions, in one pass over memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ggmlb.backends.llvm.codegen.simd import SIZES
from ggmlb.backends.llvm.codegen.value import I8, I16, I32, Value, vec
from ggmlb.backends.llvm.kernels.interleaved import BITS, ROWS, fields_of
from ggmlb.backends.llvm.kernels.tiles import transposed

if TYPE_CHECKING:
    from ggmlb.backends.llvm.codegen.emit import Emitter

_INTS = {1: I8, 2: I16, 4: I32}
_VECTOR = 16
"""Bytes of a row that are moved at a time."""


def pack(k: Emitter, dtype: str, size: int) -> None:
    """Write strips of rows whose blocks have `size` bytes: `strips, rows, n_blocks, n_strips`."""
    _move(k, dtype, size, to_rows=False)


def unpack(k: Emitter, dtype: str, size: int) -> None:
    """Write what `pack` was given; arguments as there."""
    _move(k, dtype, size, to_rows=True)


def _move(k: Emitter, dtype: str, size: int, to_rows: bool) -> None:
    strips, rows, n_blocks, n_strips = k.ints(4)
    with k.loop(0, n_strips) as number:
        start = number * n_blocks * (ROWS * size)
        strip, row = strips + start, rows + start

        def blocks(first: Value, stop: Value, n: int) -> None:
            """Move `n` blocks at a time; more than one of floats only."""
            with k.loop(first, stop, n) as block:
                for field in fields_of(dtype):
                    at = strip + block * (ROWS * size) + ROWS * field.offset
                    by_row = [row + n_blocks * (r * size) + block * size + field.offset for r in range(ROWS)]
                    if field.unit == BITS:
                        _turn_bits(k, by_row, at, to_rows)
                    else:
                        _turn(k, by_row, at, field.unit, n * field.nbytes // field.unit, to_rows)

        several = _VECTOR // size if dtype in SIZES else 1
        whole = n_blocks // several * several
        blocks(k.i64(0), whole, several)
        blocks(whole, n_blocks, 1)


def _turn(k: Emitter, rows: list[Value], strip: Value, unit: int, n_units: int, to_rows: bool) -> None:
    """Move units of 16 rows, in squares: as many units as rows."""
    done = 0
    while done < n_units:
        n = min(_VECTOR // unit, 1 << (n_units - done).bit_length() - 1)
        for first in range(0, ROWS, n):
            places = (
                [strip + ((done + i) * ROWS + first) * unit for i in range(n)],
                [rows[first + i] + done * unit for i in range(n)],
            )
            target, source = places[::-1] if to_rows else places
            found = transposed([k.load(vec(_INTS[unit], n), at) for at in source])
            for at, value in zip(target, found, strict=True):
                k.store(value, at)
        done += n


def _turn_bits(k: Emitter, rows: list[Value], strip: Value, to_rows: bool) -> None:
    """Move 32 bits of 16 rows: those of four neighbours, of an even row and the next, make a byte."""
    four, half = vec(I8, 4), range(0, ROWS, 2)
    bytes_, pairs = range(4), vec(I8, ROWS // 2)
    at = [[strip + (ROWS * i + ROWS // 2 * part) for part in range(2)] for i in bytes_]
    if to_rows:
        mixed = [_swapped(*(k.load(pairs, place) for place in places)) for places in at]
        lanes = [low.shuffle([r // 2 + r % 2 * ROWS // 2 for r in range(ROWS)], high) for low, high in mixed]
        for r in range(0, ROWS, 4):
            group = [lane.shuffle(range(r, r + 4)) for lane in lanes]
            for place, value in zip(rows[r : r + 4], transposed(group), strict=True):
                k.store(value, place)
        return
    groups = [transposed([k.load(four, place) for place in rows[r : r + 4]]) for r in range(0, ROWS, 4)]
    for i in bytes_:
        a, b, c, d = (group[i] for group in groups)
        lane = a.join(b).join(c.join(d))
        found = _swapped(lane.shuffle(half), lane.shuffle([r + 1 for r in half]))
        for value, place in zip(found, at[i], strict=True):
            k.store(value, place)


def _swapped(even: Value, odd: Value) -> tuple[Value, Value]:
    """Exchange the upper four bits of the one and the lower four of the other."""
    return (even & 15) | (odd << 4), (even >> 4) | (odd & -16)
