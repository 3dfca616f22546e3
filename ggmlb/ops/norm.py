"""Normalisation along rows or groups."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ggmlb.enums import Op
from ggmlb.ops.base import OpBase, require_arg

if TYPE_CHECKING:
    from ggmlb.tensor import Tensor


class NormOps(OpBase):
    """norm, rms_norm, l2_norm, group_norm."""

    def norm(self, a: Tensor, eps: float = 1e-5) -> Tensor:
        """Return `(a - mean) / sqrt(variance + eps)` per row; shape of `a` (ggml_norm)."""
        return self._op(Op.NORM, a.dtype, a.ne, (a,), {"eps": _eps("norm", eps)})

    def norm_inplace(self, a: Tensor, eps: float = 1e-5) -> Tensor:
        """`norm` into the memory of `a` (ggml_norm_inplace)."""
        return self._op_into(Op.NORM, a, (a,), {"eps": _eps("norm_inplace", eps)})


def _eps(fn: str, eps: float) -> float:
    require_arg(eps >= 0, fn, f"eps is {eps}; it must not be negative")
    return eps
