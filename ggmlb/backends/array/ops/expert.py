"""Rows chosen by token and expert."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ggmlb.backends.array.rules import FLOAT, I32, operands, rule, sources
from ggmlb.backends.array.views import View
from ggmlb.enums import Op

if TYPE_CHECKING:
    from ggmlb.backends.array.lowering import Lowering
    from ggmlb.tensor import Tensor


@rule(Op.ADD_ID, operands(FLOAT, FLOAT, I32))
def add_id(lw: Lowering, t: Tensor) -> None:
    """`y[token, i] = a[token, i] + b[ids[token, i]]`: to each row, the one of its expert."""
    a, b, ids = sources(t)
    n, n_used, n_tokens = t.ne[:3]
    rows = lw.scratch((n_tokens, n_used, n), View.of(b).item)
    lw.emit(lw.take_rows, rows[None, None], lw.array(b)[:1, :1], lw.array(ids)[:1, :1])
    chosen, y = lw.view(rows, b.dtype), View.of(t)
    chosen = chosen.reshaped(y.shape, (0, *chosen.strides))
    lw.tiled(lambda y, x, z: lw.xp.add(x, z, out=y), y, View.of(a), chosen)
