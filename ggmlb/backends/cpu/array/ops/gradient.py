"""Gradients of element-wise functions and norms."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ggmlb.backends.cpu.array.ops.unary import EXP
from ggmlb.backends.cpu.array.rules import FLOAT, operands, rule
from ggmlb.core.enums import Op
from ggmlb.core.tensor import Tensor

if TYPE_CHECKING:
    from ggmlb.backends.common.workspace import Array
    from ggmlb.backends.cpu.array.lowering import Lowering


@rule(Op.SILU_BACK, operands(FLOAT, FLOAT))
def silu_back(lw: Lowering, t: Tensor) -> None:
    """`dy s (1 + x (1 - s))`, with `s = 1 / (1 + exp(-x))`."""
    xp = lw.xp

    def kernel(dx: Array, dy: Array, x: Array, s: Array, tmp: Array) -> None:
        xp.negative(x, out=s)
        xp.exp(s, out=s)
        xp.add(s, 1, out=s)
        xp.reciprocal(s, out=s)
        xp.subtract(1, s, out=tmp)
        xp.multiply(tmp, x, out=tmp)
        xp.add(tmp, 1, out=tmp)
        xp.multiply(tmp, s, out=tmp)
        xp.multiply(tmp, dy, out=dx)

    lw.elementwise(kernel, t, *t.sources, scratch=2, work=2 * EXP)


@rule(Op.RMS_NORM_BACK, operands(FLOAT, FLOAT))
def rms_norm_back(lw: Lowering, t: Tensor) -> None:
    """`(dy - x sum(x dy) / (sum(x^2) + n eps)) / sqrt(mean(x^2) + eps)` per row."""
    xp, eps, n = lw.xp, t.params["eps"], t.ne[0]

    def kernel(dx: Array, dy: Array, x: Array, tmp: Array) -> None:
        square = lw.row_dot(x, x, tmp) / n + eps
        along = lw.row_dot(x, dy, tmp) / (n * square)
        xp.multiply(x, along, out=tmp)
        xp.subtract(dy, tmp, out=tmp)
        xp.multiply(tmp, square**-0.5, out=dx)

    lw.rowwise(kernel, t, *t.sources, scratch=1, work=2)
