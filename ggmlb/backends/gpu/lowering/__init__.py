"""Lowering of nodes to launches, by one table of rules.

The modules of this package fill it on import: `RULES` by op, and `GROUP_RULES` by the patterns of
`ggmlb.backends.common.fusion`.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING

from ggmlb.backends.common.fusion import Group
from ggmlb.backends.gpu.lowering.base import GROUP_RULES, RULES
from ggmlb.core.enums import NO_OPS
from ggmlb.core.tensor import Tensor

if TYPE_CHECKING:
    from ggmlb.backends.gpu.launch import Launch, Target

for _family in iter_modules(__path__):
    import_module(f"{__name__}.{_family.name}")

MAX_ELEMENTS = 2**31 - 1
"""Indices are counted in 32 bits, and bytes in 64."""


def declines(node: Tensor) -> str | None:
    """Return why the kernels cannot compute a node, or `None` if they can."""
    return RULES.declines(node) or (_too_large(node) if node.op in RULES else None)


def _too_large(node: Tensor) -> str | None:
    for t in (node, *node.src):
        if t is not None and t.nbytes > MAX_ELEMENTS and t.n_elements > MAX_ELEMENTS:
            return f"{t.describe()} has more than {MAX_ELEMENTS} elements"
    return None


def lower(node: Tensor, target: Target) -> list[Launch]:
    """Return the launches that compute a node that is not declined; none for views and empty results."""
    if node.op in NO_OPS or node.is_empty:
        return []
    return RULES[node.op](node, target)


def can_fuse(group: Group, target: Target) -> bool:
    """Whether a kernel computes a group of nodes at once."""
    if group.pattern not in GROUP_RULES or any(declines(node) is not None for node in group.nodes):
        return False
    takes, _ = GROUP_RULES[group.pattern]
    return takes(group, target)


def lower_group(group: Group, target: Target) -> list[Launch]:
    """Return the launches that compute a group that is taken."""
    _, lower_it = GROUP_RULES[group.pattern]
    return lower_it(group, target)
