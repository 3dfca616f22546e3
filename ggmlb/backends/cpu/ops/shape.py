"""Repeating and joining."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ggmlb.backends.common.rules import FLOATS, operands, same_types
from ggmlb.backends.cpu.rules import RULES
from ggmlb.backends.cpu.views import View, broadcast
from ggmlb.core.enums import Op
from ggmlb.core.tensor import Tensor

if TYPE_CHECKING:
    from ggmlb.backends.cpu.lowering import CpuLowering


@RULES.rule(Op.REPEAT, same_types)
def repeat(lw: CpuLowering, t: Tensor) -> None:
    """`a`, tiled over the shape of the result."""
    y, x = broadcast([View.of(t), View.of(t.sources[0])])
    lw.copy(y, x)


@RULES.rule(Op.REPEAT_BACK, operands(FLOATS))
def repeat_back(lw: CpuLowering, t: Tensor) -> None:
    """The sum of all tiles of `a` that have the shape of the result."""
    (a,) = t.sources
    x, y = lw.f32(a), lw.out_f32(t)
    shape = [n for d in range(4) for n in (a.ne[3 - d] // t.ne[3 - d], t.ne[3 - d])]
    lw.emit(lambda: np.sum(x.reshape(shape), axis=(0, 2, 4, 6), out=y))
    lw.store(t, y)


@RULES.rule(Op.CONCAT, same_types)
def concat(lw: CpuLowering, t: Tensor) -> None:
    """`a`, then `b` along dimension `dim`."""
    axis, y, start = 3 - t.params["dim"], View.of(t), 0
    for s in t.sources:
        x = View.of(s)
        n = x.shape[axis]
        lw.copy(y.cut(axis, start, n), x)
        start += n
