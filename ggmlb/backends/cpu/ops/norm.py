"""Normalisation of rows and of groups of channels, and its gradient."""

from __future__ import annotations

import math

import numpy as np

from ggmlb.backends.common.rules import FLOATS, operands
from ggmlb.backends.common.workspace import Array
from ggmlb.backends.cpu.kernels import row_dot, row_sum
from ggmlb.backends.cpu.lowering import RULES, Kernel, NodeLowering
from ggmlb.backends.cpu.views import View
from ggmlb.core.enums import Op
from ggmlb.core.tensor import Tensor

WORK = 4
"""Cost of a norm per element, in additions."""


def normalise(n: int, eps: float) -> Kernel:
    """Return a kernel that normalises rows of `n` elements to mean 0 and variance 1."""

    def kernel(y: Array, x: Array) -> None:
        mean = row_sum(x)
        mean /= n
        np.subtract(x, mean, out=y)
        np.multiply(y, rsqrt(row_dot(y, y), n, eps), out=y)

    return kernel


def rsqrt(total: Array, n: int, eps: float) -> Array:
    """Replace `total`, row sums of squares, by `1 / sqrt(total / n + eps)`, in place; return it."""
    total /= n
    total += eps
    total **= -0.5
    return total


@RULES.rule(Op.NORM, operands(FLOATS))
def norm(lw: NodeLowering, t: Tensor) -> None:
    """`(x - mean(x)) / sqrt(variance(x) + eps)` per row."""
    lw.rowwise(normalise(t.ne[0], t.params["eps"]), t, *t.sources, work=WORK)


@RULES.rule(Op.RMS_NORM, operands(FLOATS))
def rms_norm(lw: NodeLowering, t: Tensor) -> None:
    """`x / sqrt(mean(x^2) + eps)` per row."""
    eps, n = t.params["eps"], t.ne[0]

    def kernel(y: Array, x: Array) -> None:
        np.multiply(x, rsqrt(row_dot(x, x), n, eps), out=y)

    lw.rowwise(kernel, t, *t.sources, work=WORK)


@RULES.rule(Op.L2_NORM, operands(FLOATS))
def l2_norm(lw: NodeLowering, t: Tensor) -> None:
    """`x / max(sqrt(sum(x^2)), eps)` per row."""
    eps = t.params["eps"]

    def kernel(y: Array, x: Array) -> None:
        length = np.sqrt(row_dot(x, x))
        np.divide(x, np.fmax(length, eps, out=length), out=y)  # eps if it is NaN

    lw.rowwise(kernel, t, *t.sources, work=WORK)


@RULES.rule(Op.GROUP_NORM, operands(FLOATS))
def group_norm(lw: NodeLowering, t: Tensor) -> None:
    """Normalise groups of `ceil(channels / n_groups)` channels (dimension 2); the last may have fewer."""
    n_channels, plane = t.ne[2], t.ne[0] * t.ne[1]
    per_group = -(-n_channels // t.params["n_groups"])
    (a,) = t.sources
    result, x = lw.view(t), lw.view(a)
    x = x if x.is_packed() else lw.packed_f32(x)
    y = result if result.is_packed() else lw.scratch(t.ne[::-1])
    whole = n_channels // per_group * per_group
    for start, n, size in ((0, whole, per_group), (whole, n_channels - whole, n_channels - whole)):
        if n:
            kernel = normalise(size * plane, t.params["eps"])
            lw.tiled(kernel, *(_groups(v, start, n, size) for v in (y, x)), inner=1, work=WORK)
    if y is not result:
        lw.copy(result, y)


def _groups(view: View, start: int, n: int, size: int) -> View:
    """`n` channels of a packed view as rows of `size` channels each."""
    n_images, n_channels, *plane = view.shape
    item = view.item.itemsize
    channel = item * math.prod(plane)
    return view.reshaped(
        (n_images, n // size, size * math.prod(plane)),
        (n_channels * channel, size * channel, item),
        start * channel,
    )


@RULES.rule(Op.RMS_NORM_BACK, operands(FLOATS, FLOATS))
def rms_norm_back(lw: NodeLowering, t: Tensor) -> None:
    """`(dy - x sum(x dy) / (sum(x^2) + n eps)) / sqrt(mean(x^2) + eps)` per row."""
    eps, n = t.params["eps"], t.ne[0]

    def kernel(dx: Array, dy: Array, x: Array, tmp: Array) -> None:
        square = row_dot(x, x) / n + eps
        along = row_dot(x, dy) / (n * square)
        np.multiply(x, along, out=tmp)
        np.subtract(dy, tmp, out=tmp)
        np.multiply(tmp, square**-0.5, out=dx)

    lw.rowwise(kernel, t, *t.sources, scratch=1, work=2)
