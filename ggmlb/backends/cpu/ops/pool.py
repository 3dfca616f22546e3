"""Max and average pooling, along one dimension after the other."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ggmlb.backends.common.rules import F32, FLOATS, operands
from ggmlb.backends.common.workspace import Array
from ggmlb.backends.cpu.lowering import RULES, NodeLowering
from ggmlb.backends.cpu.ops.conv import Axis, each_tap, fold, padded, windows
from ggmlb.backends.cpu.views import View
from ggmlb.core.enums import Op, OpPool
from ggmlb.core.tensor import Tensor

LOWEST = float(np.finfo(np.float32).min)
"""The value of padding in max pooling, and the smallest result."""


@RULES.rule(Op.POOL_1D, operands(FLOATS, out=F32))
def pool_1d(lw: NodeLowering, t: Tensor) -> None:
    """Pooling along rows; an average leaves out padding."""
    (a,), p = t.sources, t.params
    axis = Axis(a.ne[0], p["k0"], t.ne[0], p["s0"], p["p0"])
    first = np.arange(axis.places) * axis.stride - axis.padding
    count = np.minimum(first + axis.taps, axis.n) - np.maximum(first, 0)
    _pool(lw, lw.view(t), lw.view(a), [Axis(a.ne[1], 1, a.ne[1]), axis], p["op"], np.maximum(count, 1))


@RULES.rule(Op.POOL_2D, operands(FLOATS, out=F32))
def pool_2d(lw: NodeLowering, t: Tensor) -> None:
    """Pooling in two dimensions; an average includes padding."""
    (a,), p = t.sources, t.params
    _pool(lw, lw.view(t), lw.view(a), _axes(t, a, t), p["op"], np.full(t.ne[0], p["k0"] * p["k1"]))


@RULES.rule(Op.POOL_2D_BACK, operands(FLOATS, FLOATS, out=F32))
def pool_2d_back(lw: NodeLowering, t: Tensor) -> None:
    """Average: each gradient is spread evenly; maximum: it goes to the window's first largest element."""
    grad, data = t.sources
    p, axes = t.params, _axes(t, data, grad)
    g = lw.f32(lw.view(grad))
    if p["op"] is OpPool.AVG:
        fold(lw, lw.view(t), g.reshaped((*g.shape, p["k1"], p["k0"]), (*g.strides, 0, 0)), axes)
        y = lw.view(t)
        lw.emit(np.divide, y, p["k0"] * p["k1"], y)
    else:
        fold(lw, lw.view(t), _at_peaks(lw, g, lw.view(data), axes), axes)


def _axes(t: Tensor, data: Tensor, pooled: Tensor) -> list[Axis]:
    p = t.params
    axes = [Axis(data.ne[i], p[f"k{i}"], pooled.ne[i], p[f"s{i}"], p[f"p{i}"]) for i in range(2)]
    return axes[::-1]


def _pool(lw: NodeLowering, y: View, data: View, axes: Sequence[Axis], op: OpPool, divisor: Array) -> None:
    """Emit `y`, `[N, C, places..]`, of data `[N, C, H, W]`; the divisors are those of a row of places."""
    mean = op is OpPool.AVG
    join = np.add if mean else np.fmax  # as in ggml, NaN is not the largest
    x = padded(lw, data, axes, 0.0 if mean else LOWEST)
    rows = lw.scratch((*x.shape[:3], y.shape[3]))

    def kernel(y: Array, x: Array, *more: Array) -> None:
        if mean:
            np.copyto(y, x)
        else:
            np.fmax(x, LOWEST, out=y)
        for other in more:
            join(y, other, out=y)

    def kernel_mean(y: Array, divisor: Array, *x: Array) -> None:
        kernel(y, *x)
        np.divide(y, divisor, out=y)

    lw.tiled(kernel, rows, *_taps(x, 3, axes[1]))
    columns = _taps(rows, 2, axes[0])
    if mean:
        by_place = lw.constant(np.asarray(divisor, dtype=np.float32))
        lw.tiled(kernel_mean, y, by_place.reshaped(y.shape, (0, 0, 0, *by_place.strides)), *columns)
    else:
        lw.tiled(kernel, y, *columns)


def _taps(x: View, dim: int, axis: Axis) -> list[View]:
    """For each tap of the window, the elements under it along one dimension of padded data."""
    shape, strides = list(x.shape), list(x.strides)
    shape[dim] = axis.places
    strides[dim] *= axis.stride
    return [x.reshaped(tuple(shape), tuple(strides), i * x.strides[dim]) for i in range(axis.taps)]


def _at_peaks(lw: NodeLowering, grad: View, data: View, axes: Sequence[Axis]) -> View:
    """Emit patches `[N, C, places.., taps..]`: the gradient at the first peak of each, and 0 elsewhere."""
    met = windows(padded(lw, data, axes, LOWEST), axes)
    n = len(grad.shape)
    taps = lw.scratch((*met.shape[n:], *grad.shape))
    peak = lw.scratch(grad.shape)
    _pool(lw, peak, data, axes, OpPool.MAX, np.ones(1))
    hit, free = (lw.scratch(grad.shape, np.dtype(np.bool_)) for _ in range(2))

    def kernel(patch: Array, x: Array, g: Array, peak: Array, hit: Array, free: Array) -> None:
        np.equal(x, peak, out=hit)
        np.logical_and(hit, free, out=hit)
        np.not_equal(free, hit, out=free)
        patch.fill(0)
        np.copyto(patch, g, where=hit)

    view = taps.transposed(*range(2, 2 + n), 0, 1)
    lw.emit(np.ndarray.fill, free, True)
    for x, patch in each_tap(met, view):
        lw.emit(kernel, patch, x, grad, peak, hit, free)
    return view
