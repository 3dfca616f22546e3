"""Recurrent layers: state space models, RWKV, gated linear attention and their triangular solve.

GATED_LINEAR_ATTN has the param `scale`; SSM_SCAN and GATED_DELTA_NET have `k`, the number of state snapshots.
The others have none. Results pack the outputs and the new states into one f32 tensor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

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
from ggmlb.core.ops.spec import F32, I32, PADDED, PLAIN, OpSpec, Perf, f32, i32, main
from ggmlb.core.tensor import Ne, Tensor

if TYPE_CHECKING:
    from ggmlb.core.context import Context
    from ggmlb.testing.draw import Program


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
        self,
        s: Tensor,
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        ids: Tensor,
        K: int = 1,
    ) -> Tensor:
        """Return the selective scan of a state space model, Mamba 1 or 2 (ggml_ssm_scan).

        Args:
            s: Contiguous states, ne `[d_state, head_dim, n_head, n_states]`.
            x: Inputs, ne `[head_dim, n_head, n_tokens, n_seqs]`.
            dt: Contiguous time steps, ne `[n_head, n_tokens, n_seqs]`.
            A: Contiguous decays, ne `[d_state, n_head]` or `[1, n_head]`.
            B: ne `[d_state, n_group, n_tokens, n_seqs]`.
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
        _expect(fn, "ids", ids, (n_seqs, 1, 1, 1))
        size = x.n_elements + K * d_state * head_dim * n_head * n_seqs
        return self._op(Op.SSM_SCAN, DType.F32, (size, 1, 1, 1), (s, x, dt, A, B, C, ids), {"k": K})

    def rwkv_wkv6(self, k: Tensor, v: Tensor, r: Tensor, tf: Tensor, td: Tensor, state: Tensor) -> Tensor:
        """Return the RWKV-6 recurrence (ggml_rwkv_wkv6).

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
        """Return the RWKV-7 recurrence; operands and result as for `rwkv_wkv6` (ggml_rwkv_wkv7).

        Raises:
            ShapeError: The shapes do not fit, or an operand is not contiguous.
        """
        tokens = {"r": r, "w": w, "k": k, "v": v, "a": a, "b": b}
        ne = _linear_state("rwkv_wkv7", k, tokens, state)
        return self._op(Op.RWKV_WKV7, DType.F32, ne, (r, w, k, v, a, b, state))

    def gated_linear_attn(
        self, k: Tensor, v: Tensor, q: Tensor, g: Tensor, state: Tensor, scale: float
    ) -> Tensor:
        """Return gated linear attention; operands and result as for `rwkv_wkv6` (ggml_gated_linear_attn).

        Raises:
            ShapeError: The shapes do not fit, or an operand is not contiguous.
        """
        ne = _linear_state("gated_linear_attn", k, {"k": k, "v": v, "q": q, "g": g}, state)
        return self._op(Op.GATED_LINEAR_ATTN, DType.F32, ne, (k, v, q, g, state), {"scale": scale})

    def gated_delta_net(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, K: int = 1
    ) -> Tensor:
        """Return the gated delta rule (ggml_gated_delta_net).

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
        """Return `x` of `a x = b`, with `a` lower triangular: f32, the shape of `b` (ggml_solve_tri).

        Args:
            a: Contiguous f32, ne `[n, n, ...]`.
            b: Contiguous f32, ne `[m, n, ...]`.
            left: Must be True: other variants are not defined yet, in ggml either.
            lower: Must be True.
            uni: Must be False.

        Raises:
            DTypeError: An operand is not f32.
            ShapeError: The shapes do not fit, or an operand is not contiguous.
            ArgumentError: Another variant is asked for.
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


# -- cases ---


def _draw_ssm_conv(p: Program) -> None:
    taps, n, tokens, seqs = p.int(1, 4), p.int(1, 20), p.int(1, 9), p.extra(1, 3)
    p.out("ssm_conv", p.leaf(F32, (taps - 1 + tokens, n, seqs)), p.leaf(F32, (taps, n)))


def _draw_ssm_scan(p: Program) -> None:
    state, dim, groups, tokens, seqs = p.one_of(8, 16, 32), p.int(1, 6), p.int(1, 3), p.int(1, 7), p.int(1, 3)
    heads, states = groups * p.int(1, 3), seqs + p.int(0, 2)
    p.nmse = 1e-6
    p.out(
        "ssm_scan",
        p.leaf(F32, (state, dim, heads, states)),
        p.leaf(F32, (dim, heads, tokens, seqs)),
        p.leaf(F32, (heads, tokens, seqs)),
        p.leaf(F32, (p.one_of(1, state), heads), low=-2, high=-0.1),
        p.leaf(F32, (state, groups, tokens, seqs)),
        p.leaf(F32, (state, groups, tokens, seqs)),
        p.leaf(I32, (seqs,), p.random.permutation(states)[:seqs]),
    )


def _drawn_vectors(p: Program, s: int, heads: int, tokens: int, n: int, **values: float) -> list[str]:
    return [p.leaf(F32, (s, heads, tokens), **values) for _ in range(n)]


def _draw_rwkv_wkv6(p: Program) -> None:
    s, heads, seqs = p.one_of(8, 16, 32), p.int(1, 4), p.int(1, 3)
    tokens = seqs * p.int(1, 5)
    k, v, r = _drawn_vectors(p, s, heads, tokens, 3)
    decay = p.leaf(F32, (s, heads, tokens), low=0.3, high=1)
    p.nmse = 1e-6
    p.out("rwkv_wkv6", k, v, r, p.leaf(F32, (s, heads)), decay, p.leaf(F32, (s * s * heads, seqs)))


def _draw_rwkv_wkv7(p: Program) -> None:
    heads, seqs = p.int(1, 3), p.int(1, 3)  # ggml takes heads of 64 only
    tokens = seqs * p.int(1, 4)
    r, k, v, a, b = _drawn_vectors(p, 64, heads, tokens, 5, low=-0.2, high=0.2)
    decay = p.leaf(F32, (64, heads, tokens), low=0.3, high=1)
    p.nmse = 1e-6
    p.out("rwkv_wkv7", r, decay, k, v, a, b, p.leaf(F32, (64 * 64 * heads, seqs)))


def _draw_gated_linear_attn(p: Program) -> None:
    s, heads, seqs = p.one_of(8, 16, 32), p.int(1, 4), p.int(1, 3)
    tokens = seqs * p.int(1, 5)
    k, v, q = _drawn_vectors(p, s, heads, tokens, 3)
    gate = p.leaf(F32, (s, heads, tokens), low=0.3, high=1)
    p.nmse = 1e-6
    p.out("gated_linear_attn", k, v, q, gate, p.leaf(F32, (s * s * heads, seqs)), p.float(0.1, 1))


def _draw_gated_delta_net(p: Program) -> None:
    s, heads_k, tokens, seqs = p.one_of(8, 16, 32), p.int(1, 3), p.int(1, 6), p.int(1, 3)
    heads = heads_k * p.int(1, 3)
    q, k = (p.operand(F32, (s, heads_k, tokens, seqs), PLAIN, PADDED, low=-0.3, high=0.3) for _ in range(2))
    p.nmse = 1e-6
    p.out(
        "gated_delta_net",
        q,
        k,
        p.operand(F32, (s, heads, tokens, seqs), PLAIN, PADDED),
        p.leaf(F32, (p.one_of(1, s), heads, tokens, seqs), low=-1, high=0),
        p.leaf(F32, (1, heads, tokens, seqs), low=0, high=1),
        p.leaf(F32, (s, s, heads, seqs)),
        p.int(1, tokens),  # ggml leaves states before the first token as they were in memory
    )


def _draw_solve_tri(p: Program) -> None:
    n, m, n2, n3 = p.int(1, 20), p.int(1, 6), p.extra(1, 3), p.extra(1, 2)
    a = p.random.uniform(-0.5, 0.5, (n3, n2, n, n)).astype(np.float32) + 2 * np.eye(n, dtype=np.float32)
    p.nmse = 1e-6
    p.out("solve_tri", p.leaf(F32, (n, n, n2, n3), a), p.leaf(F32, (m, n, n2, n3)), True, True, False)


def _sample_ssm_scan(c: Context, t: DType) -> Tensor:
    state, heads, tokens = 16, 4, 3
    return c.ssm_scan(
        main(c, t, state, 8, heads, 1),
        f32(c, 8, heads, tokens, 1),
        f32(c, heads, tokens, 1),
        f32(c, 1, heads),
        f32(c, state, 1, tokens, 1),
        f32(c, state, 1, tokens, 1),
        i32(c, 1),
    )


def _sample_wkv6(c: Context, t: DType) -> Tensor:
    k, v, r, td = (main(c, t, 64, 2, 3) for _ in range(4))
    return c.rwkv_wkv6(k, v, r, f32(c, 64, 2), td, f32(c, 64 * 64 * 2, 1))


def _sample_gated_linear_attn(c: Context, t: DType) -> Tensor:
    k, v, q, g = (main(c, t, 64, 2, 3) for _ in range(4))
    return c.gated_linear_attn(k, v, q, g, f32(c, 64 * 64 * 2, 1), 0.1)


def _sample_wkv7(c: Context, t: DType) -> Tensor:
    r, w, k, v, a, b = (main(c, t, 64, 2, 3) for _ in range(6))
    return c.rwkv_wkv7(r, w, k, v, a, b, f32(c, 64 * 64 * 2, 1))


def _sample_gated_delta_net(c: Context, t: DType) -> Tensor:
    size, heads, tokens = 16, 2, 3
    q, k, v = (main(c, t, size, heads, tokens, 1) for _ in range(3))
    g, beta = f32(c, 1, heads, tokens, 1), f32(c, 1, heads, tokens, 1)
    return c.gated_delta_net(q, k, v, g, beta, f32(c, size, size, heads, 1))


def _perf_ssm_scan(c: Context, s: int) -> Tensor:
    size, dim, heads, tokens = 16, 64, 16 * s, 512
    decay = c.neg(c.sqr(f32(c, 1, heads)))  # the state must not grow
    b, d = (f32(c, size, 1, tokens, 1) for _ in range(2))
    x, dt = f32(c, dim, heads, tokens, 1), f32(c, heads, tokens, 1)
    return c.ssm_scan(f32(c, size, dim, heads, 1), x, dt, decay, b, d, i32(c, 1))


def _perf_wkv6(c: Context, s: int) -> Tensor:
    size, heads, tokens = 64, 16 * s, 512
    k, v, r, decay = (f32(c, size, heads, tokens) for _ in range(4))
    return c.rwkv_wkv6(k, v, r, f32(c, size, heads), decay, f32(c, size * size * heads, 1))


SPECS = (
    OpSpec(
        Op.SSM_CONV,
        samples={"ssm_conv": lambda c, t: c.ssm_conv(main(c, t, 6, 8, 1), f32(c, 4, 8))},
        cases={"ssm_conv": _draw_ssm_conv},
        perf=(
            Perf(
                "ssm_conv",
                "f32,f32",
                lambda c, s: c.ssm_conv(c.new_tensor(F32, (515, 1024 * s)), c.new_tensor(F32, (4, 1024 * s))),
            ),
        ),
    ),
    OpSpec(
        Op.SSM_SCAN,
        params=("k",),
        samples={"ssm_scan": _sample_ssm_scan},
        cases={"ssm_scan": _draw_ssm_scan},
        perf=(Perf("ssm_scan", "f32", _perf_ssm_scan),),
    ),
    OpSpec(
        Op.RWKV_WKV6,
        samples={"rwkv_wkv6": _sample_wkv6},
        cases={"rwkv_wkv6": _draw_rwkv_wkv6},
        perf=(Perf("rwkv_wkv6", "f32", _perf_wkv6),),
    ),
    OpSpec(
        Op.GATED_LINEAR_ATTN,
        params=("scale",),
        samples={"gated_linear_attn": _sample_gated_linear_attn},
        cases={"gated_linear_attn": _draw_gated_linear_attn},
    ),
    OpSpec(Op.RWKV_WKV7, samples={"rwkv_wkv7": _sample_wkv7}, cases={"rwkv_wkv7": _draw_rwkv_wkv7}),
    OpSpec(
        Op.SOLVE_TRI,
        samples={"solve_tri": lambda c, t: c.solve_tri(main(c, t, 16, 16), f32(c, 8, 16))},
        cases={"solve_tri": _draw_solve_tri},
    ),
    OpSpec(
        Op.GATED_DELTA_NET,
        params=("k",),
        samples={"gated_delta_net": _sample_gated_delta_net},
        cases={"gated_delta_net": _draw_gated_delta_net},
    ),
)
