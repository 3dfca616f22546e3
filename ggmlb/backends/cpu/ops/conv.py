"""Convolutions, im2col, col2im, and their gradients.

Views are `[N, C, spatial dimensions..]` in NumPy order, with one `Axis` for each spatial dimension. A place
is a position of the kernel on the data, a tap an element of the kernel.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from math import prod
from typing import NamedTuple

import numpy as np

from ggmlb.backends.common.rules import ANY, F32, FLOATS, operands
from ggmlb.backends.common.workspace import Array
from ggmlb.backends.cpu.lowering import RULES, NodeLowering
from ggmlb.backends.cpu.views import View, cuts, merged
from ggmlb.core.dtypes import DType
from ggmlb.core.enums import Op
from ggmlb.core.tensor import Tensor


class Axis(NamedTuple):
    """Geometry of a convolution or pooling kernel that slides over data, along one dimension.

    Attributes:
        n: Elements of the data.
        taps: Elements of the kernel.
        places: Number of positions of the kernel.
        stride: From one place to the next.
        padding: Elements before the data.
        dilation: From one tap to the next.
    """

    n: int
    taps: int
    places: int
    stride: int = 1
    padding: int = 0
    dilation: int = 1

    @property
    def width(self) -> int:
        """Extent of the data with its padding, as far as the kernel reaches."""
        reach = (self.places - 1) * self.stride + (self.taps - 1) * self.dilation + 1
        return max(reach, self.padding + self.n)


def axes_of(
    params: Mapping[str, int], data: Sequence[int], kernel: Sequence[int], places: Sequence[int]
) -> list[Axis]:
    """Return an `Axis` per dimension, from `params` (`s0, p0, d0, s1, ..`) and extents, given in ne order."""
    axes = [
        Axis(n, k, m, params[f"s{i}"], params[f"p{i}"], params[f"d{i}"])
        for i, (n, k, m) in enumerate(zip(data, kernel, places, strict=True))
    ]
    return axes[::-1]


def padded(lw: NodeLowering, x: View, axes: Sequence[Axis], fill: float = 0.0) -> View:
    """Return `x` as float32, padded with `fill`: a copy in scratch, or `x` itself if it already is that."""
    shape = (*x.shape[:2], *(a.width for a in axes))
    if shape == x.shape:
        return lw.f32(x)
    order = memory_order(x)
    y = lw.scratch(tuple(shape[d] for d in order))
    lw.emit(np.ndarray.fill, y, fill)
    y = y.transposed(*(order.index(d) for d in range(len(shape))))
    lw.copy(unpadded(y, axes), x)
    return y


def memory_order(x: View) -> list[int]:
    """Return the dimensions of a view in the order of their strides, the largest first."""
    return sorted(range(len(x.shape)), key=lambda d: -x.strides[d])


def unpadded(x: View, axes: Sequence[Axis]) -> View:
    """Return the view of padded data `x` without its padding."""
    for i, a in enumerate(axes):
        x = x.cut(2 + i, a.padding, a.n)
    return x


def windows(x: View, axes: Sequence[Axis]) -> View:
    """View padded data as `[N, C, places.., taps..]`: for each place of the kernel, the elements under it."""
    steps = list(zip(axes, x.strides[2:], strict=True))
    return x.reshaped(
        (*x.shape[:2], *(a.places for a in axes), *(a.taps for a in axes)),
        (*x.strides[:2], *(a.stride * s for a, s in steps), *(a.dilation * s for a, s in steps)),
    )


def each_tap(*patches: View) -> Iterator[tuple[View, ...]]:
    """Yield for each tap (element of the convolution's kernel) its part `[N, C, places..]` of all arrays."""
    shape = patches[0].shape
    n = 2 + (len(shape) - 2) // 2
    for tap in product(*map(range, shape[n:])):
        yield tuple(
            v.reshaped(shape[:n], v.strides[:n], sum(i * s for i, s in zip(tap, v.strides[n:], strict=True)))
            for v in patches
        )


def fold(lw: NodeLowering, y: View, patches: View, axes: Sequence[Axis]) -> None:
    """Emit the sum of the overlapping windows `patches` into the data `y`: the gradient of `windows`.

    The patches are float32, `[N, C, places.., taps..]`.
    """
    shape = (*y.shape[:2], *(a.width for a in axes))
    whole = y if shape == y.shape and y.type == DType.F32 else lw.scratch(shape)
    lw.emit(np.ndarray.fill, whole, 0)
    for met, patch in each_tap(windows(whole, axes), patches):
        lw.emit(np.add, met, patch, met)
    if whole is not y:
        lw.copy(y, unpadded(whole, axes))


def unfolded(rows: View, axes: Sequence[Axis]) -> View:
    """View im2col's rows, `[C taps..]` for each place of the kernel, as `[N, C, places.., taps..]`."""
    rank = len(axes)
    for i in range(rank):
        rows = rows.split(rank + 1 + i, prod(a.taps for a in axes[i:]))
    places = range(1, rank + 1)
    return rows.transposed(0, rank + 1, *places, *range(rank + 2, 2 * rank + 2))


def without_first(view: View) -> View:
    """Return the first element of the view along its first dimension, without that dimension."""
    return view.reshaped(view.shape[1:], view.strides[1:])


def sum_of_products(y: Array, *operands: Array) -> None:
    """Compute `y = x0 w0 + x1 w1 + ..`; `operands` are `x0, w0, x1, w1, ..` and one scratch array."""
    *factors, tmp = operands
    np.multiply(factors[0], factors[1], out=y)
    for x, w in zip(factors[2::2], factors[3::2], strict=True):
        np.multiply(x, w, out=tmp)
        np.add(y, tmp, out=y)


N_PATCH_ITEMS = 1 << 20
"""Items of patches in scratch at a time."""


@RULES.rule(Op.CONV_2D, operands(FLOATS, FLOATS))
def conv_2d(lw: NodeLowering, t: Tensor) -> None:
    """Sum `y[n, o, place] = sum a[o, c, tap] b[n, c, place s + tap d - p]` over `c` and `tap`, in 2D."""
    kernel, data = t.sources
    axes = axes_of(t.params, data.ne[:2], kernel.ne[:2], t.ne[:2])
    _convolve(lw, lw.view(t), lw.view(data), lw.view(kernel), axes)


@RULES.rule(Op.CONV_3D, operands(FLOATS, FLOATS))
def conv_3d(lw: NodeLowering, t: Tensor) -> None:
    """Convolve in 3D, as `y[n, o, place] = sum a[o, c, tap] b[n, c, place s + tap d - p]`."""
    kernel, data = t.sources
    n_in, n_out = t.params["c"], t.params["oc"]
    axes = axes_of(t.params, data.ne[:3], kernel.ne[:3], t.ne[:3])
    _convolve(
        lw,
        lw.view(t).split(0, n_out),
        lw.view(data).split(0, n_in),
        lw.view(kernel).split(0, n_in),
        axes,
    )


def _convolve(lw: NodeLowering, y: View, data: View, kernel: View, axes: Sequence[Axis]) -> None:
    """Emit `y`, `[N, OC, places..]`, of data `[N, IC, spatial..]` and a kernel `[OC, IC, taps..]`."""
    weight = lw.packed_f32(kernel).reshape(kernel.shape[0], -1)
    met = windows(padded(lw, data, axes), axes)
    out = y if y.type == DType.F32 else lw.scratch(y.shape)
    n_items = weight.shape[1] * prod(y.shape[3:])
    pieces = list(cuts((y.shape[0], y.shape[2]), n_items, N_PATCH_ITEMS))
    scratch = lw.scratch((max(n * m for (_, n), (_, m) in pieces) * n_items,))
    for images, places in pieces:
        patches = _patches(lw, met.cut(0, *images).cut(2, *places), scratch)
        into = out.cut(0, *images).cut(2, *places)
        result = into.reshaped((*into.shape[:2], prod(into.shape[2:])), (*into.strides[:2], into.strides[-1]))
        lw.emit(np.matmul, weight, patches, result)
    if out is not y:
        lw.copy(y, out)


def _patches(lw: NodeLowering, met: View, scratch: View) -> View:
    """Patches `[N, IC, places.., taps..]` as `[N, IC taps.., places..]`: the data itself, or copied."""
    rank = (len(met.shape) - 2) // 2
    n, channels, *rest = met.shape
    places, taps = rest[:rank], rest[rank:]
    if prod(taps) == 1:
        (flat,) = merged([met.reshaped(tuple(places), met.strides[2 : 2 + rank])])
        if len(flat.shape) == 1:
            return met.reshaped((n, channels, *flat.shape), (*met.strides[:2], *flat.strides))
    items = scratch.first((n, channels, *taps, *places))
    copies = items.transposed(0, 1, *range(2 + rank, 2 + 2 * rank), *range(2, 2 + rank))
    for to, of in each_tap(copies, met):
        lw.copy(to, of)
    return items.reshape(n, channels * prod(taps), prod(places))


@RULES.rule(Op.CONV_2D_DW, operands(FLOATS, FLOATS))
def conv_2d_dw(lw: NodeLowering, t: Tensor) -> None:
    """`y[n, c, place] = sum a[c, tap] b[n, c, place s + tap d - p]`: each channel has its own kernel."""
    kernel, data = t.sources
    axes = axes_of(t.params, data.ne[:2], kernel.ne[:2], t.ne[:2])
    met = windows(padded(lw, lw.view(data), axes), axes)
    weight = lw.f32(lw.view(kernel))
    weights = weight.reshaped(met.shape, (0, weight.strides[0], 0, 0, *weight.strides[2:]))
    factors = [v for pair in each_tap(met, weights) for v in pair]
    views = [lw.view(t), *factors]
    order = memory_order(views[0])
    lw.tiled(sum_of_products, *(v.transposed(*order) for v in views), scratch=1, work=len(factors))


@RULES.rule(Op.CONV_TRANSPOSE_1D, operands(FLOATS, FLOATS, out=F32))
def conv_transpose_1d(lw: NodeLowering, t: Tensor) -> None:
    """`y[o, i] = sum a[c, o, tap] b[c, place]` over all `c, place, tap` with `i = place s + tap`."""
    y, kernel, data = (without_first(lw.view(x)) for x in (t, *t.sources))
    _spread(lw, y, data, kernel, [t.params["s0"]])


@RULES.rule(Op.CONV_TRANSPOSE_2D, operands(FLOATS, FLOATS, out=F32))
def conv_transpose_2d(lw: NodeLowering, t: Tensor) -> None:
    """Convolve transposed, in 2D: `y[n, o, i] = sum a[c, o, tap] b[n, c, place]` with `i = place s + tap`."""
    y, kernel, data = (lw.view(x) for x in (t, *t.sources))
    _spread(lw, y, data, kernel, [t.params["stride"]] * 2)


def _spread(lw: NodeLowering, y: View, data: View, kernel: View, strides: Sequence[int]) -> None:
    """Emit `y`, `[N, OC, ..]`, of data `[N, IC, places..]` and a kernel `[IC, OC, taps..]`."""
    n_in, n_out, *taps = kernel.shape
    n, _, *places = data.shape
    rank = len(taps)
    weight = lw.packed_f32(kernel).reshape(n_in, n_out * prod(taps))
    patches = lw.scratch((n, n_out, *taps, *places))
    lw.emit(
        np.matmul,
        weight.swapaxes(0, 1),
        lw.packed_f32(data).reshape(n, n_in, prod(places)),
        patches.reshape(n, weight.shape[1], prod(places)),
    )
    axes = [Axis(m, k, p, s) for m, k, p, s in zip(y.shape[2:], taps, places, strides, strict=True)]
    order = (0, 1, *range(2 + rank, 2 + 2 * rank), *range(2, 2 + rank))
    fold(lw, y, patches.transposed(*order), axes)


def _unfold(lw: NodeLowering, patches: View, data: View, axes: list[Axis]) -> None:
    for y, x in each_tap(patches, windows(padded(lw, data, axes), axes)):
        lw.copy(y, x)


def _axes(t: Tensor, data: Tensor, kernel: Tensor, patches: Tensor) -> list[Axis]:
    rank = 2 if t.params["is_2d"] else 1
    return axes_of(t.params, data.ne[:rank], kernel.ne[:rank], patches.ne[1 : rank + 1])


def _batch(t: Tensor, view: View) -> View:
    return view if t.params["is_2d"] else without_first(view)


@RULES.rule(Op.IM2COL, operands(ANY, FLOATS))
def im2col(lw: NodeLowering, t: Tensor) -> None:
    """Gather patches: `y[n, place, (c, tap)] = b[n, c, place s + tap d - p]`, 0 outside of the data."""
    kernel, data = t.sources
    axes = _axes(t, data, kernel, t)
    _unfold(lw, unfolded(_batch(t, lw.view(t)), axes), _batch(t, lw.view(data)), axes)


@RULES.rule(Op.IM2COL_BACK, operands(F32, ANY, out=F32))
def im2col_back(lw: NodeLowering, t: Tensor) -> None:
    """For each element of the data, the sum of its copies in the patches: the gradient of `im2col`."""
    patches, kernel = t.sources
    axes = _axes(t, t, kernel, patches)
    fold(lw, _batch(t, lw.view(t)), unfolded(_batch(t, lw.view(patches)), axes), axes)


@RULES.rule(Op.IM2COL_3D, operands(ANY, FLOATS))
def im2col_3d(lw: NodeLowering, t: Tensor) -> None:
    """Gather 3D patches: `y[n, place, (c, tap)] = b[n, c, place s + tap d - p]`, 0 outside of the data."""
    kernel, data = t.sources
    channels = t.params["ic"]
    depth = t.ne[3] // (data.ne[3] // channels)
    axes = axes_of(t.params, data.ne[:3], kernel.ne[:3], (*t.ne[1:3], depth))
    _unfold(lw, unfolded(lw.view(t).split(0, depth), axes), lw.view(data).split(0, channels), axes)


@RULES.rule(Op.COL2IM_1D, operands(FLOATS))
def col2im_1d(lw: NodeLowering, t: Tensor) -> None:
    """`y[c, i] = sum a[place, (c, tap)]` over all `place, tap` with `i = place s + tap - p`."""
    (a,) = t.sources
    axis = Axis(t.ne[0], a.ne[0] // t.params["oc"], a.ne[1], t.params["s0"], t.params["p0"])
    patches = unfolded(lw.f32(without_first(lw.view(a))), [axis])
    fold(lw, without_first(lw.view(t)), patches, [axis])
