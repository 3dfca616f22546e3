"""View: the memory layout of an operand, with broadcasting, merging and cutting.

All is done on plain tuples; arrays are made at the end.
Shapes and strides are in NumPy order, strides in bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple, Protocol

import numpy as np

from ggmlb.backends.common import strided
from ggmlb.core.dtypes import DType
from ggmlb.core.tensor import Ne, Tensor, contiguous_nb

_ITEMS = {d: np.dtype(np.uint16) if d is DType.BF16 else d.numpy for d in DType}


class ViewSource(Protocol):
    """What a view looks at: a `Buffer`, or scratch (see `CpuLowering.view`)."""

    @property
    def base(self) -> Any:
        """The memory, a flat uint8 array."""


class View(NamedTuple):
    """A strided window on memory.

    Attributes:
        buffer: Where the data lies.
        type: What the items mean. A quantised type is seen as rows of bytes, BF16 as `uint16`.
        item: NumPy dtype of the items.
        offset: Of the first item in the buffer [bytes].
        shape: NumPy order.
        strides: NumPy order [bytes].
    """

    buffer: ViewSource
    type: DType
    item: np.dtype[Any]
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, t: Tensor) -> View:
        """View a placed tensor in four dimensions, `ne` reversed; quantised rows as their bytes."""
        assert t.buffer is not None  # the backend checked the graph
        dtype, nb = t.buffer.stored_layout(t)
        return cls.lay(t.buffer, dtype, t.offset, t.ne, nb)

    @classmethod
    def lay(cls, buffer: ViewSource, dtype: DType, offset: int, ne: Ne, nb: Ne | None = None) -> View:
        """View memory as a tensor of that type, with extents `ne`, and strides `nb` or none but packed."""
        if nb is None:
            nb = contiguous_nb(dtype, ne)
        shape, strides = ne[::-1], nb[::-1]
        if dtype.block_size > 1:
            shape = (*shape[:3], dtype.row_size(ne[0]))
            strides = (*strides[:3], 1)
        return _view(cls, (buffer, dtype, _ITEMS[dtype], offset, shape, strides))

    def reshaped(self, shape: tuple[int, ...], strides: tuple[int, ...], offset: int = 0) -> View:
        """Return another window on the same memory, `offset` bytes further on."""
        return _view(View, (self[0], self[1], self[2], self[3] + offset, shape, strides))

    def transposed(self, *axes: int) -> View:
        """Return the view with its axes in another order, as `numpy.transpose`."""
        return self.reshaped(tuple([self.shape[a] for a in axes]), tuple([self.strides[a] for a in axes]))

    def cut(self, axis: int, start: int, count: int) -> View:
        """Return `count` items from `start` on along one axis."""
        shape = list(self.shape)
        shape[axis] = count
        return self.reshaped(tuple(shape), self.strides, start * self.strides[axis])

    def split(self, axis: int, period: int) -> View:
        """Return the view with one axis split in two, the second of extent `period`."""
        n, stride = self.shape[axis], self.strides[axis]
        return self.reshaped(
            (*self.shape[:axis], n // period, period, *self.shape[axis + 1 :]),
            (*self.strides[:axis], period * stride, *self.strides[axis:]),
        )

    def extent(self) -> int:
        """The bytes from the first item to the end of the last."""
        return self.item.itemsize + sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))

    def is_packed(self) -> bool:
        """Whether the items lie side by side in order."""
        packed = packed_strides(self.shape, self.item.itemsize)
        return self.strides == packed or all(
            n == 1 or stride == p for n, stride, p in zip(self.shape, self.strides, packed, strict=True)
        )


@lru_cache(4096)
def packed_strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """The strides of items that lie side by side in order."""
    strides = []
    for n in reversed(shape):
        strides.append(itemsize)
        itemsize *= n
    return tuple(reversed(strides))


_view = tuple.__new__  # of the fields in order: half the time of the constructor, for what is made most

Layout = tuple[tuple[int, ...], tuple[int, ...]]
"""Shape and strides."""

Layouts = tuple[Layout, ...]


def broadcast(views: Sequence[View], inner: int = 0) -> list[View]:
    """Repeat views over the extents of the first, without a copy; all results have equal extents.

    An extent of 1 repeats with stride 0. Where an extent divides the first view's (ggml's broadcasting),
    the dimension is split in two in all views. The last `inner` dimensions stay as they are.
    """
    return _relaid(views, _broadcast(_layouts(views), inner))


def merged(views: Sequence[View], inner: int = 0) -> list[View]:
    """Merge adjacent dimensions that all views step through alike; the last `inner` stay as they are.

    The views must agree in all extents but those of the last `inner` dimensions. At least one outer
    dimension remains.
    """
    return _relaid(views, _merged(_layouts(views), inner))


def aligned(views: Sequence[View], inner: int = 0) -> list[View]:
    """Broadcast, then merge."""
    return _relaid(views, _aligned(_layouts(views), inner))


def grouped(views: Sequence[View]) -> list[View]:
    """Make one matrix of all rows that meet the same weights: dimensions that the first view does not have.

    The first is `[n3, n2, m, k]`; it repeats over the others, `[n3 r3, n2 r2, rows, columns]`. It is returned
    as `[n3, n2, 1.., m, k]`, the others as `[n3, n2, .., rows, columns]`.
    """
    return _relaid(views, _grouped(_layouts(views)))


def _layouts(views: Sequence[View]) -> Layouts:
    return tuple([(v.shape, v.strides) for v in views])


def _relaid(views: Sequence[View], layouts: Layouts) -> list[View]:
    return [
        _view(View, (buffer, dtype, item, offset, *layout))
        for (buffer, dtype, item, offset, _, _), layout in zip(views, layouts, strict=True)
    ]


# Layouts are few and come again for every layer of a model, so what is worked out on them is kept.


@lru_cache(1 << 14)
def _broadcast(layouts: Layouts, inner: int) -> Layouts:
    full = layouts[0][0]
    n_outer = len(full) - inner
    if all(shape[:n_outer] == full[:n_outer] for shape, _ in layouts):
        return layouts
    parts: list[tuple[list[int], list[int]]] = [([], []) for _ in layouts]
    for d in range(n_outer):
        n = full[d]
        extents = [shape[d] for shape, _ in layouts]
        period = next((m for m in extents if m not in (1, n)), n)
        for (shape, strides), m, layout in zip(parts, extents, layouts, strict=True):
            stride = 0 if m == 1 else layout[1][d]
            if period != n:
                shape.append(n // period)
                strides.append(period * stride if m == n else 0)
            shape.append(period)
            strides.append(stride)
    return tuple(
        ((*shape, *layout[0][n_outer:]), (*strides, *layout[1][n_outer:]))
        for layout, (shape, strides) in zip(layouts, parts, strict=True)
    )


@lru_cache(1 << 14)
def _aligned(layouts: Layouts, inner: int) -> Layouts:
    return _merged(_broadcast(layouts, inner), inner)


@lru_cache(1 << 14)
def _merged(layouts: Layouts, inner: int) -> Layouts:
    n_outer = len(layouts[0][0]) - inner
    shape, strides = strided.merged(
        layouts[0][0][:n_outer][::-1], [strides[:n_outer][::-1] for _, strides in layouts]
    )
    if not shape:
        shape, strides = [1], [[0] for _ in layouts]
    return tuple(
        ((*shape[::-1], *layout[0][n_outer:]), (*s[::-1], *layout[1][n_outer:]))
        for layout, s in zip(layouts, strides, strict=True)
    )


@lru_cache(1 << 14)
def _grouped(layouts: Layouts) -> Layouts:
    (shape, strides), *others = layouts
    n3, n2 = shape[:2]
    rows = []  # r3, r2, rows | columns, of each matrix
    outer = []  # the steps from matrix to matrix
    for (e3, e2, *extents), (s3, s2, *steps) in others:
        r3, r2 = e3 // n3, e2 // n2
        rows.append(((r3, r2, *extents), (s3, s2, *steps)))
        outer.append((r3 * s3, r2 * s2))
    joined = _merged(tuple(rows), 1)
    n_extra = len(joined[0][0]) - 2
    weight = (n3, n2, *(1,) * n_extra, *shape[2:]), (*strides[:2], *(0,) * n_extra, *strides[2:])
    return (weight, *(((n3, n2, *e), (*o, *s)) for o, (e, s) in zip(outer, joined, strict=True)))


def is_blas_matrix(view: View) -> bool:
    """Whether BLAS takes the last two dimensions as they lie: one of them without gaps."""
    (rows, columns), (row, column) = view.shape[-2:], view.strides[-2:]
    item = view.item.itemsize
    return (column == item and row >= columns * item) or (row == item and column >= rows * item)


Cut = tuple[tuple[int, int], ...]
"""A start and a count per dimension."""


def cuts(shape: tuple[int, ...], row: int, limit: int | None) -> Iterator[Cut]:
    """Cut an outer shape, of rows of `row` items, into pieces of at most about `limit` items.

    `None` cuts nothing.
    """
    whole = tuple((0, n) for n in shape)
    if limit is None or prod(shape) * row <= limit or not shape:
        yield whole
        return
    rest = prod(shape[1:]) * row
    step = max(1, limit // rest) if rest else shape[0]
    for start in range(0, shape[0], step):
        here = (start, min(step, shape[0] - start))
        if rest > limit:
            for inner in cuts(shape[1:], row, limit):
                yield (here, *inner)
        else:
            yield (here, *whole[1:])


def tiles(views: Sequence[View], inner: int, limit: int | None) -> list[list[View]]:
    """Cut views of equal outer extents alike, into pieces of at most about `limit` items of the largest.

    The last `inner` dimensions are never cut.
    """
    if limit is None or max(prod(v.shape) for v in views) <= limit:
        return [list(views)]
    n_outer = len(views[0].shape) - inner
    row = max(prod(v.shape[n_outer:]) for v in views)
    return [[piece(v, cut) for v in views] for cut in cuts(views[0].shape[:n_outer], row, limit)]


def piece(view: View, cut: Cut) -> View:
    """Return the part of a view that a cut of its first dimensions leaves."""
    offset = sum(start * stride for (start, _), stride in zip(cut, view.strides, strict=False))
    return view.reshaped((*(n for _, n in cut), *view.shape[len(cut) :]), view.strides, offset)
