"""Lowering of nodes to steps, by one table of rules for `declines` and `lower`."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING

from ggmlb.backends.common.fusion import Group
from ggmlb.backends.llvm.lowering import fused
from ggmlb.backends.llvm.lowering.rules import RULES
from ggmlb.core.tensor import Tensor

if TYPE_CHECKING:
    from ggmlb.backends.llvm.lowering.steps import Steps

for _family in iter_modules(__path__):  # each fills the table
    import_module(f"{__name__}.{_family.name}")


def lower(item: Tensor | Group, steps: Steps) -> None:
    """Append the steps that compute a node that is not declined, or a group that `fused.can_fuse`."""
    if isinstance(item, Group):
        fused.lower(item, steps)
    else:
        RULES[item.op](item, steps)
