"""Groups of nodes that one step computes: norms, rope to a cache, products (`epilogue`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ggmlb.backends.common.fusion import Group, Name
from ggmlb.backends.common.rules import FLOATS
from ggmlb.backends.llvm.kernels import norm, rope
from ggmlb.backends.llvm.kernels.quantize import WRITERS
from ggmlb.backends.llvm.lowering import epilogue
from ggmlb.backends.llvm.lowering.rows import NORM_WORK, rope_to
from ggmlb.backends.llvm.lowering.rules import name
from ggmlb.backends.llvm.lowering.walks import walk
from ggmlb.core.dtypes import DType
from ggmlb.core.tensor import Tensor

if TYPE_CHECKING:
    from ggmlb.backends.llvm.lowering.steps import Steps


def can_fuse(group: Group) -> bool:
    """Whether there is a kernel for the group."""
    takes, _ = GROUP_RULES[group.pattern]
    return takes(group)


def lower(group: Group, steps: Steps) -> None:
    """Append the steps that compute the group."""
    _, lower_it = GROUP_RULES[group.pattern]
    lower_it(group, steps)


# -- norms -----------------------------------------------------------------------------------------


def _takes_norm(group: Group) -> bool:
    if any(node is not group.parts.get("add") for node in group.kept):
        return False
    return all(_in_rows(t, group.result.ne[0]) for t in _operands(group))


def _operands(group: Group) -> list[Tensor]:
    first = group.parts.get("add", group["norm"])
    tensors = [group.result, *(s for s in first.src if s is not None)]
    return tensors + [group.other(part) for part in ("mul", "shift") if part in group]


def _in_rows(t: Tensor, n: int) -> bool:
    return t.dtype is DType.F32 and t.is_contiguous_rows() and t.ne[0] == n


def _norm(group: Group, steps: Steps) -> None:
    node, result = group["norm"], group.result
    first = group.parts.get("add", node)
    added, kept = "add" in group, bool(group.kept)
    ne = result.ne
    operands = [result, first.operand(0)]
    if added:
        operands.append(first.operand(1))
    if kept:
        operands.append(first)
    factors = [part for part in ("mul", "shift") if part in group]
    operands += [group.other(part) for part in factors]
    args, n = walk(ne, operands, steps, NORM_WORK, join=False, cut=False)
    params = (node.op.value.lower(), ("f32", "f32"), len(factors), added, kept)
    steps.emit(norm.normalise, params, (float(node.params["eps"]), *args), n)


# -- caches ----------------------------------------------------------------------------------------


def _takes_put(group: Group) -> bool:
    cache, n = group.result.dtype, group["rope"].ne[0]
    return cache in FLOATS or (name(group.result) in WRITERS and n % 32 == 0 and n <= 2 * rope.MOST_PAIRS)


def _put(group: Group, steps: Steps) -> None:
    rope_to(group["rope"], group.result, steps)


GROUP_RULES: dict[Name, tuple[Callable[[Group], bool], Callable[[Group, Steps], None]]] = {
    "norm": (_takes_norm, _norm),
    "rope_set_rows": (_takes_put, _put),
    **dict.fromkeys(("mul_mat_add", "mul_mat_unary", "glu"), (epilogue.can_fuse, epilogue.lower)),
}
"""Whether there is a kernel for a group; and the steps that do it."""
