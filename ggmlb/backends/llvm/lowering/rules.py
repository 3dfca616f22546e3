"""What the rules share: what a rule is, and which operands kernels take."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from ggmlb.core.dtypes import DType
from ggmlb.core.tensor import Tensor

if TYPE_CHECKING:
    from ggmlb.backends.llvm.lowering.steps import Steps


class Rule(NamedTuple):
    """Why a node cannot be done, if so; and the steps that do it."""

    declines: Callable[[Tensor], str | None]
    lower: Callable[[Tensor, Steps], None]


FLOATS = frozenset({DType.F32, DType.F16, DType.BF16})
"""Types that are computed with, in float32."""


def name(tensor: Tensor) -> str:
    """The type's name, as kernels are told."""
    return tensor.dtype.name.lower()


def not_floats(*tensors: Tensor | None) -> str | None:
    """Say which tensor is not of a plain float type."""
    for t in tensors:
        if t is not None and t.dtype not in FLOATS:
            return f"{t.describe()} is not f32, f16 or bf16"
    return None


def not_in_rows(*tensors: Tensor | None) -> str | None:
    """Say which tensor's rows are not contiguous."""
    for t in tensors:
        if t is not None and not t.is_contiguous_rows():
            return f"the rows of {t.describe()} are not contiguous: apply cont"
    return None


def not_f32(*tensors: Tensor | None) -> str | None:
    """Say which tensor is not f32."""
    for t in tensors:
        if t is not None and t.dtype is not DType.F32:
            return f"{t.describe()} is not f32"
    return None
