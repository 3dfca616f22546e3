"""Interpolation (UPSCALE): weighted sums of source elements, along one dimension after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ggmlb.backends.common.rules import F32, has_elements, operands
from ggmlb.backends.common.workspace import Array
from ggmlb.backends.cpu.kernels import take
from ggmlb.backends.cpu.lowering import RULES, NodeLowering
from ggmlb.backends.cpu.views import View
from ggmlb.core.enums import Op, ScaleMode
from ggmlb.core.tensor import Tensor

Floats = npt.NDArray[np.float32]

CUBIC = np.float32(-0.75)
"""The slope of the bicubic kernel at distance 1, as in PyTorch."""


class Taps(NamedTuple):
    """For each element of an interpolated dimension, the source indices that it sums, and their weights.

    Attributes:
        indices: `[taps, n]`.
        weights: `[taps, n]`; `None` for a single tap of weight 1.
    """

    indices: npt.NDArray[np.intp]
    weights: Floats | None = None


class Grid:
    """Source coordinates of the result's elements along one dimension; in float32, as in ggml.

    Attributes:
        scale: Elements of the result per element of the source.
        centre: Offset of an element's centre: 0.5, or 0 with `align_corners`.
        at: Source coordinate of each element of the result.
    """

    def __init__(self, n_in: int, n_out: int, align_corners: bool) -> None:
        self.n_in = n_in
        self.scale = np.float32(n_out) / np.float32(n_in)
        if align_corners and n_in > 1 and n_out > 1:
            self.scale = np.float32(n_out - 1) / np.float32(n_in - 1)
        self.centre = np.float32(0.0 if align_corners else 0.5)
        self.count = np.arange(n_out, dtype=np.float32)
        self.at = (self.count + self.centre) / self.scale

    def inside(self, index: Floats) -> npt.NDArray[np.intp]:
        """Return indices clamped to 0 to `n_in - 1`, as integers."""
        return np.clip(index, 0, self.n_in - 1).astype(np.intp)


def nearest(grid: Grid) -> Taps:
    """Return the taps of nearest-neighbour scaling: the element at `floor(i / scale)`, weight 1."""
    return Taps(grid.inside(np.floor(grid.count / grid.scale))[None])


def bilinear(grid: Grid) -> Taps:
    """Return the taps of linear interpolation: the two nearest elements and their weights."""
    x = grid.at - grid.centre
    index = grid.inside(np.floor(x) + np.arange(2, dtype=np.float32)[:, None])
    right = np.clip(x - index[0].astype(np.float32), 0, 1)
    return Taps(index, np.stack([1 - right, right]))


def bicubic(grid: Grid) -> Taps:
    """Return the taps of cubic interpolation: the four nearest elements and their weights."""
    x = grid.at - grid.centre
    offset = np.arange(-1, 3, dtype=np.float32)[:, None]
    distance = np.abs(x - np.floor(x) - offset)
    near = ((CUBIC + 2) * distance - (CUBIC + 3)) * distance * distance + 1
    far = ((CUBIC * distance - 5 * CUBIC) * distance + 8 * CUBIC) * distance - 4 * CUBIC
    return Taps(grid.inside(np.floor(x) + offset), np.where(distance <= 1, near, far))


def antialiased(grid: Grid) -> Taps:
    """Return the taps of a triangle filter, of radius `1 / scale` source elements when shrinking, else 1."""
    support = max(np.float32(1), 1 / grid.scale)
    start = np.maximum(np.trunc(grid.at - support + grid.centre), 0)
    end = np.minimum(np.trunc(grid.at + support + grid.centre), grid.n_in)
    index = start + np.arange(int((end - start).max()), dtype=np.float32)[:, None]
    weight = np.maximum(1 - np.abs((index - grid.at + grid.centre) * (1 / support)), 0)
    weight = np.where(index < end, weight, np.float32(0))
    return Taps(grid.inside(index), weight / weight.sum(axis=0))


METHODS: dict[ScaleMode, Callable[[Grid], Taps]] = {
    ScaleMode.NEAREST: nearest,
    ScaleMode.BILINEAR: bilinear,
    ScaleMode.BICUBIC: bicubic,
}


@RULES.rule(Op.UPSCALE, operands(F32, out=F32), has_elements)
def upscale(lw: NodeLowering, t: Tensor) -> None:
    """Resize dimensions 0 and 1 by `mode`, 2 and 3 by nearest neighbour."""
    (a,), p = t.sources, t.params
    method = antialiased if p["antialias"] else METHODS[p["mode"]]
    x, y = lw.view(a), lw.view(t)
    resized = [d for d in range(4) if a.ne[d] != t.ne[d]]
    resized.sort(key=lambda d: t.ne[d] / a.ne[d])  # shrinking dimensions first: less work for the others
    for d in resized:
        grid = Grid(a.ne[d], t.ne[d], p["align_corners"] and d < 2)
        shape = list(x.shape)
        shape[3 - d] = t.ne[d]
        z = y if d == resized[-1] else lw.scratch(tuple(shape))
        _resample(lw, z, x, 3 - d, method(grid) if d < 2 else nearest(grid))
        x = z
    if not resized:
        lw.emit(np.copyto, y, x)


def _resample(lw: NodeLowering, y: View, x: View, axis: int, taps: Taps) -> None:
    """Emit `y[.., i, ..] = sum weight[tap, i] x[.., index[tap, i], ..]` along one axis."""
    index = list(taps.indices)
    if taps.weights is None:
        lw.emit(take, y, x, index[0], axis)
        return
    shape = [1] * 4
    shape[axis] = -1
    weight = [w.reshape(shape) for w in taps.weights]
    n = len(index)

    def kernel(y: Array, x: Array, tmp: Array, *tables: Array) -> None:
        take(y, x, tables[0], axis)
        np.multiply(y, tables[n], out=y)
        for i, w in zip(tables[1:n], tables[n + 1 :], strict=True):
            take(tmp, x, i, axis)
            np.multiply(tmp, w, out=tmp)
            np.add(y, tmp, out=y)

    lw.emit(kernel, y, x, lw.scratch(y.shape), *index, *weight)
