"""Writing to a window of a tensor: the shape of `b`, at a byte offset, with byte strides of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ggmlb.backends.common.rules import F32, in_window, operands
from ggmlb.backends.cpu.rules import PLAIN, RULES
from ggmlb.backends.cpu.views import View
from ggmlb.core.enums import Op
from ggmlb.core.tensor import Tensor

if TYPE_CHECKING:
    from ggmlb.backends.cpu.lowering import CpuLowering


def _window(lw: CpuLowering, t: Tensor) -> View:
    """Emit the copy of `a`, unless the result is `a` itself, and return the window of the result."""
    a, b = t.sources
    p, y = t.params, View.of(t)
    if not p["inplace"]:
        lw.copy(y, View.of(a))
    strides = (p["nb3"], p["nb2"], p["nb1"], y.item.itemsize)
    return y.reshaped(b.ne[::-1], strides, p["offset"])


@RULES.rule(Op.SET, operands(PLAIN, PLAIN, out=PLAIN), in_window)
def set_window(lw: CpuLowering, t: Tensor) -> None:
    """`a`, with the window replaced by `b`."""
    lw.copy(_window(lw, t), View.of(t.sources[1]))


@RULES.rule(Op.ACC, operands(F32, F32, out=F32), in_window)
def acc(lw: CpuLowering, t: Tensor) -> None:
    """`a`, with `b` added to the window."""
    window = _window(lw, t)
    lw.tiled(lambda y, x, b: np.add(x, b, out=y), window, window, View.of(t.sources[1]))
