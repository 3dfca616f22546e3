"""Gradients of element-wise functions and norms."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ggmlb.backends.common.rules import FLOATS, operands
from ggmlb.backends.cpu.ops.unary import EXP
from ggmlb.backends.cpu.products import row_dot
from ggmlb.backends.cpu.rules import RULES
from ggmlb.core.enums import Op
from ggmlb.core.tensor import Tensor

if TYPE_CHECKING:
    from ggmlb.backends.common.workspace import Array
    from ggmlb.backends.cpu.lowering import CpuLowering


@RULES.rule(Op.SILU_BACK, operands(FLOATS, FLOATS))
def silu_back(lw: CpuLowering, t: Tensor) -> None:
    """`dy s (1 + x (1 - s))`, with `s = 1 / (1 + exp(-x))`."""

    def kernel(dx: Array, dy: Array, x: Array, s: Array, tmp: Array) -> None:
        np.negative(x, out=s)
        np.exp(s, out=s)
        np.add(s, 1, out=s)
        np.reciprocal(s, out=s)
        np.subtract(1, s, out=tmp)
        np.multiply(tmp, x, out=tmp)
        np.add(tmp, 1, out=tmp)
        np.multiply(tmp, s, out=tmp)
        np.multiply(tmp, dy, out=dx)

    lw.elementwise(kernel, t, *t.sources, scratch=2, work=2 * EXP)


@RULES.rule(Op.RMS_NORM_BACK, operands(FLOATS, FLOATS))
def rms_norm_back(lw: CpuLowering, t: Tensor) -> None:
    """`(dy - x sum(x dy) / (sum(x^2) + n eps)) / sqrt(mean(x^2) + eps)` per row."""
    eps, n = t.params["eps"], t.ne[0]

    def kernel(dx: Array, dy: Array, x: Array, tmp: Array) -> None:
        square = row_dot(x, x) / n + eps
        along = row_dot(x, dy) / (n * square)
        np.multiply(x, along, out=tmp)
        np.subtract(dy, tmp, out=tmp)
        np.multiply(tmp, square**-0.5, out=dx)

    lw.rowwise(kernel, t, *t.sources, scratch=1, work=2)
