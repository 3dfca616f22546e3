"""Products of bytes in AMX tile registers: 16 rows of activations by 16 rows of a weight.

One register holds activations, one the weight (four neighbouring codes per row, as in packed tiles and
strips), and one the 32-bit sums. A product covers elements with one common scale; the sums go through memory
to vector code, which scales them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from llvmlite import ir

from ggmlb.backends.llvm.codegen.emit import I8, Emitter, Value, vec

ROWS = 16
"""Rows of a tile register, and rows of the weight per product."""

ROW_NBYTES = 64

_SUMS, _CODES, _WEIGHTS = range(3)
"""Numbers of the tile registers."""


@contextmanager
def tiles(k: Emitter, n_rows: int, depth: int) -> Iterator[None]:
    """Context manager: AMX tiles are configured for `n_rows` rows of activations of `depth` bytes."""
    shapes = {_SUMS: (n_rows, ROW_NBYTES), _CODES: (n_rows, depth), _WEIGHTS: (depth // 4, ROW_NBYTES)}
    config = [0] * 64
    config[0] = 1
    for number, (rows, nbytes) in shapes.items():
        config[16 + 2 * number] = nbytes
        config[48 + number] = rows
    at = k.local(64)
    k.store(k.table(vec(I8, 64), config), at)
    _call(k, "ldtilecfg", _pointer(k, at))
    yield
    _call(k, "tilerelease")


def product(k: Emitter, rows: Value, step: Value, weights: Value, unsigned: bool, to: Value) -> None:
    """Multiply int8 rows, `step` bytes apart, by a tile of weight codes, signed or `unsigned`; write to `to`.

    The sums at `to` are `ROW_NBYTES` per row of activations: an int32 per row of the weight.
    """
    _call(k, "tilezero", _number(k, _SUMS))
    _call(k, "tileloadd64", _number(k, _CODES), _pointer(k, rows), step)
    _call(k, "tileloadd64", _number(k, _WEIGHTS), _pointer(k, weights), k.i64(ROW_NBYTES))
    name = "tdpbsud" if unsigned else "tdpbssd"
    _call(k, name, *(_number(k, n) for n in (_SUMS, _CODES, _WEIGHTS)))
    _call(k, "tilestored64", _number(k, _SUMS), _pointer(k, to), k.i64(ROW_NBYTES))


def _call(k: Emitter, name: str, *args: Value) -> None:
    k.call(f"llvm.x86.{name}", ir.VoidType(), *args)


def _number(k: Emitter, register: int) -> Value:
    return k.const(I8, register)


def _pointer(k: Emitter, address: Value) -> Value:
    return Value(k, k.build.inttoptr(address.raw, I8.as_pointer()))
