"""View: an operand as an array without memory, with broadcasting, merging of dimensions, and cutting.

Rules refer to memory by number; a plan replaces the number by an array. Shapes and strides are in NumPy
order, strides in bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from types import EllipsisType
from typing import Any, Final, TypeAlias

import numpy as np

from ggmlb.backends.common import strided
from ggmlb.core.dtypes import DType
from ggmlb.core.tensor import Ne, contiguous_nb

_ITEMS = {d: np.dtype(np.uint16) if d is DType.BF16 else d.numpy for d in DType}

CONSTANT: Final = -1

Place: TypeAlias = tuple[int, Any, int, tuple[int, ...], tuple[int, ...]]
"""Memory number, dtype, offset, shape and strides of an array; for a constant, CONSTANT and the value."""

Index = int | slice | EllipsisType | None


@dataclass(slots=True, eq=False)
class View:
    """A strided view of an operand or scratch, whose memory may be only a number, to be bound later.

    Attributes:
        memory: Number of an operand or piece of scratch of a node; a flat array of bytes once it is bound.
        type: The tensor's type. Items of a quantised type are bytes, of BF16 `uint16`.
        item: NumPy dtype of the items.
        offset: Of the first item in the memory [bytes].
        shape: NumPy order.
        strides: NumPy order [bytes].
    """

    memory: Any
    type: DType
    item: np.dtype[Any]
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def lay(cls, memory: Any, dtype: DType, offset: int, ne: Ne, nb: Ne | None = None) -> View:
        """View memory from byte `offset` on as a tensor with extents `ne`, strides `nb` (or contiguous)."""
        if nb is None:
            nb = contiguous_nb(dtype, ne)
        shape, strides = ne[::-1], nb[::-1]
        if dtype.block_size > 1:
            shape = (*shape[:3], dtype.row_size(ne[0]))
            strides = (*strides[:3], 1)
        return cls(memory, dtype, _ITEMS[dtype], offset, shape, strides)

    @classmethod
    def packed(
        cls, memory: Any, shape: tuple[int, ...], item: np.dtype[Any], dtype: DType = DType.F32
    ) -> View:
        """View memory from its beginning as a C-contiguous array with items of NumPy dtype `item`."""
        return cls(memory, dtype, item, 0, shape, packed_strides(shape, item.itemsize))

    def place(self) -> Place:
        """Return what a plan makes the array from: memory number and layout, or the array of a constant."""
        if isinstance(self.memory, int):
            return self.memory, self.item, self.offset, self.shape, self.strides
        return CONSTANT, np.ndarray(self.shape, self.item, self.memory, self.offset, self.strides), 0, (), ()

    def reshaped(self, shape: tuple[int, ...], strides: tuple[int, ...], offset: int = 0) -> View:
        """Return a view with other shape and strides, which begins `offset` bytes after this one."""
        return View(self.memory, self.type, self.item, self.offset + offset, shape, strides)

    def first(self, shape: tuple[int, ...]) -> View:
        """Return the first items of contiguous memory as a contiguous view of this shape."""
        return self.reshaped(shape, packed_strides(shape, self.item.itemsize))

    def reshape(self, *shape: int) -> View:
        """Return the view in another shape, as `numpy.reshape`, but never a copy.

        Raises:
            ValueError: The strides do not allow that shape.
        """
        if -1 in shape:
            others = -prod(shape)
            shape = tuple([prod(self.shape) // others if n == -1 else n for n in shape])
        if 0 in shape:
            return self.first(shape)
        (flat,) = merged([self])
        runs = list(zip(flat.shape, flat.strides, strict=True))
        left, step = 1, self.item.itemsize
        strides = []
        for n in reversed(shape):
            if left == 1 and n != 1 and runs:
                left, step = runs.pop()
            if left % n:
                raise ValueError(
                    f"shape {self.shape} with strides {self.strides} cannot become {shape} without a copy"
                )
            strides.append(step)
            left, step = left // n, step * n
        return self.reshaped(shape, tuple(reversed(strides)))

    def transposed(self, *axes: int) -> View:
        """Return the view with its axes in another order, as `numpy.transpose`."""
        return self.reshaped(tuple([self.shape[a] for a in axes]), tuple([self.strides[a] for a in axes]))

    def swapaxes(self, a: int, b: int) -> View:
        """Return the view with two axes exchanged, as `numpy.swapaxes`."""
        axes = list(range(len(self.shape)))
        axes[a], axes[b] = axes[b], axes[a]
        return self.transposed(*axes)

    def cut(self, axis: int, start: int, count: int) -> View:
        """Return the slice of `count` items from `start` on along one axis."""
        shape = list(self.shape)
        shape[axis] = count
        return self.reshaped(tuple(shape), self.strides, start * self.strides[axis])

    def __getitem__(self, index: Index | tuple[Index, ...]) -> View:
        """Return a part of the view, as of an array."""
        parts = list(index) if isinstance(index, tuple) else [index]
        n_missing = len(self.shape) - sum([i is not None and i is not ... for i in parts])
        at = parts.index(...) if ... in parts else len(parts)
        parts[at : at + 1] = [slice(None)] * n_missing
        shape, strides, offset, axis = [], [], 0, 0
        for i in parts:
            if i is None:
                shape.append(1)
                strides.append(0)
                continue
            n, stride = self.shape[axis], self.strides[axis]
            axis += 1
            if isinstance(i, slice):
                start, stop, step = i.indices(n)
                shape.append(len(range(start, stop, step)))
                strides.append(step * stride)
                offset += start * stride if shape[-1] else 0
            else:
                assert isinstance(i, int)
                offset += range(n)[i] * stride
        return self.reshaped(tuple(shape), tuple(strides), offset)

    def split(self, axis: int, period: int) -> View:
        """Return the view with `axis` of extent n split into two, of extents `n // period` and `period`."""
        n, stride = self.shape[axis], self.strides[axis]
        return self.reshaped(
            (*self.shape[:axis], n // period, period, *self.shape[axis + 1 :]),
            (*self.strides[:axis], period * stride, *self.strides[axis:]),
        )

    def extent(self) -> int:
        """Number of bytes from the first item to the end of the last."""
        return self.item.itemsize + sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))

    def is_packed(self) -> bool:
        """Whether the view is C-contiguous."""
        packed = packed_strides(self.shape, self.item.itemsize)
        return all(
            [n == 1 or stride == p for n, stride, p in zip(self.shape, self.strides, packed, strict=True)]
        )

    def is_blas_matrix(self) -> bool:
        """Whether BLAS can read the matrices in place: float32, contiguous along rows or along columns."""
        (rows, columns), (row, column) = self.shape[-2:], self.strides[-2:]
        return self.type is DType.F32 and (
            (column == 4 and row >= columns * 4) or (row == 4 and column >= rows * 4)
        )

    def value_shape(self) -> tuple[int, ...]:
        """The shape in tensor elements; the last extent of `shape` is in bytes for quantised types."""
        if not self.type.is_quantized:
            return self.shape
        return (*self.shape[:-1], self.shape[-1] // self.type.type_size * self.type.block_size)


def packed_strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Strides of a C-contiguous array [bytes]."""
    strides = []
    for n in reversed(shape):
        strides.append(itemsize)
        itemsize *= n
    return tuple(reversed(strides))


def broadcast(views: Sequence[View], inner: int = 0) -> list[View]:
    """Broadcast views to the extents of the first one, without a copy, except in the last `inner` dimensions.

    An extent of 1 repeats with stride 0. Where an extent divides the first view's (ggml's broadcasting),
    the dimension is split in two in all views. The last `inner` dimensions stay as they are.
    """
    full = views[0].shape
    n_outer = len(full) - inner
    if all([v.shape[:n_outer] == full[:n_outer] for v in views]):
        return list(views)
    parts: list[tuple[list[int], list[int]]] = [([], []) for _ in views]
    for d in range(n_outer):
        n = full[d]
        extents = [v.shape[d] for v in views]
        period = next((m for m in extents if m not in (1, n)), n)
        for (shape, strides), m, v in zip(parts, extents, views, strict=True):
            stride = 0 if m == 1 else v.strides[d]
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
    """Merge neighbouring dimensions where every view is contiguous; the last `inner` dimensions stay.

    The views must agree in all extents but those of the last `inner` dimensions. At least one outer
    dimension remains.
    """
    n_outer = len(views[0].shape) - inner
    shape, strides = strided.merged(
        views[0].shape[:n_outer][::-1], [v.strides[:n_outer][::-1] for v in views]
    )
    if not shape:
        shape, strides = [1], [[0] for _ in views]
    return [
        v.reshaped((*shape[::-1], *v.shape[n_outer:]), (*s[::-1], *v.strides[n_outer:]))
        for v, s in zip(views, strides, strict=True)
    ]


def grouped(a: View, *others: View) -> list[View]:
    """Reshape a product's operands: batch dimensions over which `a` repeats become rows of the others.

    `a` is `[n3, n2, m, k]`; it repeats over the others, `[n3 r3, n2 r2, rows, columns]`. It is returned
    as `[n3, n2, 1.., m, k]`, the others as `[n3, n2, .., rows, columns]`.
    """
    n3, n2 = a.shape[:2]
    repeats = [(v.shape[0] // n3, v.shape[1] // n2) for v in others]  # over the rows of each matrix
    rows = [v.reshaped((*r, *v.shape[2:]), v.strides) for v, r in zip(others, repeats, strict=True)]
    joined = merged(rows, 1)
    extra = [0] * (len(joined[0].shape) - 2)
    return [
        a.reshaped((n3, n2, *[1 for _ in extra], *a.shape[2:]), (*a.strides[:2], *extra, *a.strides[2:])),
        *[
            v.reshaped((n3, n2, *j.shape), (r3 * v.strides[0], r2 * v.strides[1], *j.strides))
            for v, j, (r3, r2) in zip(others, joined, repeats, strict=True)
        ],
    ]


Cut = tuple[tuple[int, int], ...]
"""A start and a count per dimension."""


def cuts(shape: tuple[int, ...], row: int, limit: int | None) -> Iterator[Cut]:
    """Yield cuts of an array of rows (extents `shape`, `row` items each) into tiles of about `limit` items.

    Without a limit, the whole shape is one tile.
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
    """Cut all views at the same places into tiles of about `limit` items, not in the last `inner` axes.

    The limit counts the items of the largest view.
    """
    if limit is None or max(prod(v.shape) for v in views) <= limit:
        return [list(views)]
    n_outer = len(views[0].shape) - inner
    row = max(prod(v.shape[n_outer:]) for v in views)
    return [[piece(v, cut) for v in views] for cut in cuts(views[0].shape[:n_outer], row, limit)]


def piece(view: View, cut: Cut) -> View:
    """Return the part of a view that `cut` gives by start and count in each of its first dimensions."""
    offset = sum(start * stride for (start, _), stride in zip(cut, view.strides, strict=False))
    return view.reshaped((*(n for _, n in cut), *view.shape[len(cut) :]), view.strides, offset)
