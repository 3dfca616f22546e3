"""The table of rules that the modules beside fill, each for its ops; and the types that kernels read."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from ggmlb.backends.common.rules import FLOATS, Rules
from ggmlb.backends.llvm.kernels.blocks import FORMS
from ggmlb.core.dtypes import DType
from ggmlb.core.tensor import Tensor

if TYPE_CHECKING:
    from ggmlb.backends.llvm.lowering.steps import Steps

RULES: Final[Rules[Callable[[Tensor, Steps], None]]] = Rules()

READ: Final = FLOATS | {d for d in DType if d.name.lower() in FORMS}
"""Types of weights that kernels read: floats and blocks."""


def name(tensor: Tensor) -> str:
    """The type's name, as kernels are told."""
    return tensor.dtype.name.lower()
