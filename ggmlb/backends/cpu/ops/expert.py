"""Rows chosen by token and expert."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ggmlb.backends.common.rules import FLOATS, I32, operands
from ggmlb.backends.cpu.rules import RULES
from ggmlb.backends.cpu.views import cuts
from ggmlb.core.enums import Op
from ggmlb.core.tensor import Tensor

if TYPE_CHECKING:
    from ggmlb.backends.common.workspace import Array
    from ggmlb.backends.cpu.lowering import CpuLowering


@RULES.rule(Op.ADD_ID, operands(FLOATS, FLOATS, I32))
def add_id(lw: CpuLowering, t: Tensor) -> None:
    """`y[token, i] = a[token, i] + b[ids[token, i]]`: to each row, the one of its expert."""
    (a, b, ids) = t.sources
    n, n_used, n_tokens = t.ne[:3]
    bias, chosen, x, y = lw.f32(b)[:1, :1], lw.array(ids)[:1, :1], lw.f32(a), lw.out_f32(t)
    pieces = [piece for (piece,) in cuts((n_tokens,), n * n_used, lw.tile)]
    scratch = lw.scratch((1, 1, max(count for _, count in pieces), n_used, n))

    def step(y: Array, x: Array, ids: Array, rows: Array) -> None:
        lw.take_rows(rows, bias, ids)
        np.add(x, rows[0], out=y)

    for start, count in pieces:
        here = slice(start, start + count)
        lw.emit(step, y[:, here], x[:, here], chosen[:, :, here], scratch[:, :, :count])
    lw.store(t, y)
