"""Windows and relative positions of image encoders (SAM)."""

from __future__ import annotations

import numpy as np

from ggmlb.backends.common.rules import F32, FLOATS, operands
from ggmlb.backends.common.workspace import Array
from ggmlb.backends.cpu import kernels
from ggmlb.backends.cpu.lowering import RULES, NodeLowering
from ggmlb.backends.cpu.ops.conv import without_first
from ggmlb.backends.cpu.views import View
from ggmlb.core.dtypes import DType
from ggmlb.core.enums import Op
from ggmlb.core.tensor import Tensor


def _whole(lw: NodeLowering, image: View, w: int) -> View:
    """Return the image `[1, H, W, C]`, or scratch of its size rounded up to whole windows."""
    shape = (1, -(-image.shape[1] // w) * w, -(-image.shape[2] // w) * w, image.shape[3])
    return image if shape == image.shape else lw.scratch(shape)


def _within(whole: View, image: View) -> View:
    return whole.cut(1, 0, image.shape[1]).cut(2, 0, image.shape[2])


def _by_window(whole: View, windows: View) -> tuple[View, View]:
    """View an image, and its windows `[n, w, w, C]`, as `[rows, columns, w, w, C]`."""
    w = windows.shape[1]
    grid = without_first(whole.split(2, w).split(1, w).transposed(0, 1, 3, 2, 4, 5))
    return grid, windows.split(0, grid.shape[1])


@RULES.rule(Op.WIN_PART, operands(F32, out=F32))
def win_part(lw: NodeLowering, t: Tensor) -> None:
    """Partition an image, padded with zeros, into windows."""
    image = lw.view(t.sources[0])
    whole = _whole(lw, image, t.params["w"])
    if whole is not image:
        lw.emit(np.ndarray.fill, whole, 0)
        lw.copy(_within(whole, image), image)
    of, to = _by_window(whole, lw.view(t))
    lw.copy(to, of)


@RULES.rule(Op.WIN_UNPART, operands(F32, out=F32))
def win_unpart(lw: NodeLowering, t: Tensor) -> None:
    """Reassemble an image from its windows, without padding."""
    image = lw.view(t)
    whole = _whole(lw, image, t.params["w"])
    to, of = _by_window(whole, lw.view(t.sources[0]))
    lw.copy(to, of)
    if whole is not image:
        lw.copy(image, _within(whole, image))


@RULES.rule(Op.GET_REL_POS, operands(FLOATS, out=frozenset({DType.F16})))
def get_rel_pos(lw: NodeLowering, t: Tensor) -> None:
    """Gather relative positions: `y[query, key] = a[n - 1 - key + query]`, `n` the number of keys."""
    y, x = lw.view(t), lw.view(t.sources[0])
    if x.type == DType.BF16:
        x = lw.f32(x)
    row, item = x.strides[2:]
    rows = x.reshaped(y.shape, (0, row, -row, item), (t.ne[1] - 1) * row)
    lw.emit(kernels.copy, y, rows)


@RULES.rule(Op.ADD_REL_POS, operands(F32, F32, F32, out=F32))
def add_rel_pos(lw: NodeLowering, t: Tensor) -> None:
    """`y[place, h, w] = a[place, h, w] + ph[place, h] + pw[place, w]`."""
    (a, pw, ph) = t.sources
    y, x = (lw.view(s).split(3, pw.ne[0]) for s in (t, a))
    (n, _, place, item), zero = lw.view(pw).strides, 0
    wide = lw.view(pw).reshaped(y.shape, (zero, n, place, zero, item))
    high = lw.view(ph).reshaped(y.shape, (zero, n, place, item, zero))

    def kernel(y: Array, a: Array, wide: Array, high: Array) -> None:
        np.add(a, wide, out=y)
        np.add(y, high, out=y)

    lw.tiled(kernel, y, x, wide, high)
