"""The table of lowering rules of the portable kernels; this package's other modules register them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from ggmlb.backends.common.fusion import Item
from ggmlb.backends.common.rules import Rules
from ggmlb.core.enums import NO_OPS
from ggmlb.core.tensor import Tensor

if TYPE_CHECKING:
    from ggmlb.backends.gpu.launch import Target

MAX_ELEMENTS = 2**31 - 1
"""Kernels index elements in 32 bits, and bytes in 64."""

GpuRules: TypeAlias = "Rules[Callable[[Any, Target], list[Any]]]"


def _not_too_large(node: Tensor) -> str | None:
    for t in (node, *node.src):
        if t is not None and t.nbytes > MAX_ELEMENTS and t.n_elements > MAX_ELEMENTS:
            return f"{t.describe()} has more than {MAX_ELEMENTS} elements"
    return None


RULES: Final[GpuRules] = Rules(always=_not_too_large)


def lower(item: Item, target: Target, rules: GpuRules = RULES) -> list[Any]:
    """Return the launches that compute a node or group by `rules`; none for views and empty results."""
    if isinstance(item, Tensor) and (item.op in NO_OPS or item.is_empty):
        return []
    return rules.to_lower(item, target)(item, target)
