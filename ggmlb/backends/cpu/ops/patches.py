"""Sliding windows of convolution and pooling, as views of the data.

No rule is made here. Views are `[N, C, spatial dimensions..]` in NumPy order, with one `Axis` for each
spatial dimension. A place is where the kernel may lie, a tap is one of its elements.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from math import prod
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ggmlb.core.dtypes import DType

if TYPE_CHECKING:
    from ggmlb.backends.common.workspace import Array
    from ggmlb.backends.cpu.lowering import CpuLowering
    from ggmlb.backends.cpu.views import View


class Axis(NamedTuple):
    """The geometry of a sliding kernel along one dimension.

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
        """Elements of the data with the padding that the kernel touches."""
        reach = (self.places - 1) * self.stride + (self.taps - 1) * self.dilation + 1
        return max(reach, self.padding + self.n)


def axes_of(
    params: Mapping[str, int], data: Sequence[int], kernel: Sequence[int], places: Sequence[int]
) -> list[Axis]:
    """The axes that the params `s0, p0, d0, s1, ..` describe; extents are given in ne order."""
    axes = [
        Axis(n, k, m, params[f"s{i}"], params[f"p{i}"], params[f"d{i}"])
        for i, (n, k, m) in enumerate(zip(data, kernel, places, strict=True))
    ]
    return axes[::-1]


def as_f32(lw: CpuLowering, x: View) -> View:
    """The values as float32: the memory itself, or scratch that a step fills."""
    if x.type == DType.F32:
        return x
    y = lw.view(lw.scratch(x.shape))
    lw.copy(y, x)
    return y


def packed_f32(lw: CpuLowering, x: View) -> Array:
    """The values as a C-contiguous float32 array: the memory itself, or scratch that a step fills."""
    if x.type == DType.F32 and x.is_packed():
        return lw.bind(x)
    y = lw.scratch(x.shape)
    lw.copy(lw.view(y), x)
    return y


def padded(lw: CpuLowering, x: View, axes: Sequence[Axis], fill: float = 0.0) -> View:
    """Return the padded data as float32: the memory itself, or scratch filled by steps."""
    shape = (*x.shape[:2], *(a.width for a in axes))
    if shape == x.shape:
        return as_f32(lw, x)
    order = memory_order(x)
    y = lw.view(lw.scratch(tuple(shape[d] for d in order)))
    lw.emit(lw.bind(y).fill, fill)
    y = y.transposed(*(order.index(d) for d in range(len(shape))))
    lw.copy(unpadded(y, axes), x)
    return y


def memory_order(x: View) -> list[int]:
    """The dimensions as they lie in memory, the outermost first."""
    return sorted(range(len(x.shape)), key=lambda d: -x.strides[d])


def unpadded(x: View, axes: Sequence[Axis]) -> View:
    """The data within its padding."""
    for i, a in enumerate(axes):
        x = x.cut(2 + i, a.padding, a.n)
    return x


def windows(x: View, axes: Sequence[Axis]) -> View:
    """View padded data as `[N, C, places.., taps..]`: the window under each place of the kernel."""
    steps = list(zip(axes, x.strides[2:], strict=True))
    return x.reshaped(
        (*x.shape[:2], *(a.places for a in axes), *(a.taps for a in axes)),
        (*x.strides[:2], *(a.stride * s for a, s in steps), *(a.dilation * s for a, s in steps)),
    )


def each_tap(*patches: View) -> Iterator[tuple[View, ...]]:
    """For each tap, its part of views of equal shape `[N, C, places.., taps..]`: `[N, C, places..]`."""
    shape = patches[0].shape
    n = 2 + (len(shape) - 2) // 2
    for tap in product(*map(range, shape[n:])):
        yield tuple(
            v.reshaped(shape[:n], v.strides[:n], sum(i * s for i, s in zip(tap, v.strides[n:], strict=True)))
            for v in patches
        )


def fold(lw: CpuLowering, y: View, patches: View, axes: Sequence[Axis]) -> None:
    """Emit the sum, for each element of the data `y`, of the elements of `patches` that met it.

    It turns `windows` round. The patches are float32, `[N, C, places.., taps..]`.
    """
    shape = (*y.shape[:2], *(a.width for a in axes))
    whole = y if shape == y.shape and y.type == DType.F32 else lw.view(lw.scratch(shape))
    lw.emit(lw.bind(whole).fill, 0)
    for met, patch in each_tap(windows(whole, axes), patches):
        into = lw.bind(met)
        lw.emit(np.add, into, lw.bind(patch), out=into)
    if whole is not y:
        lw.copy(y, unpadded(whole, axes))


def unfolded(rows: View, axes: Sequence[Axis]) -> View:
    """See rows of `[C, taps..]`, one per place, as `[N, C, places.., taps..]`."""
    rank = len(axes)
    for i in range(rank):
        rows = rows.split(rank + 1 + i, prod(a.taps for a in axes[i:]))
    places = range(1, rank + 1)
    return rows.transposed(0, rank + 1, *places, *range(rank + 2, 2 * rank + 2))


def without_first(view: View) -> View:
    """The view without its first dimension."""
    return view.reshaped(view.shape[1:], view.strides[1:])


def sum_of_products(y: Array, *operands: Array) -> None:
    """The kernel `y = x0 w0 + x1 w1 + ..` of operands `x0, w0, x1, w1, ..` and one scratch array."""
    *factors, tmp = operands
    np.multiply(factors[0], factors[1], out=y)
    for x, w in zip(factors[2::2], factors[3::2], strict=True):
        np.multiply(x, w, out=tmp)
        np.add(y, tmp, out=y)
