"""Recurrent layers: state space models, RWKV, gated linear attention; the triangular solve that they use.

GATED_LINEAR_ATTN has the param `scale`; SSM_SCAN and GATED_DELTA_NET have `k`, the number of state snapshots.
The others have none. Results pack the outputs and the new states into one f32 tensor.
"""

from __future__ import annotations

from ggmlb.core.dtypes import DType
from ggmlb.core.enums import Op
from ggmlb.core.ops.base import (
    OpBase,
    fail_arg,
    fail_contiguous,
    fail_shape,
    require_contiguous,
    require_type,
)
from ggmlb.core.ops.spec import OpSpec
from ggmlb.core.tensor import Ne, Tensor


class RecurrentOps(OpBase):
    """ssm_conv, ssm_scan, rwkv_wkv6, rwkv_wkv7, gated_linear_attn, gated_delta_net, solve_tri."""

    def ssm_conv(self, sx: Tensor, c: Tensor) -> Tensor:
        """Return the causal convolution of each channel: f32, ne `[d_inner, n_t, n_s]` (ggml_ssm_conv).

        Args:
            sx: The last states, then the inputs: ne `[d_conv - 1 + n_t, d_inner, n_s]`.
            c: Kernels, ne `[d_conv, d_inner]`.

        Raises:
            ShapeError: The shapes do not fit.
        """
        n_t = sx.ne[0] - c.ne[0] + 1
        if sx.ne[3] != 1 or c.ne[2] != 1 or c.ne[3] != 1 or sx.ne[1] != c.ne[1] or n_t < 0:
            fail_shape(
                "ssm_conv", "sx must be 3d, c a matrix with ne[1] of sx and rows at most one longer", sx, c
            )
        return self._op(Op.SSM_CONV, DType.F32, (c.ne[1], n_t, sx.ne[2], 1), (sx, c))

    def ssm_scan(
        self, s: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, ids: Tensor, K: int = 1
    ) -> Tensor:
        """Return the outputs and last `K` states of the selective scan of Mamba 1 or 2 (ggml_ssm_scan).

        Args:
            s: Contiguous states, ne `[d_state, head_dim, n_head, n_states]`.
            x: Inputs, ne `[head_dim, n_head, n_tokens, n_seqs]`.
            dt: Contiguous time steps, ne `[n_head, n_tokens, n_seqs]`.
            A: Contiguous decays, ne `[d_state, n_head]` or `[1, n_head]`.
            B: ne `[d_state, n_group, n_tokens, n_seqs]`; the groups divide the heads.
            C: Of the shape of `B`.
            ids: i32, ne `[n_seqs]`: the state that each sequence begins with.
            K: How many of the last states to return, the newest first.

        Returns:
            f32, one row: the outputs, of the shape of `x`, then `K` times `n_seqs` states.

        Raises:
            ShapeError: The shapes or strides do not fit.
            DTypeError: `ids` is not i32.
            ArgumentError: `K` is less than 1.
        """
        fn = "ssm_scan"
        for name, t in (("s", s), ("dt", dt), ("A", A)):
            require_contiguous(fn, name, t)
        for name, t in (("x", x), ("B", B), ("C", C)):
            if t.nb[0] != t.dtype.type_size or t.nb[1] != t.ne[0] * t.nb[0]:
                fail_contiguous(fn, name, t, "contiguous within dimensions 0 and 1")
        require_type(fn, "ids", ids, DType.I32)
        if K < 1:
            fail_arg(fn, f"K is {K}; it must be at least 1")
        d_state = s.ne[0]
        head_dim, n_head, n_tokens, n_seqs = x.ne
        _expect(fn, "s", s, (d_state, head_dim, n_head, s.ne[3]))
        _expect(fn, "dt", dt, (n_head, n_tokens, n_seqs, 1))
        _expect(fn, "A", A, (1 if A.ne[0] == 1 else d_state, n_head, 1, 1))
        _expect(fn, "B", B, (d_state, B.ne[1], n_tokens, n_seqs))
        _expect(fn, "C", C, B.ne)
        if B.ne[1] == 0 or n_head % B.ne[1]:
            fail_shape(fn, f"B has {B.ne[1]} groups, which must divide the {n_head} heads of x", x, B)
        _expect(fn, "ids", ids, (n_seqs, 1, 1, 1))
        size = x.n_elements + K * d_state * head_dim * n_head * n_seqs
        return self._op(Op.SSM_SCAN, DType.F32, (size, 1, 1, 1), (s, x, dt, A, B, C, ids), {"k": K})

    def rwkv_wkv6(self, k: Tensor, v: Tensor, r: Tensor, tf: Tensor, td: Tensor, state: Tensor) -> Tensor:
        """Return the outputs and new states of the RWKV-6 recurrence, in one tensor (ggml_rwkv_wkv6).

        Args:
            k: Keys, ne `[S, H, n_tokens]`; all operands are contiguous.
            v: Values, of the shape of `k`.
            r: Receptance, of the shape of `k`.
            tf: Bonus of the current token, ne `[S, H]`.
            td: Decay, of the shape of `k`.
            state: `S * S * H` elements per sequence, ne[1] sequences.

        Returns:
            f32, ne `[S * H, n_tokens + S * n_seqs]`: outputs, then states.

        Raises:
            ShapeError: The shapes do not fit, or an operand is not contiguous.
        """
        tokens = {"k": k, "v": v, "r": r, "td": td}
        require_contiguous("rwkv_wkv6", "tf", tf)
        if tf.n_elements != k.ne[0] * k.ne[1]:
            fail_shape("rwkv_wkv6", f"tf must hold {k.ne[0] * k.ne[1]} elements", k, tf)
        ne = _linear_state("rwkv_wkv6", k, tokens, state)
        return self._op(Op.RWKV_WKV6, DType.F32, ne, (k, v, r, tf, td, state))

    def rwkv_wkv7(
        self, r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, state: Tensor
    ) -> Tensor:
        """Return the outputs and new states of the RWKV-7 recurrence, in one tensor (ggml_rwkv_wkv7).

        Shapes of operands and result are those of `rwkv_wkv6`.

        Raises:
            ShapeError: The shapes do not fit, or an operand is not contiguous.
        """
        tokens = {"r": r, "w": w, "k": k, "v": v, "a": a, "b": b}
        ne = _linear_state("rwkv_wkv7", k, tokens, state)
        return self._op(Op.RWKV_WKV7, DType.F32, ne, (r, w, k, v, a, b, state))

    def gated_linear_attn(
        self, k: Tensor, v: Tensor, q: Tensor, g: Tensor, state: Tensor, scale: float
    ) -> Tensor:
        """Return outputs and new states of gated linear attention, in one tensor (ggml_gated_linear_attn).

        Shapes of operands and result are those of `rwkv_wkv6`.

        Raises:
            ShapeError: The shapes do not fit, or an operand is not contiguous.
        """
        ne = _linear_state("gated_linear_attn", k, {"k": k, "v": v, "q": q, "g": g}, state)
        return self._op(Op.GATED_LINEAR_ATTN, DType.F32, ne, (k, v, q, g, state), {"scale": scale})

    def gated_delta_net(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, K: int = 1
    ) -> Tensor:
        """Return the outputs and last `K` states of the gated delta rule in a tensor (ggml_gated_delta_net).

        Args:
            q: ne `[S, H_k, n_tokens, n_seqs]`, rows contiguous; `H_k` divides `H`.
            k: Of the shape of `q`.
            v: ne `[S, H, n_tokens, n_seqs]`, rows contiguous.
            g: Contiguous gates, ne `[1 or S, H, n_tokens, n_seqs]`.
            beta: Contiguous, ne `[1, H, n_tokens, n_seqs]`.
            state: Contiguous, ne `[S, S, H, n_seqs]`.
            K: How many of the last states to return, the newest first.

        Returns:
            f32, ne `[S * H, n_tokens * n_seqs + K * S * n_seqs]`: outputs, then states.

        Raises:
            ShapeError: The shapes or strides do not fit.
            DTypeError: An operand is not f32.
            ArgumentError: `K` is less than 1.
        """
        fn = "gated_delta_net"
        for name, t in (("q", q), ("k", k), ("v", v)):
            require_type(fn, name, t, DType.F32)
            if not t.is_contiguous_rows():
                fail_contiguous(fn, name, t, "contiguous within its rows")
        for name, t in (("g", g), ("beta", beta), ("state", state)):
            require_type(fn, name, t, DType.F32)
            require_contiguous(fn, name, t)
        if K < 1:
            fail_arg(fn, f"K is {K}; it must be at least 1")
        s, h, n_tokens, n_seqs = v.ne
        heads = q.ne[1]
        if heads == 0 or h % heads:
            fail_shape(fn, f"q has {heads} heads, which must divide the {h} heads of v", q, v)
        _expect(fn, "q", q, (s, heads, n_tokens, n_seqs))
        _expect(fn, "k", k, q.ne)
        _expect(fn, "g", g, (1 if g.ne[0] == 1 else s, h, n_tokens, n_seqs))
        _expect(fn, "beta", beta, (1, h, n_tokens, n_seqs))
        _expect(fn, "state", state, (s, s, h, n_seqs))
        ne = (s * h, n_tokens * n_seqs + K * s * n_seqs, 1, 1)
        return self._op(Op.GATED_DELTA_NET, DType.F32, ne, (q, k, v, g, beta, state), {"k": K})

    def solve_tri(
        self, a: Tensor, b: Tensor, left: bool = True, lower: bool = True, uni: bool = False
    ) -> Tensor:
        """Solve `a x = b` for `x`, `a` lower triangular; flags must be the defaults (ggml_solve_tri).

        Args:
            a: Contiguous f32, ne `[n, n, ...]`.
            b: Contiguous f32, ne `[m, n, ...]`.
            left: Must be True: other variants are not defined yet, in ggml either.
            lower: Must be True.
            uni: Must be False.

        Raises:
            DTypeError: An operand is not f32.
            ShapeError: The shapes do not fit, or an operand is not contiguous.
            ArgumentError: Another variant is requested.
        """
        fn = "solve_tri"
        require_type(fn, "a", a, DType.F32)
        require_type(fn, "b", b, DType.F32)
        if a.ne[0] != a.ne[1] or a.ne[1:] != b.ne[1:]:
            fail_shape(fn, "a must be square, and have ne[1:] of b", a, b)
        require_contiguous(fn, "a", a)
        require_contiguous(fn, "b", b)
        if not (left and lower) or uni:
            fail_arg(fn, "only left = True, lower = True, uni = False is defined")
        return self._op(Op.SOLVE_TRI, DType.F32, b.ne, (a, b))


def _expect(fn: str, arg: str, tensor: Tensor, ne: Ne) -> None:
    if tensor.ne != ne:
        fail_shape(fn, f"{arg} must have ne {list(ne)}", tensor)


def _linear_state(fn: str, k: Tensor, tokens: dict[str, Tensor], state: Tensor) -> Ne:
    """Check operands with one vector per head and token; return the extents of outputs and states."""
    s, h, n_tokens = k.ne[:3]
    for name, t in tokens.items():
        require_contiguous(fn, name, t)
        if t.ne[:3] != (s, h, n_tokens):
            fail_shape(fn, f"{name} must have ne {[s, h, n_tokens]}, as k has", k, t)
    require_contiguous(fn, "state", state)
    n_seqs = state.ne[1]
    if state.n_elements != s * s * h * n_seqs:
        fail_shape(fn, f"state must hold {s * s * h} elements per sequence, ne[1] of them", k, state)
    return (s * h, n_tokens + s * n_seqs, 1, 1)


SPECS = (
    OpSpec(Op.SSM_CONV),
    OpSpec(Op.SSM_SCAN, params=("k",)),
    OpSpec(Op.RWKV_WKV6),
    OpSpec(Op.GATED_LINEAR_ATTN, params=("scale",)),
    OpSpec(Op.RWKV_WKV7),
    OpSpec(Op.SOLVE_TRI),
    OpSpec(Op.GATED_DELTA_NET, params=("k",)),
)
