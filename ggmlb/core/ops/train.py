"""Losses and optimiser steps. These ops have no params: hyperparameters are tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ggmlb.core.dtypes import DType
from ggmlb.core.enums import Op, TensorFlag
from ggmlb.core.ops.base import OpBase, fail_arg, fail_shape, require_same_shape, require_type
from ggmlb.core.ops.spec import OpSpec
from ggmlb.core.sharding import MIRRORED, ShardOutcome, States
from ggmlb.core.tensor import Tensor

if TYPE_CHECKING:
    from ggmlb.core.context import Context


class TrainOps(OpBase):
    """cross_entropy_loss, cross_entropy_loss_back, opt_step_adamw, opt_step_sgd."""

    def cross_entropy_loss(self, a: Tensor, b: Tensor) -> Tensor:
        """Return the mean cross entropy of logits `a` and probabilities `b`, a scalar.

        Source: ggml_cross_entropy_loss.

        Raises:
            ShapeError: The shapes differ.
        """
        require_same_shape("cross_entropy_loss", a, b)
        return self._op(Op.CROSS_ENTROPY_LOSS, a.dtype, (1, 1, 1, 1), (a, b))

    def cross_entropy_loss_back(self, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        """Return the gradient of the logits of `cross_entropy_loss(b, c)` (ggml_cross_entropy_loss_back).

        Args:
            a: The gradient of the loss, a scalar.
            b: Logits.
            c: Probabilities.

        Raises:
            ShapeError: `a` is not a scalar, or the shapes of `b` and `c` differ.
        """
        if a.ne != (1, 1, 1, 1):
            fail_shape("cross_entropy_loss_back", "a must be a scalar", a, b, c)
        require_same_shape("cross_entropy_loss_back", b, c)
        return self._op(Op.CROSS_ENTROPY_LOSS_BACK, b.dtype, b.ne, (a, b, c))

    def opt_step_adamw(self, a: Tensor, grad: Tensor, m: Tensor, v: Tensor, adamw_params: Tensor) -> Tensor:
        """Take an AdamW step in place on weights `a` and moments `m`, `v`; `adamw_params` are seven f32.

        Source: ggml_opt_step_adamw.

        Args:
            a: Weights, marked by `set_param`.
            grad: Their gradient.
            m: First moments.
            v: Second moments.
            adamw_params: Seven f32: alpha, beta1, beta2, eps, weight decay, and the bias corrections at
                step `t`: `1 / (1 - beta1 ** t)` and `1 / (1 - beta2 ** t)`.

        Returns:
            A view of `a`.

        Raises:
            ArgumentError: `a` is not marked as a parameter.
            ShapeError: The shapes differ, or there are not seven parameters.
            DTypeError: The parameters are not f32.
        """
        fn = "opt_step_adamw"
        _check_param(fn, a)
        for t in (grad, m, v):
            require_same_shape(fn, a, t)
        _check_numbers(fn, "adamw_params", adamw_params, 7)
        return self._op_into(Op.OPT_STEP_ADAMW, a, (a, grad, m, v, adamw_params))

    def opt_step_sgd(self, a: Tensor, grad: Tensor, sgd_params: Tensor) -> Tensor:
        """Take an SGD step in place on weights `a`; `sgd_params`: rate, weight decay (ggml_opt_step_sgd).

        Args:
            a: Weights, marked by `set_param`.
            grad: Their gradient.
            sgd_params: Two f32: alpha and weight decay.

        Returns:
            A view of `a`.

        Raises:
            ArgumentError: `a` is not marked as a parameter.
            ShapeError: The shapes differ, or there are not two parameters.
            DTypeError: The parameters are not f32.
        """
        fn = "opt_step_sgd"
        _check_param(fn, a)
        require_same_shape(fn, a, grad)
        _check_numbers(fn, "sgd_params", sgd_params, 2)
        return self._op_into(Op.OPT_STEP_SGD, a, (a, grad, sgd_params))


def _check_param(fn: str, a: Tensor) -> None:
    if not a.flags & TensorFlag.PARAM:
        fail_arg(fn, f"a is {a.describe()}, which is not marked as a parameter: call set_param(a) first")


def _check_numbers(fn: str, arg: str, tensor: Tensor, count: int) -> None:
    require_type(fn, arg, tensor, DType.F32)
    if tensor.n_elements != count:
        fail_shape(fn, f"{arg} must hold {count} numbers", tensor)


# -- how results are sharded over devices ---


def _shard_optimizer_step(node: Tensor, states: States) -> ShardOutcome | None:
    """Shard elementwise except the rates; all written operands must be sharded alike."""
    state, rates = states[0], states[-1]
    is_alike = state.is_cut and not rates.is_cut and all(s == state for s in states[:-1])
    return ShardOutcome(state, (*states[:-1], MIRRORED)) if is_alike else None


# -- gradients ---


def _back_cross_entropy(c: Context, node: Tensor, grad: Tensor) -> Tensor:
    return c.cross_entropy_loss_back(grad, node.operand(0), node.operand(1))


SPECS = (
    OpSpec(Op.CROSS_ENTROPY_LOSS, backward={0: _back_cross_entropy}),
    OpSpec(Op.CROSS_ENTROPY_LOSS_BACK),
    OpSpec(Op.OPT_STEP_ADAMW, also_written=(2, 3), shard=_shard_optimizer_step),
    OpSpec(Op.OPT_STEP_SGD, shard=_shard_optimizer_step),
)
