"""Normalisation along rows or groups of channels. Param: `eps`; GROUP_NORM adds `n_groups`."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from ggmlb.core.enums import Op
from ggmlb.core.ops.base import OpBase, fail_arg, require_same_shape
from ggmlb.core.ops.spec import OpSpec, flat
from ggmlb.core.sharding import per_row
from ggmlb.core.tensor import Tensor

if TYPE_CHECKING:
    from ggmlb.core.context import Context


class NormOps(OpBase):
    """norm, rms_norm, l2_norm, group_norm, their in-place forms, and rms_norm_back.

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
        """Return the gradient of `b`, given the gradient `a` of `rms_norm(b)` (ggml_rms_norm_back).

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


# -- gradients ---


def _back_norm(c: Context, node: Tensor, grad: Tensor) -> Tensor:
    return _normalised(c, node.operand(0), node, grad, node.params["eps"])


def _normalised(c: Context, x: Tensor, y: Tensor, grad: Tensor, eps: float) -> Tensor:
    """Return the gradient of the rows `x`, whose normalised values are `y`."""
    deviation = c.sqrt(c.scale_bias(c.mean(c.sqr(c.sub(x, c.mean(x)))), 1, eps))
    along = c.add(c.mul(y, c.mean(c.mul(grad, y))), c.mean(grad))
    return c.div(c.sub(grad, along), deviation)


def _back_group_norm(c: Context, node: Tensor, grad: Tensor) -> Tensor:
    width, height, channels, batch = node.ne
    groups = node.params["n_groups"]
    if channels % groups:
        fail_arg("group_norm", f"{groups} groups do not divide the {channels} channels")
    rows = (width * height * (channels // groups), groups, batch)
    x, y, g = (c.reshape_3d(flat(c, t), *rows) for t in (node.operand(0), node, grad))
    return c.reshape(_normalised(c, x, y, g, node.params["eps"]), node)


def _back_l2_norm(c: Context, node: Tensor, grad: Tensor) -> Tensor:
    eps = node.params["eps"]
    length = c.sqrt(c.sum_rows(c.sqr(node.operand(0))))
    along = c.mul(c.sum_rows(c.mul(grad, node)), c.step(c.scale_bias(length, 1, -eps)))
    return c.div(c.sub(grad, c.mul(node, along)), c.clamp(length, eps, inf))


def _back_rms_norm(c: Context, node: Tensor, grad: Tensor) -> Tensor:
    return c.rms_norm_back(grad, node.operand(0), node.params["eps"])


SPECS = (
    OpSpec(Op.NORM, backward={0: _back_norm}, params=("eps",), shard=per_row),
    OpSpec(Op.RMS_NORM, backward={0: _back_rms_norm}, params=("eps",), inplace=1, shard=per_row),
    OpSpec(Op.RMS_NORM_BACK, params=("eps",), inplace=1),
    OpSpec(Op.GROUP_NORM, backward={0: _back_group_norm}, params=("n_groups", "eps")),
    OpSpec(Op.L2_NORM, backward={0: _back_l2_norm}, params=("eps",), shard=per_row),
)
