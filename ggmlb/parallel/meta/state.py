"""Split states (how a tensor is divided over devices): of op results, even ones, checks of callers' ones."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Final

from ggmlb.core import arguments
from ggmlb.core.enums import as_enum
from ggmlb.core.errors import ArgumentError, kind_of
from ggmlb.core.ops import SPECS
from ggmlb.core.sharding import MIRRORED, ShardOutcome, SplitAxis, SplitState, States
from ggmlb.core.tensor import Tensor

MAX_DEVICES: Final = 16
"""Most devices of a meta device (GGML_BACKEND_META_MAX_DEVICES)."""


def outcome(node: Tensor, states: States) -> ShardOutcome:
    """Return required and resulting split states of a node (no view) whose operands have `states`."""
    if any(s.is_cut for s in states):
        rule = SPECS[node.op].shard
        try:
            found = rule(node, states) if rule is not None else None
        except ArithmeticError:  # parts are not whole heads or blocks
            found = None
        if found is not None:
            return found
    return whole(states)


def whole(states: States) -> ShardOutcome:
    """Return the outcome of a node that each device computes whole: operands and result on all (MIRRORED)."""
    return ShardOutcome(MIRRORED, (MIRRORED,) * len(states))


@arguments.checked
def split_evenly(n: int, n_devices: int, granularity: int = 1) -> tuple[int, ...]:
    """Return the extents of `n_devices` parts of `n` elements, as equal as multiples of `granularity` allow.

    Raises:
        ArgumentError: `n` is not a multiple of `granularity`, or there are not 1 to 16 devices.
    """
    if not 1 <= n_devices <= MAX_DEVICES:
        raise ArgumentError(f"split_evenly: {n_devices} devices; give 1 to {MAX_DEVICES}")
    return split_by(n, [1] * n_devices, granularity)


def split_by(n: int, weights: Sequence[float], granularity: int = 1) -> tuple[int, ...]:
    """Return the extents of parts of `n` elements in proportion to `weights`, in multiples of `granularity`.

    Raises:
        ArgumentError: `n` is not a multiple of `granularity`, or no weight is above 0.
    """
    total = sum(weights)
    if n < 0 or granularity < 1 or n % granularity or total <= 0 or min(weights) < 0:
        raise ArgumentError(
            f"{n} elements cannot be sharded in multiples of {granularity} by the weights {list(weights)}; "
            "give a multiple, and weights of 0 or more"
        )
    units, done, parts = n // granularity, 0.0, [0]
    for weight in weights:
        done += weight
        parts.append(round(units * done / total))
    return tuple((b - a) * granularity for a, b in itertools.pairwise(parts))


def checked(state: SplitState, tensor: Tensor, n_devices: int) -> SplitState:
    """Check a user's split state for a tensor; return it as plain tuples.

    Raises:
        ArgumentError: It does not fit the tensor or the devices.
    """
    where = f"the split state of {tensor.describe()}"
    if not isinstance(state, SplitState):
        raise ArgumentError(f"{where} is {kind_of(state)}; get_split_state must return a SplitState")
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
