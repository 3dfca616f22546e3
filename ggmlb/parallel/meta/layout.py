"""Layout: the devices' slices of a view of a cut tensor.

A contiguous tensor cut along axis `a` is a sequence of *blocks*, one for each index of the dimensions
above `a`. A block is `ne[a]` *units* of all elements below `a`. A device holds consecutive units of each
block. Each dimension of a view steps by units, by blocks, or within a unit. On a device, blocks have fewer
units, and are therefore shorter.
"""

from __future__ import annotations

from typing import NamedTuple

from ggmlb.core.dtypes import DType
from ggmlb.core.sharding import SplitAxis, SplitState
from ggmlb.core.tensor import Ne, contiguous_nb


class Slice(NamedTuple):
    """A device's part of a view: extents, byte strides, and byte offset in its part of the viewed tensor."""

    ne: Ne
    nb: Ne
    offset: int


class SlicedView(NamedTuple):
    """The split state of a view, and each device's part of it."""

    state: SplitState
    slices: tuple[Slice, ...]


def slice_of(dtype: DType, ne: Ne, state: SplitState, device: int) -> Slice:
    """Return a device's part of a contiguous tensor."""
    if state.is_cut:
        ne = _with(ne, state.axis, state.extents()[device])
    return Slice(ne, contiguous_nb(dtype, ne), 0)


def slices_of_view(
    dtype: DType, root_ne: Ne, root: SplitState, ne: Ne, nb: Ne, offset: int
) -> SlicedView | None:
    """Return each device's part of a view of a cut tensor; `None` unless it consists of whole segments.

    Args:
        dtype: Type of both.
        root_ne: Extents of the tensor.
        root: Split state of the tensor.
        ne: Extents of the view.
        nb: Byte strides of the view.
        offset: Where the view begins in the tensor [bytes].
    """
    root_nb = contiguous_nb(dtype, root_ne)
    if (ne, nb, offset) == (root_ne, root_nb, 0):
        return SlicedView(root, tuple(slice_of(dtype, ne, root, j) for j in range(len(root.segments[0]))))
    axis = root.axis
    unit = root_nb[axis]
    per_unit = dtype.block_size if axis == 0 else 1  # elements of the axis in a unit of memory
    block = unit * (root_ne[axis] // per_unit)
    cuts = [tuple(n // per_unit for n in s) for s in root.segments]  # in units
    blocks = [unit * sum(part) for part in zip(*cuts, strict=True)]  # of each device [bytes]

    walks = [i for i in range(4) if ne[i] > 1 and nb[i] < block and nb[i] * _count(dtype, i, ne) > unit]
    walks.sort(key=nb.__getitem__)
    if not walks or any(n > 1 and b > block and b % block for n, b in zip(ne, nb, strict=True)):
        return None
    reach = _reach(dtype, walks, ne, nb, unit, block)
    if reach is None:
        return None
    last = walks[-1]
    chosen = _segments(cuts, offset % block // unit, reach // unit) if reach <= block else cuts
    if chosen is None or (reach > block and (offset % block or reach % block)):
        return None
    repeats = max(1, reach // block)
    state = _state(dtype, last, chosen * repeats, unit, nb[last])
    if state is None:
        return None
    first, start = _before(cuts, offset % block // unit), offset // block
    slices = []
    for j, own in enumerate(blocks):
        own_ne = _with(ne, last, state.extents()[j])
        own_nb = [n if n < block else n // block * own for n in nb]
        own_offset = start * own + unit * sum(s[j] for s in cuts[:first]) + offset % unit
        for i in range(4):  # strides of extents 1 are arbitrary: use contiguous ones
            if ne[i] == 1:
                own_nb[i] = own_nb[i - 1] * own_ne[i - 1] if i > 1 else own_nb[i]
        slices.append(Slice(own_ne, (own_nb[0], own_nb[1], own_nb[2], own_nb[3]), own_offset))
    return SlicedView(state, tuple(slices))


def _count(dtype: DType, i: int, ne: Ne) -> int:
    """Return the number of strides of a dimension; in dimension 0, the number of type blocks."""
    return ne[0] // dtype.block_size if i == 0 else ne[i]


def _reach(dtype: DType, walks: list[int], ne: Ne, nb: Ne, unit: int, block: int) -> int | None:
    """Return the bytes covered by the dimensions that step by units or blocks; `None` if they leave gaps."""
    reach = 0
    for i in walks:
        stride, count = nb[i], _count(dtype, i, ne)
        first = not reach
        if (stride > unit and first) or (not first and stride != reach):
            return None
        if (unit % stride if stride < unit else stride % unit) or stride * count % unit:
            return None
        reach = stride * count
    return reach if reach <= block or (len(walks) == 1 and block % nb[walks[0]] == 0) else None


def _before(cuts: list[tuple[int, ...]], start: int) -> int:
    """Return the number of segments that end at or before a unit of the block."""
    n = 0
    for segment in cuts:
        if start <= 0:
            break
        start -= sum(segment)
        n += 1
    return n


def _segments(cuts: list[tuple[int, ...]], start: int, n: int) -> list[tuple[int, ...]] | None:
    """Return the whole segments that make up `n` units from `start` on, if any."""
    at, chosen = 0, []
    for segment in cuts:
        if start <= at < start + n:
            chosen.append(segment)
        at += sum(segment)
        if at > start and not chosen:
            return None  # begins inside a segment
    return chosen if sum(map(sum, chosen)) == n else None


def _state(
    dtype: DType, axis: int, segments: list[tuple[int, ...]], unit: int, stride: int
) -> SplitState | None:
    """Convert segments from units to strides of the view's dimension."""
    scaled = []
    for segment in segments:
        if any(n * unit % stride for n in segment):
            return None
        steps = [n * unit // stride for n in segment]
        scaled.append(tuple(n * dtype.block_size if axis == 0 else n for n in steps))
    return SplitState(SplitAxis(axis), tuple(scaled))


def _with(ne: Ne, axis: int, n: int) -> Ne:
    changed = list(ne)
    changed[axis] = n
    return changed[0], changed[1], changed[2], changed[3]
