"""Cross entropy of logits and probabilities, and its gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ggmlb.backends.cpu.array.ops.softmax import soft_max_rows
from ggmlb.backends.cpu.array.ops.unary import EXP
from ggmlb.backends.cpu.array.rules import FLOAT, has_elements, operands, rule
from ggmlb.backends.cpu.array.views import View
from ggmlb.core.enums import Op
from ggmlb.core.tensor import Tensor

if TYPE_CHECKING:
    from ggmlb.backends.common.workspace import Array
    from ggmlb.backends.cpu.array.lowering import Lowering


@rule(Op.CROSS_ENTROPY_LOSS, operands(FLOAT, FLOAT), has_elements)
def cross_entropy_loss(lw: Lowering, t: Tensor) -> None:
    """`-sum(p log soft_max(x))` per row of logits `x` and probabilities `p`, the mean of all rows."""
    xp, (a, b) = lw.xp, t.sources
    by_row, y = lw.scratch((*a.ne[:0:-1], 1)), lw.out_f32(t)

    def kernel(y: Array, x: Array, p: Array, z: Array, tmp: Array) -> None:
        xp.subtract(x, x.max(axis=-1, keepdims=True), out=z)
        xp.exp(z, out=tmp)
        xp.subtract(z, xp.log(lw.row_sum(tmp)), out=z)
        xp.copyto(y, lw.row_dot(z, p, tmp))

    lw.tiled(kernel, lw.view(by_row), View.of(a), View.of(b), inner=1, scratch=2, work=2 * EXP)
    lw.emit(xp.sum, by_row, keepdims=True, out=y)
    lw.emit(xp.divide, y, -a.n_rows, out=y)
    lw.store(t, y)


@rule(Op.CROSS_ENTROPY_LOSS_BACK, operands(FLOAT, FLOAT, FLOAT))
def cross_entropy_loss_back(lw: Lowering, t: Tensor) -> None:
    """`grad (soft_max(x) - p) / n_rows`."""
    xp, (grad, a, b) = lw.xp, t.sources
    g, n = lw.f32(grad).reshape(1), a.n_rows

    def kernel(dx: Array, x: Array, p: Array, z: Array, tmp: Array) -> None:
        xp.copyto(z, x)
        soft_max_rows(xp, tmp, z, z, None, lw.row_sum)
        xp.subtract(tmp, p, out=tmp)
        xp.multiply(tmp, g / n, out=dx)

    lw.rowwise(kernel, t, a, b, scratch=2, work=2 * EXP)
