"""Patches: what a convolution's kernel meets at each place, and the sums that lead back from them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ggmlb.backends.common.rules import ANY, F32, FLOATS, operands
from ggmlb.backends.cpu.ops.patches import (
    Axis,
    as_f32,
    axes_of,
    each_tap,
    fold,
    padded,
    unfolded,
    windows,
    without_first,
)
from ggmlb.backends.cpu.rules import RULES
from ggmlb.backends.cpu.views import View
from ggmlb.core.enums import Op
from ggmlb.core.tensor import Tensor

if TYPE_CHECKING:
    from ggmlb.backends.cpu.lowering import CpuLowering


def _unfold(lw: CpuLowering, patches: View, data: View, axes: list[Axis]) -> None:
    for y, x in each_tap(patches, windows(padded(lw, data, axes), axes)):
        lw.copy(y, x)


def _axes(t: Tensor, data: Tensor, kernel: Tensor, patches: Tensor) -> list[Axis]:
    rank = 2 if t.params["is_2d"] else 1
    return axes_of(t.params, data.ne[:rank], kernel.ne[:rank], patches.ne[1 : rank + 1])


def _batch(t: Tensor, view: View) -> View:
    return view if t.params["is_2d"] else without_first(view)


@RULES.rule(Op.IM2COL, operands(ANY, FLOATS))
def im2col(lw: CpuLowering, t: Tensor) -> None:
    """`y[n, place, (c, tap)] = b[n, c, place s + tap d - p]`, 0 outside of the data."""
    kernel, data = t.sources
    axes = _axes(t, data, kernel, t)
    _unfold(lw, unfolded(_batch(t, View.of(t)), axes), _batch(t, View.of(data)), axes)


@RULES.rule(Op.IM2COL_BACK, operands(F32, ANY, out=F32))
def im2col_back(lw: CpuLowering, t: Tensor) -> None:
    """The sum of the patches' elements that were copied from each element of the data."""
    patches, kernel = t.sources
    axes = _axes(t, t, kernel, patches)
    fold(lw, _batch(t, View.of(t)), unfolded(_batch(t, View.of(patches)), axes), axes)


@RULES.rule(Op.IM2COL_3D, operands(ANY, FLOATS))
def im2col_3d(lw: CpuLowering, t: Tensor) -> None:
    """As `im2col`, with depth; the channels share a dimension with the batch."""
    kernel, data = t.sources
    channels = t.params["ic"]
    depth = t.ne[3] // (data.ne[3] // channels)
    axes = axes_of(t.params, data.ne[:3], kernel.ne[:3], (*t.ne[1:3], depth))
    _unfold(lw, unfolded(View.of(t).split(0, depth), axes), View.of(data).split(0, channels), axes)


@RULES.rule(Op.COL2IM_1D, operands(FLOATS))
def col2im_1d(lw: CpuLowering, t: Tensor) -> None:
    """`y[c, i] = sum a[place, (c, tap)]` over all that have `i = place s + tap - p`."""
    (a,) = t.sources
    axis = Axis(t.ne[0], a.ne[0] // t.params["oc"], a.ne[1], t.params["s0"], t.params["p0"])
    patches = unfolded(as_f32(lw, without_first(View.of(a))), [axis])
    fold(lw, without_first(View.of(t)), patches, [axis])
