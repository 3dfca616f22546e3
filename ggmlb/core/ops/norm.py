"""Normalisation along rows or groups of channels. Param: `eps`; GROUP_NORM adds `n_groups`."""

from __future__ import annotations

from ggmlb.core.enums import Op
from ggmlb.core.ops.base import OpBase, fail_arg, require_same_shape
from ggmlb.core.tensor import Tensor


class NormOps(OpBase):
    """norm, rms_norm, l2_norm, group_norm, their in-place twins, and rms_norm_back.

    Raises:
        ArgumentError: `eps` is negative.
    """

    def norm(self, a: Tensor, eps: float) -> Tensor:
        """Return `(a - mean) / sqrt(variance + eps)` per row (ggml_norm)."""
        return self._like(False, Op.NORM, a, (a,), _eps("norm", eps))

    def norm_inplace(self, a: Tensor, eps: float) -> Tensor:
        """Return `norm`, written into the memory of `a` (ggml_norm_inplace)."""
        return self._like(True, Op.NORM, a, (a,), _eps("norm_inplace", eps))

    def rms_norm(self, a: Tensor, eps: float) -> Tensor:
        """Return `a / sqrt(mean(a * a) + eps)` per row (ggml_rms_norm)."""
        return self._like(False, Op.RMS_NORM, a, (a,), _eps("rms_norm", eps))

    def rms_norm_inplace(self, a: Tensor, eps: float) -> Tensor:
        """Return `rms_norm`, written into the memory of `a` (ggml_rms_norm_inplace)."""
        return self._like(True, Op.RMS_NORM, a, (a,), _eps("rms_norm_inplace", eps))

    def l2_norm(self, a: Tensor, eps: float) -> Tensor:
        """Return `a / max(sqrt(sum(a * a)), eps)` per row (ggml_l2_norm)."""
        return self._like(False, Op.L2_NORM, a, (a,), _eps("l2_norm", eps))

    def l2_norm_inplace(self, a: Tensor, eps: float) -> Tensor:
        """Return `l2_norm`, written into the memory of `a` (ggml_l2_norm_inplace)."""
        return self._like(True, Op.L2_NORM, a, (a,), _eps("l2_norm_inplace", eps))

    def rms_norm_back(self, a: Tensor, b: Tensor, eps: float) -> Tensor:
        """Return the gradient of `rms_norm` at `b`, for the gradient `a` of its result (ggml_rms_norm_back).

        Raises:
            ShapeError: The shapes differ.
        """
        require_same_shape("rms_norm_back", a, b)
        return self._op(Op.RMS_NORM_BACK, a.dtype, a.ne, (a, b), _eps("rms_norm_back", eps))

    def group_norm(self, a: Tensor, n_groups: int, eps: float) -> Tensor:
        """Return `norm` over groups of `ceil(ne[2] / n_groups)` channels, dimension 2 (ggml_group_norm).

        Raises:
            ArgumentError: `n_groups` is not positive, or `eps` is negative.
        """
        return self._like(False, Op.GROUP_NORM, a, (a,), _groups("group_norm", n_groups, eps))

    def group_norm_inplace(self, a: Tensor, n_groups: int, eps: float) -> Tensor:
        """Return `group_norm`, written into the memory of `a` (ggml_group_norm_inplace)."""
        return self._like(True, Op.GROUP_NORM, a, (a,), _groups("group_norm_inplace", n_groups, eps))


def _groups(fn: str, n_groups: int, eps: float) -> dict[str, float]:
    if n_groups < 1:
        fail_arg(fn, f"n_groups is {n_groups}; it must be at least 1")
    return {"n_groups": n_groups, **_eps(fn, eps)}


def _eps(fn: str, eps: float) -> dict[str, float]:
    if not eps >= 0:
        fail_arg(fn, f"eps is {eps}; it must not be negative")
    return {"eps": eps}
