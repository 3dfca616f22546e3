"""Lowering of nodes to steps, by one table of rules for `declines` and `lower`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ggmlb.backends.common.fusion import Group
from ggmlb.backends.llvm.lowering import attention, copy, elementwise, fused, matmul, rows
from ggmlb.core.enums import NO_OPS, Op
from ggmlb.core.tensor import Tensor

if TYPE_CHECKING:
    from ggmlb.backends.llvm.lowering.rules import Rule
    from ggmlb.backends.llvm.lowering.steps import Steps

RULES: dict[Op, Rule] = {
    **elementwise.RULES,
    **attention.RULES,
    **copy.RULES,
    **matmul.RULES,
    **rows.RULES,
}


def declines(node: Tensor) -> str | None:
    """Return why the kernels cannot compute a node, or `None` if they can."""
    rule = RULES.get(node.op)
    if rule is not None:
        return rule.declines(node)
    return None if node.op in NO_OPS else f"no kernel for {node.op}"


def lower(item: Tensor | Group, steps: Steps) -> None:
    """Append the steps that compute a node that is not declined, or a group that `fused.can_fuse`."""
    if isinstance(item, Group):
        for node in item.nodes:
            steps.begin(node)
        fused.lower(item, steps)
    elif item.op not in NO_OPS and not item.is_empty:
        steps.begin(item)
        RULES[item.op].lower(item, steps)
