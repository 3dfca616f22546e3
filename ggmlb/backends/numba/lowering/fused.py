"""Groups of nodes that one kernel computes (`ggmlb.fusion`): norms, with the sum before, factors after."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ggmlb.backends.numba.kernels import norm
from ggmlb.backends.numba.lowering.rows import NORM_WORK
from ggmlb.backends.numba.lowering.walks import operand, walk
from ggmlb.dtypes import DType

if TYPE_CHECKING:
    from ggmlb.backends.numba.lowering.steps import Steps
    from ggmlb.fusion import Group
    from ggmlb.tensor import Tensor


def takes(group: Group) -> bool:
    """Whether there is a kernel for the group."""
    if group.pattern != "norm" or any(node is not group.parts.get("add") for node in group.kept):
        return False
    return all(_in_rows(t, group.result.ne[0]) for t in _operands(group))


def _operands(group: Group) -> list[Tensor]:
    first = group.parts.get("add", group["norm"])
    tensors = [group.result, *(s for s in first.src if s is not None)]
    return tensors + [group.other(part) for part in ("mul", "shift") if part in group]


def _in_rows(t: Tensor, n: int) -> bool:
    return t.dtype is DType.F32 and t.is_contiguous_rows() and t.ne[0] == n


def lower(group: Group, steps: Steps) -> None:
    """Append the step that computes the group."""
    node, result = group["norm"], group.result
    first = group.parts.get("add", node)
    added = "add" in group
    ne = result.ne
    operands = [operand(result, steps), operand(first.src[0], steps, ne)]  # type: ignore[arg-type]
    if added:
        place = group["add"] if group["add"] in group.kept else result
        operands += [operand(place, steps), operand(first.src[1], steps, ne)]  # type: ignore[arg-type]
    factors = [part for part in ("mul", "shift") if part in group]
    operands += [operand(group.other(part), steps, ne) for part in factors]
    args, n = walk(ne, operands, steps, NORM_WORK, join=False, cut=False)
    params = (node.op.value.lower(), ("f32", "f32"), len(factors), added)
    steps.emit(norm.normalise, params, (float(node.params["eps"]), *args), n)
