"""soft_max and its causal masks.

SOFT_MAX has `src = (a, mask, sinks)`, the last two None where absent, and the params `scale, max_bias`, as
has SOFT_MAX_BACK. DIAG_MASK_INF and DIAG_MASK_ZERO have `n_past`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ggmlb.core.dtypes import DType
from ggmlb.core.enums import Op
from ggmlb.core.ops.base import (
    OpBase,
    divides,
    fail_arg,
    fail_contiguous,
    fail_dtype,
    fail_shape,
    require_finite,
    require_int32,
    require_same_shape,
)
from ggmlb.core.ops.spec import OpSpec
from ggmlb.core.placement import placement_clock
from ggmlb.core.sharding import MIRRORED, ShardOutcome, States, has_operand, matching_state
from ggmlb.core.tensor import Tensor

if TYPE_CHECKING:
    from ggmlb.core.context import Context

_PLAIN: Mapping[str, Any] = {"scale": 1.0, "max_bias": 0.0}


class SoftmaxOps(OpBase):
    """soft_max, soft_max_ext, in-place forms and gradient, soft_max_add_sinks, diag_mask_inf, _zero."""

    def soft_max(self, a: Tensor) -> Tensor:
        """Return `exp(a) / sum(exp(a))` per row (ggml_soft_max).

        Raises:
            ShapeError: `a` is not contiguous.
        """
        if not a.is_contiguous():
            fail_contiguous("soft_max", "a", a)
        return self._op(Op.SOFT_MAX, a.dtype, a.ne, (a, None, None), _PLAIN)

    def soft_max_inplace(self, a: Tensor) -> Tensor:
        """Return `soft_max`, written into the memory of `a`; same errors (ggml_soft_max_inplace)."""
        if not a.is_contiguous():
            fail_contiguous("soft_max_inplace", "a", a)
        return self._op_into(Op.SOFT_MAX, a, (a, None, None), _PLAIN)

    def soft_max_ext(
        self, a: Tensor, mask: Tensor | None = None, scale: float = 1.0, max_bias: float = 0.0
    ) -> Tensor:
        """Return `soft_max(a * scale + ALiBi slope * mask)` per row (ggml_soft_max_ext).

        Args:
            a: Contiguous, ne `[n_kv, n_q, n_head, n_batch]`.
            mask: Contiguous f32 or f16, ne `[n_kv, at least n_q, ...]`, repeated over dimensions 2 and 3.
            scale: Factor of `a`.
            max_bias: Where positive, the ALiBi slope differs by head; else it is 1.

        Raises:
            ShapeError: An operand is not contiguous, or the mask does not fit.
            DTypeError: The mask is of another type.
            ArgumentError: `max_bias` is negative, or positive without a mask; a number is not finite.
        """
        _check("soft_max_ext", a, mask, scale, max_bias)
        params = {"scale": scale, "max_bias": max_bias}
        return self._op(Op.SOFT_MAX, a.dtype, a.ne, (a, mask, None), params)

    def soft_max_ext_inplace(
        self, a: Tensor, mask: Tensor | None = None, scale: float = 1.0, max_bias: float = 0.0
    ) -> Tensor:
        """Return `soft_max_ext`, written into the memory of `a` (ggml_soft_max_ext_inplace)."""
        _check("soft_max_ext_inplace", a, mask, scale, max_bias)
        params = {"scale": scale, "max_bias": max_bias}
        return self._op_into(Op.SOFT_MAX, a, (a, mask, None), params)

    def soft_max_add_sinks(self, a: Tensor, sinks: Tensor | None) -> Tensor:
        """Give a soft_max node a sink logit per head, which only its denominator counts; None removes them.

        Source: ggml_soft_max_add_sinks.

        Raises:
            ArgumentError: `a` is not a soft_max node, or has sinks.
            ShapeError: There is not one sink per head.
            DTypeError: The sinks are not f32.
        """
        return add_sinks("soft_max_add_sinks", Op.SOFT_MAX, a, sinks)

    def soft_max_ext_back(self, a: Tensor, b: Tensor, scale: float = 1.0, max_bias: float = 0.0) -> Tensor:
        """Return the gradient of `soft_max_ext` from its result `b` and the result's gradient `a`.

        Source: ggml_soft_max_ext_back.

        Raises:
            ShapeError: The shapes differ.
        """
        return self._soft_max_back("soft_max_ext_back", a, b, scale, max_bias, False)

    def soft_max_ext_back_inplace(
        self, a: Tensor, b: Tensor, scale: float = 1.0, max_bias: float = 0.0
    ) -> Tensor:
        """Return `soft_max_ext_back`, written into the memory of `a` (ggml_soft_max_ext_back_inplace)."""
        return self._soft_max_back("soft_max_ext_back_inplace", a, b, scale, max_bias, True)

    def _soft_max_back(
        self, fn: str, a: Tensor, b: Tensor, scale: float, max_bias: float, inplace: bool
    ) -> Tensor:
        require_same_shape(fn, a, b)
        require_finite(fn, scale=scale)
        require_finite(fn, 0, max_bias=max_bias)
        params = {"scale": scale, "max_bias": max_bias}
        return self._like(inplace, Op.SOFT_MAX_BACK, a, (a, b), params)

    def diag_mask_inf(self, a: Tensor, n_past: int) -> Tensor:
        """Return `a` with minus infinity where `i0 > n_past + i1` (ggml_diag_mask_inf)."""
        require_int32("diag_mask_inf", n_past=n_past)
        return self._op(Op.DIAG_MASK_INF, a.dtype, a.ne, (a,), {"n_past": n_past})

    def diag_mask_inf_inplace(self, a: Tensor, n_past: int) -> Tensor:
        """Return `diag_mask_inf`, written into the memory of `a` (ggml_diag_mask_inf_inplace)."""
        require_int32("diag_mask_inf_inplace", n_past=n_past)
        return self._op_into(Op.DIAG_MASK_INF, a, (a,), {"n_past": n_past})

    def diag_mask_zero(self, a: Tensor, n_past: int) -> Tensor:
        """Return `a` with 0 where `i0 > n_past + i1` (ggml_diag_mask_zero)."""
        require_int32("diag_mask_zero", n_past=n_past)
        return self._op(Op.DIAG_MASK_ZERO, a.dtype, a.ne, (a,), {"n_past": n_past})

    def diag_mask_zero_inplace(self, a: Tensor, n_past: int) -> Tensor:
        """Return `diag_mask_zero`, written into the memory of `a` (ggml_diag_mask_zero_inplace)."""
        require_int32("diag_mask_zero_inplace", n_past=n_past)
        return self._op_into(Op.DIAG_MASK_ZERO, a, (a,), {"n_past": n_past})


def _check(fn: str, a: Tensor, mask: Tensor | None, scale: float, max_bias: float) -> None:
    require_finite(fn, scale=scale)
    require_finite(fn, 0, max_bias=max_bias)
    if not a.is_contiguous():
        fail_contiguous(fn, "a", a)
    if mask is not None:
        if mask.dtype is not DType.F16 and mask.dtype is not DType.F32:
            fail_dtype(fn, "mask", mask, DType.F16, DType.F32)
        if not mask.is_contiguous():
            fail_contiguous(fn, "mask", mask)
        n, m = a.ne, mask.ne
        if m[0] != n[0] or m[1] < n[1] or not divides(m[2], n[2]) or not divides(m[3], n[3]):
            fail_shape(
                fn,
                "the mask must have a's ne[0], at least a's ne[1], and ne[2] and ne[3] that divide a's",
                a,
                mask,
            )
    elif max_bias > 0:
        fail_arg(fn, f"max_bias {max_bias} needs a mask")


def add_sinks(fn: str, op: Op, a: Tensor, sinks: Tensor | None) -> Tensor:
    """Set `sinks` (a logit per head; None removes them) in `a`, a soft_max or attention node; return `a`.

    Raises:
        ArgumentError: `a` is another node, or has sinks already.
        ShapeError: There is not one for each head.
        DTypeError: They are not f32.
    """
    if a.op is not op:
        fail_arg(fn, f"a is {a.describe()}; it must be a {op.value} node")
    if sinks is not None:
        if a.src[-1] is not None:
            fail_arg(fn, f"{a.describe()} has sinks; remove them first, with None")
        first = a.src[0]
        if first is not None and first.ne[2] != sinks.ne[0]:
            fail_shape(fn, f"sinks must have one element per head, {first.ne[2]}", a, sinks)
        if sinks.dtype is not DType.F32:
            fail_dtype(fn, "sinks", sinks, DType.F32)
    a.src = (*a.src[:-1], sinks)
    placement_clock.tick()
    return a


# -- how results are sharded over devices ---


def _shard_soft_max(node: Tensor, states: States) -> ShardOutcome | None:
    """Shard by rows, mask and sinks likewise; not through heads with ALiBi, whose slopes count heads."""
    state = states[0]
    if not state.is_cut or state.axis == 0 or (state.axis == 2 and node.params["max_bias"]):
        return None
    mask = matching_state(node, state, 1) if len(states) > 1 else MIRRORED
    sinks = state.moved(0) if state.axis == 2 and has_operand(node, 2) else MIRRORED
    return None if mask is None else ShardOutcome(state, (state, mask, sinks)[: len(states)])


# -- gradients ---


def _back_diag_mask(c: Context, node: Tensor, grad: Tensor) -> Tensor:
    return c.diag_mask_zero(grad, node.params["n_past"])


def _back_soft_max(c: Context, node: Tensor, grad: Tensor) -> Tensor:
    return c.soft_max_ext_back(grad, node, node.params["scale"])  # ALiBi's slopes act on the mask alone


SPECS = (
    OpSpec(Op.DIAG_MASK_INF, backward={0: _back_diag_mask}, params=("n_past",), inplace=1),
    OpSpec(Op.DIAG_MASK_ZERO, backward={0: _back_diag_mask}, params=("n_past",), inplace=1),
    OpSpec(
        Op.SOFT_MAX,
        backward={0: _back_soft_max},
        params=("scale", "max_bias"),
        inplace=1,
        shard=_shard_soft_max,
    ),
    OpSpec(Op.SOFT_MAX_BACK, params=("scale", "max_bias"), inplace=1),
)
