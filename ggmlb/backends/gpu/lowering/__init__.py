"""Lowering of nodes to launches, by one table of rules.

A rule has two functions: `declines` returns why a node cannot be computed, and `lower` returns the
launches of one that can. Both are looked up by the node's op.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ggmlb.backends.common.fusion import Group, Name
from ggmlb.backends.gpu.lowering import (
    attention,
    conv,
    copy,
    deepseek,
    elementwise,
    matmul,
    norm,
    recurrent,
    reduce,
    rope,
    shape,
    softmax,
    train,
    window,
)
from ggmlb.core.enums import NO_OPS, Op
from ggmlb.core.tensor import Tensor

if TYPE_CHECKING:
    from ggmlb.backends.gpu.launch import Launch, Target
    from ggmlb.backends.gpu.lowering.base import GroupRule, Rule

RULES: dict[Op, Rule] = {
    **elementwise.RULES,
    **copy.RULES,
    **shape.RULES,
    **norm.RULES,
    **softmax.RULES,
    **rope.RULES,
    **matmul.RULES,
    **attention.RULES,
    **reduce.RULES,
    **conv.RULES,
    **recurrent.RULES,
    **deepseek.RULES,
    **window.RULES,
    **train.RULES,
}


GROUP_RULES: dict[Name, GroupRule] = {
    **norm.GROUP_RULES,
    **rope.GROUP_RULES,
    **matmul.GROUP_RULES,
}
"""By the names of the patterns in `ggmlb.backends.common.fusion`."""

MAX_ELEMENTS = 2**31 - 1
"""Indices are counted in 32 bits, and bytes in 64."""


def declines(node: Tensor) -> str | None:
    """Return why the kernels cannot compute a node, or `None` if they can."""
    rule = RULES.get(node.op)
    if rule is not None:
        return rule.declines(node) or _too_large(node)
    return None if node.op in NO_OPS else f"no kernel for {node.op}"


def _too_large(node: Tensor) -> str | None:
    for t in (node, *node.src):
        if t is not None and t.nbytes > MAX_ELEMENTS and t.n_elements > MAX_ELEMENTS:
            return f"{t.describe()} has more than {MAX_ELEMENTS} elements"
    return None


def lower(node: Tensor, target: Target) -> list[Launch]:
    """Return the launches that compute a node that is not declined; none for views and empty results."""
    if node.op in NO_OPS or node.is_empty:
        return []
    return RULES[node.op].lower(node, target)


def can_fuse(group: Group, target: Target) -> bool:
    """Whether a kernel computes a group of nodes at once."""
    rule = GROUP_RULES.get(group.pattern)
    return rule is not None and all(declines(n) is None for n in group.nodes) and rule.can_fuse(group, target)


def lower_group(group: Group, target: Target) -> list[Launch]:
    """Return the launches that compute a group that is taken."""
    return GROUP_RULES[group.pattern].lower(group, target)
