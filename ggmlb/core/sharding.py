"""Sharding: how a tensor is distributed over devices, and the sharding rules of ops.

A shard rule returns the states in which it needs the operands, and the state of the result. A mirrored
operand fits any state, because each device has its slice; an operand in another state is gathered first.
Without a rule, or if it returns `None`, all operands are gathered and each device computes the whole
result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import NamedTuple

from ggmlb.core.arguments import named
from ggmlb.core.enums import as_enum
from ggmlb.core.tensor import Tensor


class SplitAxis(IntEnum):
    """How a tensor is split over devices, and along which axis (ggml_backend_meta_split_axis)."""

    AXIS_0 = 0
    AXIS_1 = 1
    AXIS_2 = 2
    AXIS_3 = 3
    MIRRORED = 10
    PARTIAL = 11

    @property
    def label(self) -> str:
        """Name of the axis, `"0"` to `"3"`, `"MIRRORED"`, `"PARTIAL"` (ggml_backend_meta_split_axis_name)."""
        return self.name.removeprefix("AXIS_")

    @property
    def is_dimension(self) -> bool:
        """Whether each device holds a slice along a dimension."""
        return self < SplitAxis.MIRRORED


class _Shards(NamedTuple):
    axis: SplitAxis
    segments: tuple[tuple[int, ...], ...]


@named("a SplitState")
class SplitState(_Shards):
    """How a tensor is sharded (ggml_backend_meta_split_state).

    Attributes:
        axis: The dimension of `ne` that is cut; MIRRORED, a copy on each device; or PARTIAL, a summand on
            each device.
        segments: For a cut: the dimension is a sequence of segments, each sharded separately over the
            devices in order. An inner tuple has the extent of each device's part. A fused query, key and
            value matrix has three segments, so that each device gets a part of each. A repeated segment
            (`nr` in ggml) is listed repeatedly.
    """

    __slots__ = ()

    def __new__(cls, axis: SplitAxis | int | str, segments: tuple[tuple[int, ...], ...] = ()) -> SplitState:
        """Create a state.

        Raises:
            ArgumentError: There is no such axis.
        """
        return super().__new__(cls, as_enum("SplitState", SplitAxis, axis), segments)

    @property
    def is_cut(self) -> bool:
        """Whether each device holds a slice."""
        return self.axis.is_dimension

    def extents(self) -> tuple[int, ...]:
        """The extent of each device's slice along the axis: its parts of all segments (as of Q, K, V)."""
        return tuple(map(sum, zip(*self.segments, strict=True)))

    def moved(self, axis: int, times: int = 1, over: int = 1) -> SplitState:
        """Return this cut moved to dimension `axis`, with each slice's extent multiplied by `times / over`.

        Raises:
            ArithmeticError: An extent is not divisible.
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
"""States of the operands; absent ones count as mirrored."""


class ShardOutcome(NamedTuple):
    """What a shard rule returns: the split states that it requires of operands, and that of the result.

    Attributes:
        result: The state of the result; PARTIAL if it must be summed over the devices.
        wants: The required states of the operands.
    """

    result: SplitState
    wants: tuple[SplitState, ...]


ShardRule = Callable[[Tensor, States], ShardOutcome | None]


def first_cut(states: States) -> SplitState:
    """Return the state of the first operand that is cut."""
    return next(s for s in states if s.is_cut)


def matching_state(node: Tensor, state: SplitState, i: int) -> SplitState | None:
    """Return how to split operand `i` for a result split by `state`; `None` if it repeats along that axis."""
    src = node.src[i]
    if src is None or src.ne[state.axis] == 1 < node.ne[state.axis]:
        return MIRRORED
    return state if src.ne[state.axis] == node.ne[state.axis] else None


def has_operand(node: Tensor, i: int) -> bool:
    """Whether the optional operand `i` of a node is present."""
    return len(node.src) > i and node.src[i] is not None


def elementwise(node: Tensor, states: States) -> ShardOutcome | None:
    """Shard rule of elementwise ops; cuts operands like the first cut one, and mirrors broadcast ones."""
    state = first_cut(states)
    src = node.src[states.index(state)]
    if src is None or src.ne[state.axis] != node.ne[state.axis]:
        return None
    wants = [matching_state(node, state, i) for i in range(len(states))]
    known = tuple(w for w in wants if w is not None)
    return ShardOutcome(state, known) if len(known) == len(wants) else None


def per_row(node: Tensor, states: States) -> ShardOutcome | None:
    """Shard rule of ops that compute each row of operand 0 by itself; it must not be cut within rows."""
    return elementwise(node, states) if states[0].is_cut and states[0].axis != 0 else None
