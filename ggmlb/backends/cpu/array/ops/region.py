"""Writing to a window of a tensor: the shape of `b`, at a byte offset, with byte strides of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ggmlb.backends.cpu.array.rules import F32, PLAIN, operands, rule
from ggmlb.backends.cpu.array.views import View
from ggmlb.core.enums import Op
from ggmlb.core.tensor import Tensor

if TYPE_CHECKING:
    from ggmlb.backends.cpu.array.lowering import Lowering


def _window(lw: Lowering, t: Tensor) -> View:
    """Emit the copy of `a`, unless the result is `a` itself, and return the window of the result."""
    a, b = t.sources
    p, y = t.params, View.of(t)
    if not p["inplace"]:
        lw.copy(y, View.of(a))
    strides = (p["nb3"], p["nb2"], p["nb1"], y.item.itemsize)
    return y.reshaped(b.ne[::-1], strides, p["offset"])


@rule(Op.SET, operands(PLAIN, PLAIN, out=PLAIN))
def set_window(lw: Lowering, t: Tensor) -> None:
    """`a`, with the window replaced by `b`."""
    lw.copy(_window(lw, t), View.of(t.sources[1]))


@rule(Op.ACC, operands(F32, F32, out=F32))
def acc(lw: Lowering, t: Tensor) -> None:
    """`a`, with `b` added to the window."""
    window = _window(lw, t)
    lw.tiled(lambda y, x, b: lw.xp.add(x, b, out=y), window, window, View.of(t.sources[1]))
