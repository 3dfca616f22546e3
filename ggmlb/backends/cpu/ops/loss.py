"""Cross entropy of logits and probabilities, and its gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ggmlb.backends.common.rules import FLOATS, has_elements, operands
from ggmlb.backends.cpu.ops.softmax import soft_max_rows
from ggmlb.backends.cpu.ops.unary import EXP
from ggmlb.backends.cpu.products import row_dot, row_sum
from ggmlb.backends.cpu.rules import RULES
from ggmlb.backends.cpu.views import View
from ggmlb.core.enums import Op
from ggmlb.core.tensor import Tensor

if TYPE_CHECKING:
    from ggmlb.backends.common.workspace import Array
    from ggmlb.backends.cpu.lowering import CpuLowering


@RULES.rule(Op.CROSS_ENTROPY_LOSS, operands(FLOATS, FLOATS), has_elements)
def cross_entropy_loss(lw: CpuLowering, t: Tensor) -> None:
    """`-sum(p log soft_max(x))` per row of logits `x` and probabilities `p`, the mean of all rows."""
    (a, b) = t.sources
    by_row, y = lw.scratch((*a.ne[:0:-1], 1)), lw.out_f32(t)

    def kernel(y: Array, x: Array, p: Array, z: Array, tmp: Array) -> None:
        np.subtract(x, x.max(axis=-1, keepdims=True), out=z)
        np.exp(z, out=tmp)
        np.subtract(z, np.log(row_sum(tmp)), out=z)
        np.copyto(y, row_dot(z, p))

    lw.tiled(kernel, lw.view(by_row), View.of(a), View.of(b), inner=1, scratch=2, work=2 * EXP)
    lw.emit(np.sum, by_row, keepdims=True, out=y)
    lw.emit(np.divide, y, -a.n_rows, out=y)
    lw.store(t, y)


@RULES.rule(Op.CROSS_ENTROPY_LOSS_BACK, operands(FLOATS, FLOATS, FLOATS))
def cross_entropy_loss_back(lw: CpuLowering, t: Tensor) -> None:
    """`grad (soft_max(x) - p) / n_rows`."""
    (grad, a, b) = t.sources
    g, n = lw.f32(grad).reshape(1), a.n_rows

    def kernel(dx: Array, x: Array, p: Array, z: Array, tmp: Array) -> None:
        np.copyto(z, x)
        soft_max_rows(tmp, z, z)
        np.subtract(tmp, p, out=tmp)
        np.multiply(tmp, g / n, out=dx)

    lw.rowwise(kernel, t, a, b, scratch=2, work=2 * EXP)
