"""The CPU's table of rules, filled by the modules of `ops`: the reference for every op."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from ggmlb.backends.common.rules import ANY, BLOCKS, FLOATS, Rules
from ggmlb.core import dtypes
from ggmlb.core.tensor import Tensor

if TYPE_CHECKING:
    from ggmlb.backends.cpu.lowering import CpuLowering

RULES: Final[Rules[Callable[[CpuLowering, Tensor], Any]]] = Rules()

PLAIN: Final = ANY - BLOCKS
"""Types of which each element can be moved by itself."""

STORED: Final = frozenset(filter(dtypes.can_quantize, ANY))
"""Types that are written: all but the blocks that need an importance matrix."""

VALUES: Final = FLOATS | BLOCKS
"""Types of weights: floats and blocks."""
