"""Fused parts of DeepSeek V3.2 and V4: the lightning indexer and the hyper-connections.

DSV4_HC_COMB has the params `eps, n_iter`, DSV4_HC_PRE `gated, scale`; the others have none. DSV4_HC_POST has
`src = (x, residual, post, comb)`, the last `None` for the identity.
"""

from __future__ import annotations

import math

from ggmlb.core.dtypes import DType
from ggmlb.core.enums import Op
from ggmlb.core.ops.base import OpBase, fail_arg, fail_shape, require_finite, require_int32, require_type
from ggmlb.core.ops.spec import OpSpec
from ggmlb.core.tensor import Ne, Tensor


class DeepSeekOps(OpBase):
    """lightning_indexer, dsv4_hc_pre, dsv4_hc_pre_gated, dsv4_hc_post, dsv4_hc_comb."""

    def lightning_indexer(self, q: Tensor, k: Tensor, weights: Tensor, mask: Tensor) -> Tensor:
        """Return, for each query and key, `sum over heads of weight * relu(q . k)`, plus the mask.

        Source: ggml_lightning_indexer.

        Args:
            q: ne `[d, n_head, n_q, n_stream]`.
            k: ne `[d, 1, n_kv, n_stream]`.
            weights: f32, ne `[n_head, n_q, 1, n_stream]`.
            mask: f16 or f32, ne `[n_kv, n_q, 1, n_stream]`.

        Returns:
            f32, ne `[n_kv, n_q, 1, n_stream]`.

        Raises:
            ShapeError: The shapes do not fit.
            DTypeError: An operand is of another type.
        """
        fn = "lightning_indexer"
        d, n_head, n_q, n_stream = q.ne
        n_kv = k.ne[2]
        require_type(fn, "q", q, DType.F32)
        require_type(fn, "weights", weights, DType.F32)
        require_type(fn, "mask", mask, DType.F16, DType.F32)
        if (
            k.ne != (d, 1, n_kv, n_stream)
            or weights.ne != (n_head, n_q, 1, n_stream)
            or mask.ne != (n_kv, n_q, 1, n_stream)
        ):
            fail_shape(
                fn,
                f"k must have ne {[d, 1, n_kv, n_stream]}, weights {[n_head, n_q, 1, n_stream]} "
                f"and the mask {[n_kv, n_q, 1, n_stream]}",
                q, k, weights, mask,
            )  # fmt: skip
        return self._op(Op.LIGHTNING_INDEXER, DType.F32, mask.ne, (q, k, weights, mask))

    def dsv4_hc_pre(self, x: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum of hyper-connection streams: f32, ne `[n, n_tokens]` (ggml_dsv4_hc_pre).

        Args:
            x: Streams, f32, ne `[n, hc, n_tokens]`.
            weights: f32, ne `[hc, n_tokens]`.

        Raises:
            ShapeError: The shapes do not fit.
            DTypeError: An operand is not f32.
        """
        n, hc, n_tokens = x.ne[:3]
        _check("dsv4_hc_pre", (x, (n, hc, n_tokens, 1)), (weights, (hc, n_tokens, 1, 1)))
        params = {"gated": False, "scale": 1.0}
        return self._op(Op.DSV4_HC_PRE, DType.F32, (n, n_tokens, 1, 1), (x, weights), params)

    def dsv4_hc_pre_gated(self, x: Tensor, gate: Tensor, scale: float) -> Tensor:
        """Return `scale` times the sum over streams of `x * sigmoid(gate)` (ggml_dsv4_hc_pre_gated).

        Args:
            x: Streams, f32, ne `[n, hc, n_tokens]`.
            gate: f32, of the shape of `x`.
            scale: Factor of the sum.

        Returns:
            f32, ne `[n, n_tokens]`.

        Raises:
            ShapeError: The shapes do not fit.
            DTypeError: An operand is not f32.
            ArgumentError: `scale` is not finite.
        """
        fn, (n, hc, n_tokens) = "dsv4_hc_pre_gated", x.ne[:3]
        _check(fn, (x, (n, hc, n_tokens, 1)), (gate, (n, hc, n_tokens, 1)))
        require_finite(fn, scale=scale)
        params = {"gated": True, "scale": scale}
        return self._op(Op.DSV4_HC_PRE, DType.F32, (n, n_tokens, 1, 1), (x, gate), params)

    def dsv4_hc_post(self, x: Tensor, residual: Tensor, post: Tensor, comb: Tensor | None = None) -> Tensor:
        """Return hyper-connection streams: `residual` mixed by `comb`, plus `post * x` (ggml_dsv4_hc_post).

        Args:
            x: A block's result, f32, ne `[n, n_tokens]`.
            residual: Streams, f32, ne `[n, hc, n_tokens]`.
            post: f32, ne `[hc, n_tokens]`.
            comb: f32, ne `[hc, hc, n_tokens]`; default: the identity, so that each stream keeps its residual.

        Returns:
            f32, of the shape of `residual`.

        Raises:
            ShapeError: The shapes do not fit.
            DTypeError: An operand is not f32.
        """
        n, hc, n_tokens = residual.ne[:3]
        _check(
            "dsv4_hc_post",
            (residual, (n, hc, n_tokens, 1)),
            (x, (n, n_tokens, 1, 1)),
            (post, (hc, n_tokens, 1, 1)),
            *(() if comb is None else [(comb, (hc, hc, n_tokens, 1))]),
        )
        return self._op(Op.DSV4_HC_POST, DType.F32, residual.ne, (x, residual, post, comb))

    def dsv4_hc_comb(self, mixes: Tensor, scale: Tensor, base: Tensor, eps: float, n_iter: int) -> Tensor:
        """Return doubly stochastic mixing matrices after `n_iter` Sinkhorn iterations (ggml_dsv4_hc_comb).

        Args:
            mixes: f32, ne `[2 * hc + hc * hc, n_tokens]`; the last `hc * hc` of each row are read.
            scale: Three f32; the last is the factor of the matrix.
            base: f32, ne `[2 * hc + hc * hc]`; added to the scaled mixes.
            eps: Added to the sums, so that none is 0.
            n_iter: Sinkhorn iterations, at least 1.

        Returns:
            f32, ne `[hc, hc, n_tokens]`.

        Raises:
            ShapeError: The shapes do not fit.
            DTypeError: An operand is not f32.
            ArgumentError: `n_iter` is less than 1.
        """
        fn = "dsv4_hc_comb"
        width, n_tokens = mixes.ne[:2]
        hc = math.isqrt(width + 1) - 1
        if hc < 1 or hc * (hc + 2) != width:
            fail_shape(fn, f"the row length {width} of mixes must be hc * (hc + 2)", mixes)
        _check(fn, (mixes, (width, n_tokens, 1, 1)), (scale, (3, 1, 1, 1)), (base, (width, 1, 1, 1)))
        require_int32(fn, n_iter=n_iter)
        if n_iter < 1:
            fail_arg(fn, f"n_iter is {n_iter}; it must be at least 1")
        params = {"eps": eps, "n_iter": n_iter}
        return self._op(Op.DSV4_HC_COMB, DType.F32, (hc, hc, n_tokens, 1), (mixes, scale, base), params)


def _check(fn: str, *expected: tuple[Tensor, Ne]) -> None:
    """Raise unless each tensor is f32 and has the given extents."""
    for tensor, ne in expected:
        require_type(fn, "an operand", tensor, DType.F32)
        if tensor.ne != ne:
            operands = [t for t, _ in expected if t is not tensor]
            fail_shape(fn, f"the first operand named must have ne {list(ne)}", tensor, *operands)


SPECS = (
    OpSpec(Op.LIGHTNING_INDEXER),
    OpSpec(Op.DSV4_HC_PRE, params=("gated", "scale")),
    OpSpec(Op.DSV4_HC_POST),
    OpSpec(Op.DSV4_HC_COMB, params=("eps", "n_iter")),
)
