"""Cases, samples and timings: recurrent layers and rotary positions."""

from __future__ import annotations

from functools import partial

import numpy as np

from ggmlb.core.context import Context
from ggmlb.core.dtypes import DType
from ggmlb.core.enums import Op, RopeType
from ggmlb.core.tensor import Tensor
from ggmlb.testing.draw import BF16, F16, F32, I32, PADDED, PLAIN, ROWS, Program
from ggmlb.testing.ops.record import Perf, cases, f32, i32, main

# -- recurrent ---


@cases(
    Op.SSM_CONV,
    lambda c, t: c.ssm_conv(main(c, t, 6, 8, 1), f32(c, 4, 8)),
    Perf("ssm_conv", "f32,f32", lambda c, s: c.ssm_conv(f32(c, 515, 1024 * s), f32(c, 4, 1024 * s))),
)
def ssm_conv(p: Program) -> None:
    taps, n, tokens, seqs = p.int(1, 4), p.int(1, 20), p.int(1, 9), p.extra(1, 3)
    p.out("ssm_conv", p.leaf(F32, (taps - 1 + tokens, n, seqs)), p.leaf(F32, (taps, n)))


def _sample_ssm_scan(c: Context, t: DType) -> Tensor:
    state, heads, tokens = 16, 4, 3
    s, x, dt = main(c, t, state, 8, heads, 1), f32(c, 8, heads, tokens, 1), f32(c, heads, tokens, 1)
    b, d = (f32(c, state, 1, tokens, 1) for _ in range(2))
    return c.ssm_scan(s, x, dt, f32(c, 1, heads), b, d, i32(c, 1))


def _perf_ssm_scan(c: Context, s: int) -> Tensor:
    size, dim, heads, tokens = 16, 64, 16 * s, 512
    decay = c.neg(c.sqr(f32(c, 1, heads)))  # the state must not grow
    b, d = (f32(c, size, 1, tokens, 1) for _ in range(2))
    x, dt = f32(c, dim, heads, tokens, 1), f32(c, heads, tokens, 1)
    return c.ssm_scan(f32(c, size, dim, heads, 1), x, dt, decay, b, d, i32(c, 1))


@cases(Op.SSM_SCAN, _sample_ssm_scan, Perf("ssm_scan", "f32", _perf_ssm_scan))
def ssm_scan(p: Program) -> None:
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


def _sample_wkv6(c: Context, t: DType) -> Tensor:
    k, v, r, td = (main(c, t, 64, 2, 3) for _ in range(4))
    return c.rwkv_wkv6(k, v, r, f32(c, 64, 2), td, f32(c, 64 * 64 * 2, 1))


def _perf_wkv6(c: Context, s: int) -> Tensor:
    size, heads, tokens = 64, 16 * s, 512
    k, v, r, decay = (f32(c, size, heads, tokens) for _ in range(4))
    return c.rwkv_wkv6(k, v, r, f32(c, size, heads), decay, f32(c, size * size * heads, 1))


@cases(Op.RWKV_WKV6, _sample_wkv6, Perf("rwkv_wkv6", "f32", _perf_wkv6))
def rwkv_wkv6(p: Program) -> None:
    s, heads, seqs = p.one_of(8, 16, 32), p.int(1, 4), p.int(1, 3)
    tokens = seqs * p.int(1, 5)
    k, v, r = _drawn_vectors(p, s, heads, tokens, 3)
    decay = p.leaf(F32, (s, heads, tokens), low=0.3, high=1)
    p.nmse = 1e-6
    p.out("rwkv_wkv6", k, v, r, p.leaf(F32, (s, heads)), decay, p.leaf(F32, (s * s * heads, seqs)))


def _sample_wkv7(c: Context, t: DType) -> Tensor:
    r, w, k, v, a, b = (main(c, t, 64, 2, 3) for _ in range(6))
    return c.rwkv_wkv7(r, w, k, v, a, b, f32(c, 64 * 64 * 2, 1))


def _perf_wkv7(c: Context, s: int) -> Tensor:
    size, heads, tokens = 64, 16 * s, 512
    r, w, k, v, a, b = (f32(c, size, heads, tokens) for _ in range(6))
    decay, a = c.sigmoid(w), c.scale(a, 0.01)  # the state must not grow
    return c.rwkv_wkv7(r, decay, k, v, a, b, f32(c, size * size * heads, 1))


@cases(Op.RWKV_WKV7, _sample_wkv7, Perf("rwkv_wkv7", "f32", _perf_wkv7))
def rwkv_wkv7(p: Program) -> None:
    heads, seqs = p.int(1, 3), p.int(1, 3)  # ggml takes heads of 64 only
    tokens = seqs * p.int(1, 4)
    r, k, v, a, b = _drawn_vectors(p, 64, heads, tokens, 5, low=-0.2, high=0.2)
    decay = p.leaf(F32, (64, heads, tokens), low=0.3, high=1)
    p.nmse = 1e-6
    p.out("rwkv_wkv7", r, decay, k, v, a, b, p.leaf(F32, (64 * 64 * heads, seqs)))


def _sample_gated_linear_attn(c: Context, t: DType) -> Tensor:
    k, v, q, g = (main(c, t, 64, 2, 3) for _ in range(4))
    return c.gated_linear_attn(k, v, q, g, f32(c, 64 * 64 * 2, 1), 0.1)


@cases(Op.GATED_LINEAR_ATTN, _sample_gated_linear_attn)
def gated_linear_attn(p: Program) -> None:
    s, heads, seqs = p.one_of(8, 16, 32), p.int(1, 4), p.int(1, 3)
    tokens = seqs * p.int(1, 5)
    k, v, q = _drawn_vectors(p, s, heads, tokens, 3)
    gate = p.leaf(F32, (s, heads, tokens), low=0.3, high=1)
    p.nmse = 1e-6
    p.out("gated_linear_attn", k, v, q, gate, p.leaf(F32, (s * s * heads, seqs)), p.float(0.1, 1))


def _sample_gated_delta_net(c: Context, t: DType) -> Tensor:
    size, heads, tokens = 16, 2, 3
    q, k, v = (main(c, t, size, heads, tokens, 1) for _ in range(3))
    g, beta = f32(c, 1, heads, tokens, 1), f32(c, 1, heads, tokens, 1)
    return c.gated_delta_net(q, k, v, g, beta, f32(c, size, size, heads, 1))


def _perf_gated_delta_net(c: Context, s: int) -> Tensor:
    size, heads, tokens = 128, 16 * s, 512
    q, k = (c.l2_norm(f32(c, size, heads, tokens, 1), 1e-6) for _ in range(2))
    v, state = f32(c, size, heads, tokens, 1), f32(c, size, size, heads, 1)
    gate, beta = (f32(c, 1, heads, tokens, 1) for _ in range(2))
    return c.gated_delta_net(q, k, v, c.neg(c.sqr(gate)), c.sigmoid(beta), state)


@cases(Op.GATED_DELTA_NET, _sample_gated_delta_net, Perf("gated_delta_net", "f32", _perf_gated_delta_net))
def gated_delta_net(p: Program) -> None:
    s, heads_k, tokens, seqs = p.one_of(8, 16, 32), p.int(1, 3), p.int(1, 6), p.int(1, 3)
    heads = heads_k * p.int(1, 3)
    q, k = (p.operand(F32, (s, heads_k, tokens, seqs), PLAIN, PADDED, low=-0.3, high=0.3) for _ in range(2))
    p.nmse = 1e-6
    v = p.operand(F32, (s, heads, tokens, seqs), PLAIN, PADDED)
    g = p.leaf(F32, (p.one_of(1, s), heads, tokens, seqs), low=-1, high=0)
    beta = p.leaf(F32, (1, heads, tokens, seqs), low=0, high=1)
    state = p.leaf(F32, (s, s, heads, seqs))
    # With more snapshots than tokens, ggml leaves states before the first token as they were in memory.
    p.out("gated_delta_net", q, k, v, g, beta, state, p.int(1, tokens))


@cases(Op.SOLVE_TRI, lambda c, t: c.solve_tri(main(c, t, 16, 16), f32(c, 8, 16)))
def solve_tri(p: Program) -> None:
    n, m, n2, n3 = p.int(1, 20), p.int(1, 6), p.extra(1, 3), p.extra(1, 2)
    a = p.random.uniform(-0.5, 0.5, (n3, n2, n, n)).astype(np.float32) + 2 * np.eye(n, dtype=np.float32)
    p.nmse = 1e-6
    p.out("solve_tri", p.leaf(F32, (n, n, n2, n3), a), p.leaf(F32, (m, n, n2, n3)), True, True, False)


# -- rope ---


def draw_rope(p: Program, back: bool) -> None:
    mode = p.one_of(*RopeType)
    multi = bool(mode & RopeType.MROPE)
    pairs = p.int(1, 16)
    n_dims = 2 * pairs
    row = 2 * n_dims if mode is RopeType.VISION else n_dims + (0 if multi else 2 * p.extra(0, 4))
    heads, tokens, batch = p.int(1, 4), p.int(1, 5), p.extra(1, 2)
    dtype = p.one_of(F32, F16, beyond=(BF16,))
    p.nmse = {F32: 1e-6, F16: 1e-5, BF16: 1e-4}[dtype]
    a = p.operand(dtype, (row, heads, tokens, batch), *ROWS)
    n_positions = tokens * (4 if multi else 1)
    positions = p.leaf(I32, (n_positions,), p.random.integers(0, 60, n_positions))
    factors = p.leaf(F32, (row // 2,), low=0.5, high=2) if p.bool() else None
    base, scale = p.one_of(10000.0, 500.0), p.one_of(1.0, 0.5)
    yarn = (p.one_of(0.0, 0.7), p.one_of(1.0, 1.3), 32.0, 1.0)
    numbers = (p.one_of(0, 32, 4096), base, scale, *yarn)
    suffix = "_back" if back else p.one_of("", "_inplace")
    if multi:
        cuts = sorted(p.int(1, pairs) for _ in range(3))
        sections = [cuts[0], cuts[1] - cuts[0], cuts[2] - cuts[1], pairs - cuts[2]]
        if mode is RopeType.VISION:
            sections = [p.int(1, pairs), p.int(1, pairs), 0, 0]
        p.out("rope_multi" + suffix, a, positions, factors, n_dims, sections, mode, *numbers)
    else:
        p.out("rope_ext" + suffix, a, positions, factors, n_dims, mode, *numbers)


cases(
    Op.ROPE,
    lambda c, t: c.rope(main(c, t, 64, 2, 3), i32(c, 3), 64),
    Perf("rope", "f32", lambda c, s: c.rope(f32(c, 128, 8 * s, 512), i32(c, 512), 128)),
    name="rope",
)(partial(draw_rope, back=False))
cases(
    Op.ROPE_BACK, lambda c, t: c.rope_ext_back(main(c, t, 64, 2, 3), i32(c, 3), None, 64), name="rope_back"
)(partial(draw_rope, back=True))
