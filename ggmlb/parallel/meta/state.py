"""Split states: how the elements of a tensor are dealt out to devices."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

from ggmlb.core.enums import as_enum
from ggmlb.core.errors import ArgumentError
from ggmlb.core.tensor import Tensor


class SplitAxis(IntEnum):
    """What a device holds of a tensor (ggml_backend_meta_split_axis)."""

    AXIS_0 = 0
    AXIS_1 = 1
    AXIS_2 = 2
    AXIS_3 = 3
    MIRRORED = 10
    PARTIAL = 11

    @property
    def label(self) -> str:
        """`"0"` to `"3"`, `"MIRRORED"`, `"PARTIAL"` (ggml_backend_meta_split_axis_name)."""
        return self.name.removeprefix("AXIS_")

    @property
    def is_dimension(self) -> bool:
        """Whether each device holds a slice along a dimension."""
        return self < SplitAxis.MIRRORED


class _Dealing(NamedTuple):
    axis: SplitAxis
    segments: tuple[tuple[int, ...], ...]


class SplitState(_Dealing):
    """How a tensor is dealt out (ggml_backend_meta_split_state).

    Attributes:
        axis: The dimension of `ne` that is cut; or MIRRORED, all of it on each device; or PARTIAL, a sum
            that is spread over the devices.
        segments: Of a tensor that is cut: the dimension is a row of segments, and each is dealt out by
            itself, in the order of the devices. An inner tuple has the extent of each device's part. A matrix
            that makes queries, keys and values at once has three, so that each device gets a part of each.
            A segment that repeats (`nr` in ggml) stands here as often as it does.
    """

    __slots__ = ()

    def __new__(cls, axis: SplitAxis | int | str, segments: tuple[tuple[int, ...], ...] = ()) -> SplitState:
        """Make a state.

        Raises:
            ArgumentError: There is no such axis.
        """
        return super().__new__(cls, as_enum("SplitState", SplitAxis, axis), segments)

    @property
    def is_cut(self) -> bool:
        """Whether each device holds a slice."""
        return self.axis.is_dimension

    def extents(self) -> tuple[int, ...]:
        """The extent of each device's slice along the axis, all segments together."""
        return tuple(map(sum, zip(*self.segments, strict=True)))

    def moved(self, axis: int, times: int = 1, over: int = 1) -> SplitState:
        """The same dealing along another axis, with the extents multiplied and divided.

        Raises:
            ArithmeticError: They do not divide.
        """
        if any(n * times % over for segment in self.segments for n in segment):
            raise ArithmeticError
        return SplitState(axis, tuple(tuple(n * times // over for n in s) for s in self.segments))

    def __str__(self) -> str:
        if not self.is_cut:
            return self.axis.label
        parts = " + ".join("|".join(map(str, s)) for s in self.segments)
        return f"axis {self.axis.label}: {parts}"


MIRRORED = SplitState(SplitAxis.MIRRORED)
PARTIAL = SplitState(SplitAxis.PARTIAL)


def split_evenly(n: int, n_devices: int, granularity: int = 1) -> tuple[int, ...]:
    """Return the extents of parts of `n` elements, as equal as whole multiples of `granularity` allow.

    Raises:
        ArgumentError: `n` is not a multiple of `granularity`.
    """
    return split_by(n, [1] * n_devices, granularity)


def split_by(n: int, weights: Sequence[float], granularity: int = 1) -> tuple[int, ...]:
    """Return the extents of parts of `n` elements in proportion to `weights`, in multiples of `granularity`.

    Raises:
        ArgumentError: `n` is not a multiple of `granularity`, or no weight is above 0.
    """
    total = sum(weights)
    if n % granularity or total <= 0 or min(weights) < 0:
        raise ArgumentError(
            f"{n} elements cannot be dealt out in multiples of {granularity} by the weights {list(weights)}"
        )
    units, done, parts = n // granularity, 0.0, [0]
    for weight in weights:
        done += weight
        parts.append(round(units * done / total))
    return tuple((b - a) * granularity for a, b in itertools.pairwise(parts))


def checked(state: SplitState, tensor: Tensor, n_devices: int) -> SplitState:
    """Return the state that a user gave for a tensor, made of plain tuples.

    Raises:
        ArgumentError: It does not fit the tensor or the devices.
    """
    where = f"the split state of {tensor.describe()}"
    axis = as_enum(where, SplitAxis, state.axis)
    if axis == SplitAxis.PARTIAL:
        raise ArgumentError(f"{where} is PARTIAL; only results of products are: give an axis, or MIRRORED")
    if axis == SplitAxis.MIRRORED:
        return MIRRORED
    segments = tuple(tuple(int(n) for n in s) for s in state.segments)
    if not segments or any(len(s) != n_devices or min(s) < 0 for s in segments):
        raise ArgumentError(
            f"{where}: its segments are {segments}; each must have an extent for each of {n_devices} devices"
        )
    whole = sum(map(sum, segments))
    if whole != tensor.ne[axis]:
        raise ArgumentError(f"{where}: the extents add up to {whole}, ne[{int(axis)}] is {tensor.ne[axis]}")
    block = tensor.dtype.block_size if int(axis) == 0 else 1
    if any(n % block for s in segments for n in s):
        raise ArgumentError(
            f"{where}: {segments} cuts blocks of {tensor.dtype.name}; use multiples of {block}"
        )
    return SplitState(axis, segments)
