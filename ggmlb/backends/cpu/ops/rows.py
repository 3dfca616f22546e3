"""Reading, writing and adding rows by index."""

from __future__ import annotations

from math import prod

import numpy as np

from ggmlb.backends.common.rules import BLOCKS, FLOATS, I32, INDEX, operands
from ggmlb.backends.common.workspace import Array
from ggmlb.backends.cpu.kernels import CAST, add_rows, put_rows, take_rows
from ggmlb.backends.cpu.lowering import RULES, STORED, VALUES, NodeLowering
from ggmlb.backends.cpu.views import cuts
from ggmlb.core.dtypes import DType
from ggmlb.core.enums import Op
from ggmlb.core.tensor import Tensor

ROWS = FLOATS | I32 | BLOCKS


@RULES.rule(Op.GET_ROWS, operands(ROWS, INDEX, out=FLOATS | I32))
def get_rows(lw: NodeLowering, t: Tensor) -> None:
    """Row `b[i]` of `a`, in each matrix of a batch."""
    a, b = t.sources
    x, index, y = lw.view(a), lw.view(b)[0], lw.view(t)
    raw = y if x.type is t.dtype else lw.scratch((*y.shape[:3], x.shape[3]), x.item, x.type)
    lw.emit(take_rows, raw, x, index)
    if raw is not y:
        lw.copy(y, raw)


@RULES.rule(Op.SET_ROWS, operands(FLOATS, INDEX, out=STORED & VALUES))
def set_rows(lw: NodeLowering, t: Tensor) -> None:
    """Row `i` of `b` becomes row `c[i]` of the result, in its type."""
    b, c = t.sources[:2]
    rows = lw.view(t)
    index = lw.view(c)[0]
    n_halves = prod(b.ne) if (b.dtype, t.dtype) == (DType.F32, DType.F16) else 0
    # Convert many values first, on all threads; few, as a token's keys, while copying.
    if b.dtype == t.dtype or (n_halves and lw.workers(n_halves * CAST) == 1):
        lw.emit(put_rows, rows, lw.view(b), index)
        return
    raw = lw.scratch((*b.ne[:0:-1], rows.shape[3]), rows.item, rows.type)
    lw.copy(raw, lw.view(b))
    lw.emit(put_rows, rows, raw, index)


@RULES.rule(Op.GET_ROWS_BACK, operands(FLOATS, I32))
def get_rows_back(lw: NodeLowering, t: Tensor) -> None:
    """Sum the rows of `a` by index: row `j` of the result is the sum of all rows `i` with `b[i] = j`."""
    a, b = t.sources[:2]
    x, index, y = lw.f32(lw.view(a)), lw.view(b), lw.out_f32(t)
    lw.emit(np.ndarray.fill, y, 0)
    lw.emit(add_rows, y[0, 0], x[0, 0], index[0, 0, 0])
    lw.store(t, y)


@RULES.rule(Op.ADD_ID, operands(FLOATS, FLOATS, I32))
def add_id(lw: NodeLowering, t: Tensor) -> None:
    """Add to each row the bias row of its expert: `y[token, i] = a[token, i] + b[ids[token, i]]`."""
    (a, b, ids) = t.sources
    n, n_used, n_tokens = t.ne[:3]
    bias, x = (lw.f32(lw.view(s)) for s in (b, a))
    chosen, y = lw.view(ids)[:1, :1], lw.out_f32(t)
    pieces = [piece for (piece,) in cuts((n_tokens,), n * n_used, lw.tile)]
    scratch = lw.scratch((1, 1, max(count for _, count in pieces), n_used, n))

    def kernel(y: Array, x: Array, bias: Array, ids: Array, rows: Array) -> None:
        take_rows(rows, bias, ids)
        np.add(x, rows[0], out=y)

    for start, count in pieces:
        here = slice(start, start + count)
        lw.emit(kernel, y[:, here], x[:, here], bias[:1, :1], chosen[:, :, here], scratch[:, :, :count])
    lw.store(t, y)
