"""Reading and writing rows by index."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from ggmlb.backends.common.rules import BLOCKS, FLOATS, I32, INDEX, operands
from ggmlb.backends.cpu.casts import CAST
from ggmlb.backends.cpu.rules import RULES, STORED, VALUES
from ggmlb.backends.cpu.views import View
from ggmlb.core.dtypes import DType
from ggmlb.core.enums import Op
from ggmlb.core.tensor import Tensor

if TYPE_CHECKING:
    from ggmlb.backends.cpu.lowering import CpuLowering

ROWS = FLOATS | I32 | BLOCKS


@RULES.rule(Op.GET_ROWS, operands(ROWS, INDEX, out=FLOATS | I32))
def get_rows(lw: CpuLowering, t: Tensor) -> None:
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


@RULES.rule(Op.SET_ROWS, operands(FLOATS, INDEX, out=STORED & VALUES))
def set_rows(lw: CpuLowering, t: Tensor) -> None:
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


@RULES.rule(Op.GET_ROWS_BACK, operands(FLOATS, I32))
def get_rows_back(lw: CpuLowering, t: Tensor) -> None:
    """The sum of the rows `i` of `a` with `b[i] = j`, in row `j`."""
    a, b = t.sources[:2]
    x, index, y = lw.f32(a)[0, 0], lw.array(b)[0, 0, 0], lw.out_f32(t)
    lw.emit(y.fill, 0)
    lw.emit(lw.add_rows, y[0, 0], x, index)
    lw.store(t, y)
