"""Convolution as one op: the kernel as a matrix, times patches, as many at a time as fit in some scratch."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from ggmlb.backends.common.rules import FLOATS, operands
from ggmlb.backends.cpu.ops.patches import (
    as_f32,
    axes_of,
    each_tap,
    memory_order,
    packed_f32,
    padded,
    sum_of_products,
    windows,
)
from ggmlb.backends.cpu.rules import RULES
from ggmlb.backends.cpu.views import View, cuts, merged
from ggmlb.core.dtypes import DType
from ggmlb.core.enums import Op
from ggmlb.core.tensor import Tensor

if TYPE_CHECKING:
    from ggmlb.backends.common.workspace import Array
    from ggmlb.backends.cpu.lowering import CpuLowering
    from ggmlb.backends.cpu.ops.patches import Axis

N_PATCH_ITEMS = 1 << 20
"""Items of patches that are held at a time."""


@RULES.rule(Op.CONV_2D, operands(FLOATS, FLOATS))
def conv_2d(lw: CpuLowering, t: Tensor) -> None:
    """`y[n, o, place] = sum a[o, c, tap] b[n, c, place s + tap d - p]`."""
    kernel, data = t.sources
    axes = axes_of(t.params, data.ne[:2], kernel.ne[:2], t.ne[:2])
    _convolve(lw, View.of(t), View.of(data), View.of(kernel), axes)


@RULES.rule(Op.CONV_3D, operands(FLOATS, FLOATS))
def conv_3d(lw: CpuLowering, t: Tensor) -> None:
    """As `conv_2d`, with depth; channels share a dimension with the batch."""
    kernel, data = t.sources
    n_in, n_out = t.params["c"], t.params["oc"]
    axes = axes_of(t.params, data.ne[:3], kernel.ne[:3], t.ne[:3])
    _convolve(
        lw,
        View.of(t).split(0, n_out),
        View.of(data).split(0, n_in),
        View.of(kernel).split(0, n_in),
        axes,
    )


def _convolve(lw: CpuLowering, y: View, data: View, kernel: View, axes: Sequence[Axis]) -> None:
    """Emit `y`, `[N, OC, places..]`, of data `[N, IC, spatial..]` and a kernel `[OC, IC, taps..]`."""
    weight = packed_f32(lw, kernel).reshape(kernel.shape[0], -1)
    met = windows(padded(lw, data, axes), axes)
    out = y if y.type == DType.F32 else lw.view(lw.scratch(y.shape))
    n_items = weight.shape[1] * prod(y.shape[3:])
    pieces = list(cuts((y.shape[0], y.shape[2]), n_items, N_PATCH_ITEMS))
    scratch = lw.scratch((max(n * m for (_, n), (_, m) in pieces) * n_items,))
    for images, places in pieces:
        patches = _patches(lw, met.cut(0, *images).cut(2, *places), scratch)
        into = out.cut(0, *images).cut(2, *places)
        result = into.reshaped((*into.shape[:2], prod(into.shape[2:])), (*into.strides[:2], into.strides[-1]))
        lw.emit(np.matmul, weight, patches, out=lw.bind(result))
    if out is not y:
        lw.copy(y, out)


def _patches(lw: CpuLowering, met: View, scratch: Array) -> Array:
    """Patches `[N, IC, places.., taps..]` as `[N, IC taps.., places..]`: the data itself, or copied."""
    rank = (len(met.shape) - 2) // 2
    n, channels, *rest = met.shape
    places, taps = rest[:rank], rest[rank:]
    if prod(taps) == 1:
        (flat,) = merged([met.reshaped(tuple(places), met.strides[2 : 2 + rank])])
        if len(flat.shape) == 1:
            return lw.bind(met.reshaped((n, channels, *flat.shape), (*met.strides[:2], *flat.strides)))
    items = scratch[: prod(met.shape)].reshape(n, channels, *taps, *places)
    copies = lw.view(items).transposed(0, 1, *range(2 + rank, 2 + 2 * rank), *range(2, 2 + rank))
    for to, of in each_tap(copies, met):
        lw.copy(to, of)
    return items.reshape(n, channels * prod(taps), prod(places))


@RULES.rule(Op.CONV_2D_DW, operands(FLOATS, FLOATS))
def conv_2d_dw(lw: CpuLowering, t: Tensor) -> None:
    """`y[n, c, place] = sum a[c, tap] b[n, c, place s + tap d - p]`: each channel has its own kernel."""
    kernel, data = t.sources
    axes = axes_of(t.params, data.ne[:2], kernel.ne[:2], t.ne[:2])
    met = windows(padded(lw, View.of(data), axes), axes)
    weight = as_f32(lw, View.of(kernel))
    weights = weight.reshaped(met.shape, (0, weight.strides[0], 0, 0, *weight.strides[2:]))
    factors = [v for pair in each_tap(met, weights) for v in pair]
    views = [View.of(t), *factors]
    order = memory_order(views[0])
    lw.tiled(sum_of_products, *(v.transposed(*order) for v in views), scratch=1, work=len(factors))
