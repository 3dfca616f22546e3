"""Fused attention.

FLASH_ATTN_EXT has `src = (q, k, v, mask, sinks)`, the last two None where absent, and the params
`scale, max_bias, logit_softcap` and `prec` (a `Prec`). FLASH_ATTN_BACK has `masked`.
"""

from __future__ import annotations

from ggmlb.core.dtypes import DType
from ggmlb.core.enums import Op, Prec, as_enum
from ggmlb.core.ops.base import (
    OpBase,
    divides,
    fail_arg,
    fail_contiguous,
    fail_dtype,
    fail_shape,
    require_finite,
    require_int32,
)
from ggmlb.core.ops.matmul import can_mul_mat
from ggmlb.core.ops.softmax import add_sinks
from ggmlb.core.ops.spec import OpSpec
from ggmlb.core.sharding import MIRRORED, ShardOutcome, States, first_cut, has_operand
from ggmlb.core.tensor import Tensor


class AttentionOps(OpBase):
    """flash_attn_ext with its setters, flash_attn_back."""

    def flash_attn_ext(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None = None,
        scale: float = 1.0,
        max_bias: float = 0.0,
        logit_softcap: float = 0.0,
    ) -> Tensor:
        """Return attention, `soft_max(q k^T * scale + ALiBi slope * mask) v` (ggml_flash_attn_ext).

        Args:
            q: ne `[dk, n_q, n_head, n_batch]`.
            k: ne `[dk, n_kv, n_head_kv, n_batch]`; `n_head` is a multiple of `n_head_kv`.
            v: ne `[dv, n_kv, n_head_kv, n_batch]`, not transposed.
            mask: Contiguous f16, ne `[n_kv, n_q, n_head or a divisor, n_batch or a divisor]`.
            scale: Factor of the products.
            max_bias: Where positive, the ALiBi slope differs by head; else it is 1.
            logit_softcap: Where not 0, the logits become `softcap * tanh(logits / softcap)`.

        Returns:
            f32, ne `[dv, n_head, n_q, n_batch]`: permuted, ready for the next product.

        Raises:
            ShapeError: The shapes do not fit, or the mask is not contiguous.
            DTypeError: The mask is not f16.
            ArgumentError: `max_bias` or `logit_softcap` is negative, or `max_bias` positive without a mask;
                or a number is not finite.
        """
        fn = "flash_attn_ext"
        require_finite(fn, scale=scale)
        require_finite(fn, 0, max_bias=max_bias, logit_softcap=logit_softcap)
        n, w = q.ne, v.ne
        if not can_mul_mat(k, q) or n[3] != k.ne[3]:
            fail_shape(fn, "q and k must have equal ne[0] and ne[3], and k.ne[2] must divide q.ne[2]", q, k)
        if n[3] != w[3]:
            fail_shape(fn, f"v must have ne[3] = {n[3]}, as q has", q, k, v)
        if w[1] != k.ne[1] or not divides(w[2], n[2]):
            fail_shape(fn, f"v must have ne[1] = {k.ne[1]}, as k has, and an ne[2] that divides q's", q, k, v)
        if mask is not None:
            if mask.dtype is not DType.F16:
                fail_dtype(fn, "mask", mask, DType.F16)
            if not mask.is_contiguous():
                fail_contiguous(fn, "mask", mask)
            m = mask.ne
            if m[0] != k.ne[1] or m[1] < n[1] or not divides(m[2], n[2]) or not divides(m[3], n[3]):
                fail_shape(
                    fn,
                    f"the mask must have ne[0] = {k.ne[1]}, at least {n[1]} rows, and ne[2] and ne[3] "
                    "that divide q's",
                    q,
                    mask,
                )
        elif max_bias > 0:
            fail_arg(fn, f"max_bias {max_bias} needs a mask")
        params = {"scale": scale, "max_bias": max_bias, "logit_softcap": logit_softcap, "prec": Prec.DEFAULT}
        return self._op(Op.FLASH_ATTN_EXT, DType.F32, (w[0], n[2], n[1], n[3]), (q, k, v, mask, None), params)

    def flash_attn_ext_set_prec(self, a: Tensor, prec: Prec | int | str) -> Tensor:
        """Set the accumulator's precision of attention node `a`; return `a` (ggml_flash_attn_ext_set_prec).

        Raises:
            ArgumentError: `a` is no attention node, or there is no such precision.
        """
        fn = "flash_attn_ext_set_prec"
        _check_node(fn, a)
        a.params["prec"] = as_enum(fn, Prec, prec)
        return a

    def flash_attn_ext_set_n_kv_max(self, a: Tensor, n_kv_max: int) -> Tensor:
        """Promise of attention node `a` a sparse mask; return `a` (ggml_flash_attn_ext_set_n_kv_max).

        A device may skip keys by it; those of ggmlb compute all, with the same result.

        Args:
            a: The node.
            n_kv_max: At least the number of finite entries in each row of the mask; 0 takes the promise back.

        Raises:
            ArgumentError: `a` is no attention node, has no mask, or `n_kv_max` is negative.
        """
        fn = "flash_attn_ext_set_n_kv_max"
        _check_node(fn, a)
        if a.optional(3) is None:
            fail_arg(fn, f"{a.describe()} has no mask, whose finite entries n_kv_max counts")
        require_int32(fn, n_kv_max=n_kv_max)
        if n_kv_max < 0:
            fail_arg(fn, f"n_kv_max is {n_kv_max}; it must be at least 0")
        a.params["n_kv_max"] = n_kv_max
        return a

    def flash_attn_ext_get_prec(self, a: Tensor) -> Prec:
        """Return the precision of an attention node (ggml_flash_attn_ext_get_prec).

        Raises:
            ArgumentError: `a` is no attention node.
        """
        _check_node("flash_attn_ext_get_prec", a)
        prec: Prec = a.params["prec"]
        return prec

    def flash_attn_ext_add_sinks(self, a: Tensor, sinks: Tensor | None) -> Tensor:
        """Give an attention node one sink logit per head; None removes them (ggml_flash_attn_ext_add_sinks).

        Raises:
            ArgumentError: `a` is no attention node, or has sinks.
            ShapeError: There is not one sink per head.
            DTypeError: The sinks are not f32.
        """
        return add_sinks("flash_attn_ext_add_sinks", Op.FLASH_ATTN_EXT, a, sinks)

    def flash_attn_back(self, q: Tensor, k: Tensor, v: Tensor, d: Tensor, masked: bool) -> Tensor:
        """Return gradients of q, k, v in one row from the result's, `d`; causal if `masked`.

        Source: ggml_flash_attn_back.

        Args:
            q: ne `[n_embd, n_q, n_head, n_batch]`.
            k: ne `[n_embd, n_kv, n_head_kv, n_batch]`.
            v: Transposed, ne `[n_kv, n_embd, n_head_kv, n_batch]`.
            d: The gradient of the result, of the shape of `q`.
            masked: Whether attention was causal.

        Returns:
            f32, one row; each gradient begins at a multiple of 16 bytes.

        Raises:
            ShapeError: The shapes do not fit.
        """
        fn = "flash_attn_back"
        n, m = q.ne, k.ne
        if not can_mul_mat(k, q) or m[3] != n[3] or v.ne != (m[1], n[0], m[2], n[3]) or d.ne != n:
            fail_shape(
                fn,
                f"k must fit q, v must have ne {[m[1], n[0], m[2], n[3]]}, and d must have q's ne",
                q,
                k,
                v,
                d,
            )
        n_bytes = sum(-(-t.n_elements * 4 // 16) * 16 for t in (q, k, v))
        return self._op(
            Op.FLASH_ATTN_BACK, DType.F32, (n_bytes // 4, 1, 1, 1), (q, k, v, d), {"masked": bool(masked)}
        )


def _check_node(fn: str, a: Tensor) -> None:
    if a.op is not Op.FLASH_ATTN_EXT:
        fail_arg(fn, f"a is {a.describe()}; it must be a FLASH_ATTN_EXT node")


# -- how results are sharded over devices ---


def _shard_flash_attn_ext(node: Tensor, states: States) -> ShardOutcome | None:
    """Shard by heads, several of `q` per head of `k` and `v`; not with ALiBi, whose slopes count heads.

    One head of `k` and `v` for all of `q`, as in DeepSeek's models, stays whole on each device.
    """
    q, k = node.sources[:2]
    state = first_cut(states)
    if state not in states[:3] or state.axis < 2:
        return None
    axis = int(state.axis)
    ratio = q.ne[axis] // k.ne[axis]
    heads = state if state == states[0] else state.moved(axis, ratio)
    if axis == 2 and node.params["max_bias"]:
        return None
    is_shared = k.ne[axis] == 1 and not any(s.is_cut for s in states[1:3])
    keys = MIRRORED if is_shared else heads.moved(axis, over=ratio)
    mask = node.src[3]
    mask_state = MIRRORED if mask is None or mask.ne[axis] == 1 else heads
    if mask is not None and mask.ne[axis] not in (1, q.ne[axis]):
        return None
    sinks = heads.moved(0) if axis == 2 and has_operand(node, 4) else MIRRORED
    wants = (heads, keys, keys, mask_state, sinks)
    return ShardOutcome(heads.moved(1 if axis == 2 else axis), wants[: len(states)])


SPECS = (
    OpSpec(
        Op.FLASH_ATTN_EXT, params=("scale", "max_bias", "logit_softcap", "prec"), shard=_shard_flash_attn_ext
    ),
    OpSpec(Op.FLASH_ATTN_BACK, params=("masked",)),
)
