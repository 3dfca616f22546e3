"""Normalisation of rows, and of groups of channels."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ggmlb.backends.cpu.array.rules import FLOAT, contiguous, operands, rule
from ggmlb.backends.cpu.array.views import View
from ggmlb.core.enums import Op
from ggmlb.core.tensor import Tensor

if TYPE_CHECKING:
    from ggmlb.backends.common.workspace import Array
    from ggmlb.backends.cpu.array.lowering import Kernel, Lowering

WORK = 4
"""Of a norm per element, in additions."""


def normalise(lw: Lowering, n: int, eps: float) -> Kernel:
    """A kernel that brings rows of `n` elements to mean 0 and variance 1."""
    xp = lw.xp

    def kernel(y: Array, x: Array, tmp: Array) -> None:
        mean = lw.row_sum(x)
        mean /= n
        xp.subtract(x, mean, out=y)
        xp.multiply(y, rsqrt(lw.row_dot(y, y, tmp), n, eps), out=y)

    return kernel


def rsqrt(total: Array, n: int, eps: float) -> Array:
    """`1 / sqrt(total / n + eps)`, in place."""
    total /= n
    total += eps
    total **= -0.5
    return total


@rule(Op.NORM, operands(FLOAT))
def norm(lw: Lowering, t: Tensor) -> None:
    """`(x - mean(x)) / sqrt(variance(x) + eps)` per row."""
    lw.rowwise(normalise(lw, t.ne[0], t.params["eps"]), t, *t.sources, scratch=1, work=WORK)


@rule(Op.RMS_NORM, operands(FLOAT))
def rms_norm(lw: Lowering, t: Tensor) -> None:
    """`x / sqrt(mean(x^2) + eps)` per row."""
    xp, eps, n = lw.xp, t.params["eps"], t.ne[0]

    def kernel(y: Array, x: Array, tmp: Array) -> None:
        xp.multiply(x, rsqrt(lw.row_dot(x, x, tmp), n, eps), out=y)

    lw.rowwise(kernel, t, *t.sources, scratch=1, work=WORK)


@rule(Op.L2_NORM, operands(FLOAT))
def l2_norm(lw: Lowering, t: Tensor) -> None:
    """`x / max(sqrt(sum(x^2)), eps)` per row."""
    xp, eps = lw.xp, t.params["eps"]

    def kernel(y: Array, x: Array, tmp: Array) -> None:
        length = xp.sqrt(lw.row_dot(x, x, tmp))
        xp.divide(x, xp.fmax(length, eps, out=length), out=y)  # eps if it is NaN

    lw.rowwise(kernel, t, *t.sources, scratch=1, work=WORK)


@rule(Op.GROUP_NORM, operands(FLOAT), contiguous)
def group_norm(lw: Lowering, t: Tensor) -> None:
    """`norm` over groups of channels (dimension 2); the last group may have fewer."""
    n_channels, plane = t.ne[2], t.ne[0] * t.ne[1]
    per_group = -(-n_channels // t.params["n_groups"])
    (a,) = t.sources
    y, x = View.of(t), lw.packed(a)
    whole = n_channels // per_group * per_group
    for start, n, size in ((0, whole, per_group), (whole, n_channels - whole, n_channels - whole)):
        if n:
            kernel = normalise(lw, size * plane, t.params["eps"])
            lw.tiled(kernel, *(_groups(v, start, n, size) for v in (y, x)), inner=1, scratch=1, work=WORK)


def _groups(view: View, start: int, n: int, size: int) -> View:
    """`n` channels of a packed view as rows of `size` channels each."""
    part = view.cut(1, start, n)
    shape, strides = part.shape, part.strides
    return part.reshaped(
        (shape[0], n // size, size * shape[2] * shape[3]), (strides[0], size * strides[1], strides[3])
    )
