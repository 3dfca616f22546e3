"""Normalisation of rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ggmlb.backends.array.rules import FLOAT, operands, rule, sources
from ggmlb.enums import Op

if TYPE_CHECKING:
    from ggmlb.backends.array.lowering import Lowering
    from ggmlb.backends.array.workspace import Array
    from ggmlb.tensor import Tensor


@rule(Op.NORM, operands(FLOAT))
def norm(lw: Lowering, t: Tensor) -> None:
    """`(x - mean(x)) / sqrt(variance(x) + eps)` per row."""
    xp, eps, n = lw.xp, t.params["eps"], t.ne[0]

    def kernel(y: Array, x: Array, tmp: Array) -> None:
        mean = xp.add.reduce(x, axis=-1, keepdims=True)
        xp.divide(mean, n, out=mean)
        xp.subtract(x, mean, out=y)
        xp.multiply(y, y, out=tmp)
        xp.multiply(y, _rsqrt(xp.add.reduce(tmp, axis=-1, keepdims=True), n, eps), out=y)

    lw.rowwise(kernel, t, *sources(t), scratch=1)


@rule(Op.RMS_NORM, operands(FLOAT))
def rms_norm(lw: Lowering, t: Tensor) -> None:
    """`x / sqrt(mean(x^2) + eps)` per row."""
    xp, eps, n = lw.xp, t.params["eps"], t.ne[0]

    def kernel(y: Array, x: Array, tmp: Array) -> None:
        xp.multiply(x, x, out=tmp)
        xp.multiply(x, _rsqrt(xp.add.reduce(tmp, axis=-1, keepdims=True), n, eps), out=y)

    lw.rowwise(kernel, t, *sources(t), scratch=1)


@rule(Op.L2_NORM, operands(FLOAT))
def l2_norm(lw: Lowering, t: Tensor) -> None:
    """`x / max(sqrt(sum(x^2)), eps)` per row."""
    xp, eps = lw.xp, t.params["eps"]

    def kernel(y: Array, x: Array, tmp: Array) -> None:
        xp.multiply(x, x, out=tmp)
        length = xp.sqrt(xp.add.reduce(tmp, axis=-1, keepdims=True))
        xp.divide(x, xp.maximum(length, eps, out=length), out=y)

    lw.rowwise(kernel, t, *sources(t), scratch=1)


def _rsqrt(total: Array, n: int, eps: float) -> Array:
    """`1 / sqrt(total / n + eps)`, in place."""
    total /= n
    total += eps
    total **= -0.5
    return total
