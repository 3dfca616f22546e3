"""Repeating and joining."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ggmlb.backends.cpu.array.rules import FLOAT, operands, rule, same_types
from ggmlb.backends.cpu.array.views import View, broadcast
from ggmlb.core.enums import Op
from ggmlb.core.tensor import Tensor

if TYPE_CHECKING:
    from ggmlb.backends.cpu.array.lowering import Lowering


@rule(Op.REPEAT, same_types)
def repeat(lw: Lowering, t: Tensor) -> None:
    """`a`, tiled over the shape of the result."""
    y, x = broadcast([View.of(t), View.of(t.sources[0])])
    lw.copy(y, x)


@rule(Op.REPEAT_BACK, operands(FLOAT))
def repeat_back(lw: Lowering, t: Tensor) -> None:
    """The sum of all tiles of `a` that have the shape of the result."""
    (a,) = t.sources
    x, y = lw.f32(a), lw.out_f32(t)
    shape = [n for d in range(4) for n in (a.ne[3 - d] // t.ne[3 - d], t.ne[3 - d])]
    lw.emit(lambda: lw.xp.sum(x.reshape(shape), axis=(0, 2, 4, 6), out=y))
    lw.store(t, y)


@rule(Op.CONCAT, same_types)
def concat(lw: Lowering, t: Tensor) -> None:
    """`a`, then `b` along dimension `dim`."""
    axis, y, start = 3 - t.params["dim"], View.of(t), 0
    for s in t.sources:
        x = View.of(s)
        n = x.shape[axis]
        lw.copy(y.cut(axis, start, n), x)
        start += n
