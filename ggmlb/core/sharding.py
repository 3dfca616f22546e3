"""Sharding: how the elements of a tensor are spread over devices, and which ops keep a cut as it is.

A rule returns the state that it wants each operand in, and the state of the result that follows. A mirrored
operand can be had in any state, because each device has its slice; one in the wrong state is gathered first.
So where no rule speaks, or a rule returns `None`, all operands are gathered, and each device computes all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import NamedTuple

from ggmlb.core.enums import as_enum
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


class _Shards(NamedTuple):
    axis: SplitAxis
    segments: tuple[tuple[int, ...], ...]


class SplitState(_Shards):
    """How a tensor is sharded (ggml_backend_meta_split_state).

    Attributes:
        axis: The dimension of `ne` that is cut; or MIRRORED, all of it on each device; or PARTIAL, a sum
            that is spread over the devices.
        segments: Of a tensor that is cut: the dimension is a row of segments, and each is sharded by
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
        """The same shards along another axis, with the extents multiplied and divided.

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

States = Sequence[SplitState]
"""Of the operands; absent ones count as mirrored."""


class Outcome(NamedTuple):
    """What a rule found.

    Attributes:
        result: The state of the result; PARTIAL if it has to be summed over the devices.
        wants: The states that the operands are needed in.
    """

    result: SplitState
    wants: tuple[SplitState, ...]


ShardRule = Callable[[Tensor, States], Outcome | None]


def first_cut(states: States) -> SplitState:
    """Return the state of the first operand that is cut."""
    return next(s for s in states if s.is_cut)


def like_cut(node: Tensor, state: SplitState, i: int) -> SplitState | None:
    """The state for an operand that repeats over the result; `None` if it repeats along the cut in part."""
    src = node.src[i]
    if src is None or src.ne[state.axis] == 1 < node.ne[state.axis]:
        return MIRRORED
    return state if src.ne[state.axis] == node.ne[state.axis] else None


def has_operand(node: Tensor, i: int) -> bool:
    """Whether an optional operand is there."""
    return len(node.src) > i and node.src[i] is not None


def elementwise(node: Tensor, states: States) -> Outcome | None:
    """Element by element; operands may repeat over the first."""
    state = first_cut(states)
    src = node.src[states.index(state)]
    if src is None or src.ne[state.axis] != node.ne[state.axis]:
        return None
    wants = [like_cut(node, state, i) for i in range(len(states))]
    known = tuple(w for w in wants if w is not None)
    return Outcome(state, known) if len(known) == len(wants) else None


def per_row(node: Tensor, states: States) -> Outcome | None:
    """Each row by itself, of one operand."""
    return elementwise(node, states) if states[0].is_cut and states[0].axis != 0 else None
