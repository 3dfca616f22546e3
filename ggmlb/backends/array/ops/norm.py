"""Normalisation of rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ggmlb.backends.array.rules import FLOAT, operands, rule, sources
from ggmlb.backends.array.views import View
from ggmlb.enums import Op

if TYPE_CHECKING:
    from ggmlb.backends.array.lowering import Kernel, Lowering
    from ggmlb.backends.array.workspace import Array
    from ggmlb.tensor import Tensor


@rule(Op.NORM, operands(FLOAT))
def norm(lw: Lowering, t: Tensor) -> None:
    """`(x - mean(x)) / sqrt(variance(x) + eps)` per row."""
    lw.rowwise(_normalise(lw.xp, -1, t.ne[0], t.params["eps"]), t, *sources(t), scratch=1)


def _normalise(xp: Any, axis: int | tuple[int, ...], n: int, eps: float) -> Kernel:
    """A kernel that takes the mean of `n` elements along `axis` to 0, and the variance to 1."""

    def kernel(y: Array, x: Array, tmp: Array) -> None:
        mean = xp.add.reduce(x, axis=axis, keepdims=True)
        mean /= n
        xp.subtract(x, mean, out=y)
        xp.multiply(y, y, out=tmp)
        xp.multiply(y, _rsqrt(xp.add.reduce(tmp, axis=axis, keepdims=True), n, eps), out=y)

    return kernel


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


@rule(Op.GROUP_NORM, operands(FLOAT))
def group_norm(lw: Lowering, t: Tensor) -> None:
    """`norm` over groups of channels (dimension 2); the last group may have fewer."""
    eps, n_channels = t.params["eps"], t.ne[2]
    per_group = -(-n_channels // t.params["n_groups"])
    y, x = View.of(t), View.of(*sources(t))
    whole = n_channels // per_group * per_group
    for start, n, size in ((0, whole, per_group), (whole, n_channels - whole, n_channels - whole)):
        if n:
            kernel = _normalise(lw.xp, (-3, -2, -1), size * t.ne[1] * t.ne[0], eps)
            parts = (v.cut(1, start, n).split(1, size) for v in (y, x))
            lw.tiled(kernel, *parts, inner=3, scratch=1)


@rule(Op.RMS_NORM_BACK, operands(FLOAT, FLOAT))
def rms_norm_back(lw: Lowering, t: Tensor) -> None:
    """`(dy - x dot(x, dy) / (sum(x^2) + n eps)) / sqrt(mean(x^2) + eps)` from `dy` and the operand `x`."""
    xp, eps, n = lw.xp, t.params["eps"], t.ne[0]

    def kernel(dx: Array, dy: Array, x: Array, tmp: Array) -> None:
        xp.multiply(x, x, out=tmp)
        square = xp.add.reduce(tmp, axis=-1, keepdims=True)
        xp.multiply(x, dy, out=tmp)
        dot = xp.add.reduce(tmp, axis=-1, keepdims=True)
        dot /= square + n * eps
        xp.multiply(x, dot, out=tmp)
        xp.subtract(dy, tmp, out=tmp)
        xp.multiply(tmp, _rsqrt(square, n, eps), out=dx)

    lw.rowwise(kernel, t, *sources(t), scratch=1)


def _rsqrt(total: Array, n: int, eps: float) -> Array:
    """`1 / sqrt(total / n + eps)`, in place."""
    total /= n
    total += eps
    total **= -0.5
    return total
