"""Views: how an operand lies in memory, and the arithmetic of broadcasting, merging and cutting it.

All is done on plain tuples; arrays are made at the end, by the library that owns the memory.
Shapes and strides are in NumPy order, strides in bytes.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ggmlb.dtypes import DType

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ggmlb.interface import Buffer
    from ggmlb.tensor import Tensor

_UINT16 = np.dtype(np.uint16)


class View(NamedTuple):
    """A strided window on a buffer.

    Attributes:
        buffer: Where the data lies.
        type: What the items mean. A quantised type is seen as rows of bytes, BF16 as `uint16`.
        item: NumPy dtype of the items.
        offset: Of the first item in the buffer [bytes].
        shape: NumPy order.
        strides: NumPy order [bytes].
    """

    buffer: Buffer
    type: DType
    item: np.dtype[Any]
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, t: Tensor) -> View:
        """View a placed tensor in four dimensions, `ne` reversed; quantised rows as their bytes."""
        assert t.buffer is not None  # the backend checked the graph
        dtype = t.dtype
        shape, strides = t.ne[::-1], t.nb[::-1]
        if dtype.block_size > 1:
            shape = (*shape[:3], dtype.row_size(t.ne[0]))
            strides = (*strides[:3], 1)
        item = _UINT16 if dtype == DType.BF16 else dtype.numpy
        return cls(t.buffer, dtype, item, t.offset, shape, strides)

    def reshaped(self, shape: tuple[int, ...], strides: tuple[int, ...], offset: int = 0) -> View:
        """Return another window on the same memory, `offset` bytes further on."""
        return self._replace(shape=shape, strides=strides, offset=self.offset + offset)

    def transposed(self, *axes: int) -> View:
        """Return the view with its axes in another order, as `numpy.transpose`."""
        return self.reshaped(tuple(self.shape[a] for a in axes), tuple(self.strides[a] for a in axes))

    def is_packed(self) -> bool:
        """Whether the items lie side by side in order."""
        expected = self.item.itemsize
        for n, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if n != 1 and stride != expected:
                return False
            expected *= n
        return True


def broadcast(views: Sequence[View], inner: int = 0) -> list[View]:
    """Repeat views over the extents of the first, without a copy; all results have equal extents.

    An extent of 1 repeats with stride 0. Where an extent divides the first view's (ggml's broadcasting),
    the dimension is split in two in all views. The last `inner` dimensions stay as they are.
    """
    n_outer = len(views[0].shape) - inner
    parts: list[tuple[list[int], list[int]]] = [([], []) for _ in views]
    for d in range(n_outer):
        extents = [v.shape[d] for v in views]
        n = extents[0]
        period = next((m for m in extents if m not in (1, n)), n)
        for (shape, strides), m, view in zip(parts, extents, views, strict=True):
            stride = 0 if m == 1 else view.strides[d]
            if period != n:
                shape.append(n // period)
                strides.append(period * stride if m == n else 0)
            shape.append(period)
            strides.append(stride)
    return [
        v.reshaped((*shape, *v.shape[n_outer:]), (*strides, *v.strides[n_outer:]))
        for v, (shape, strides) in zip(views, parts, strict=True)
    ]


def merged(views: Sequence[View], inner: int = 0) -> list[View]:
    """Merge adjacent dimensions that all views step through alike; the last `inner` stay as they are.

    The views must agree in all extents but those of the last `inner` dimensions. At least one outer
    dimension remains.
    """
    n_outer = len(views[0].shape) - inner
    outer = views[0].shape[:n_outer]
    shape: list[int] = []
    strides: list[list[int]] = [[] for _ in views]
    for d in range(n_outer):
        n = outer[d]
        if n == 1:
            continue
        steps = [v.strides[d] for v in views]
        if shape and all(s[-1] == step * n for s, step in zip(strides, steps, strict=True)):
            shape[-1] *= n
            for s, step in zip(strides, steps, strict=True):
                s[-1] = step
        else:
            shape.append(n)
            for s, step in zip(strides, steps, strict=True):
                s.append(step)
    if not shape:
        shape, strides = [1], [[0] for _ in views]
    return [
        v.reshaped((*shape, *v.shape[n_outer:]), (*s, *v.strides[n_outer:]))
        for v, s in zip(views, strides, strict=True)
    ]


def tiles(views: Sequence[View], inner: int, limit: int | None) -> Iterator[list[View]]:
    """Cut views of equal outer extents alike, into pieces of at most about `limit` items of the largest.

    The last `inner` dimensions are never cut. `None` cuts nothing.
    """
    shape = views[0].shape
    n_outer = len(shape) - inner
    row = max(prod(v.shape[n_outer:]) for v in views)
    if limit is None or prod(shape[:n_outer]) * row <= limit:
        yield list(views)
        return
    yield from _cut(list(views), 0, n_outer, row, limit)


def _cut(views: list[View], axis: int, n_outer: int, row: int, limit: int) -> Iterator[list[View]]:
    shape = views[0].shape
    n = shape[axis]
    rest = prod(shape[axis + 1 : n_outer]) * row
    step = max(1, limit // rest) if rest else n
    for start in range(0, n, step):
        count = min(step, n - start)
        piece = [
            v.reshaped((*v.shape[:axis], count, *v.shape[axis + 1 :]), v.strides, start * v.strides[axis])
            for v in views
        ]
        if rest > limit and axis + 1 < n_outer:
            yield from _cut(piece, axis + 1, n_outer, row, limit)
        else:
            yield piece
