"""What the rules share."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from ggmlb.backends.common.fusion import Group
from ggmlb.core.dtypes import DType
from ggmlb.core.tensor import Tensor

if TYPE_CHECKING:
    from ggmlb.backends.gpu.launch import Launch, Target


class Rule(NamedTuple):
    """Why a node cannot be done, if so; and the launches that do it."""

    declines: Callable[[Tensor], str | None]
    lower: Callable[[Tensor, Target], list[Launch]]


class GroupRule(NamedTuple):
    """Whether a group of nodes, none of them declined, can be done at once; and the launches that do it."""

    can_fuse: Callable[[Group, Target], bool]
    lower: Callable[[Group, Target], list[Launch]]


FLOATS = frozenset({DType.F32, DType.F16, DType.BF16})
"""Types that are computed with, in float32."""


def not_floats(*tensors: Tensor | None) -> str | None:
    """Say which tensor is not of a plain float type."""
    for t in tensors:
        if t is not None and t.dtype not in FLOATS:
            return f"{_which(t)} is {t.dtype.name.lower()}: only f32, f16 and bf16"
    return None


def not_f32(*tensors: Tensor | None) -> str | None:
    """Say which tensor is not f32."""
    for t in tensors:
        if t is not None and t.dtype is not DType.F32:
            return f"{_which(t)} is {t.dtype.name.lower()}: only f32"
    return None


def not_in_rows(*tensors: Tensor | None) -> str | None:
    """Say which tensor's rows are not contiguous."""
    for t in tensors:
        if t is not None and not t.is_contiguous_rows():
            return f"the rows of {_which(t)} are not contiguous (nb0 = {t.nb[0]}): apply cont"
    return None


def no_elements(node: Tensor) -> str | None:
    """Say that the first source has no elements, where the result has some that follow from them."""
    a = node.sources[0]
    return "src0 has no elements to go on with" if a.is_empty and not node.is_empty else None


def _which(tensor: Tensor) -> str:
    return repr(tensor.name) if tensor.name else tensor.describe()
