"""Reading and writing rows by index."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from ggmlb.backends.cpu.array.casts import CAST
from ggmlb.backends.cpu.array.rules import FLOAT, I32, INDEX, VALUE, Types, operands, rule
from ggmlb.backends.cpu.array.views import View
from ggmlb.core.dtypes import DType
from ggmlb.core.enums import Op
from ggmlb.core.tensor import Tensor

if TYPE_CHECKING:
    from ggmlb.backends.cpu.array.lowering import Lowering

ROWS = Types(FLOAT.plain | I32.plain, quantized=True)


@rule(Op.GET_ROWS, operands(ROWS, INDEX, out=Types(FLOAT.plain | I32.plain)))
def get_rows(lw: Lowering, t: Tensor) -> None:
    """Row `b[i]` of `a`, in each matrix of a batch."""
    a, b = t.sources
    rows, x = lw.array(a), View.of(a)
    y = lw.array(t)
    if x.type == t.dtype:
        lw.emit(lw.take_rows, y, rows, lw.array(b)[0])
        return
    raw = lw.scratch((*y.shape[:3], x.shape[3]), x.item)
    lw.emit(lw.take_rows, raw, rows, lw.array(b)[0])
    lw.copy(View.of(t), lw.view(raw, x.type))


@rule(Op.SET_ROWS, operands(FLOAT, INDEX, out=VALUE))
def set_rows(lw: Lowering, t: Tensor) -> None:
    """Row `i` of `b` becomes row `c[i]` of the result, in its type."""
    b, c = t.sources[:2]
    rows = View.of(t)
    index = lw.array(c)[0]
    n_halves = prod(b.ne) if (b.dtype, t.dtype) == (DType.F32, DType.F16) else 0
    # Many values are better converted first, by all threads; few, such as a token's keys, on their way.
    if b.dtype == t.dtype or (n_halves and lw.workers(n_halves * CAST) == 1):
        lw.emit(lw.put_rows, lw.bind(rows), lw.array(b), index)
        return
    raw = lw.scratch((*b.ne[:0:-1], rows.shape[3]), rows.item)
    lw.copy(lw.view(raw, t.dtype), View.of(b))
    lw.emit(lw.put_rows, lw.bind(rows), raw, index)


@rule(Op.GET_ROWS_BACK, operands(FLOAT, I32))
def get_rows_back(lw: Lowering, t: Tensor) -> None:
    """The sum of the rows `i` of `a` with `b[i] = j`, in row `j`."""
    a, b = t.sources[:2]
    x, index, y = lw.f32(a)[0, 0], lw.array(b)[0, 0, 0], lw.out_f32(t)
    lw.emit(y.fill, 0)
    lw.emit(lw.add_rows, y[0, 0], x, index)
    lw.store(t, y)
