"""State spaces, RWKV, linear attention and the triangular solve."""

from __future__ import annotations

import numpy as np

from ggmlb.testing.cases.draw import F32, I32, PADDED, PLAIN, Program, family


@family("ssm_conv")
def ssm_conv(p: Program) -> None:
    taps, n, tokens, seqs = p.int(1, 4), p.int(1, 20), p.int(1, 9), p.extra(1, 3)
    p.out("ssm_conv", p.leaf(F32, (taps - 1 + tokens, n, seqs)), p.leaf(F32, (taps, n)))


@family("ssm_scan")
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


def _vectors(p: Program, s: int, heads: int, tokens: int, n: int, **values: float) -> list[str]:
    return [p.leaf(F32, (s, heads, tokens), **values) for _ in range(n)]


@family("rwkv_wkv6")
def rwkv_wkv6(p: Program) -> None:
    s, heads, seqs = p.one_of(8, 16, 32), p.int(1, 4), p.int(1, 3)
    tokens = seqs * p.int(1, 5)
    k, v, r = _vectors(p, s, heads, tokens, 3)
    decay = p.leaf(F32, (s, heads, tokens), low=0.3, high=1)
    p.nmse = 1e-6
    p.out("rwkv_wkv6", k, v, r, p.leaf(F32, (s, heads)), decay, p.leaf(F32, (s * s * heads, seqs)))


@family("rwkv_wkv7")
def rwkv_wkv7(p: Program) -> None:
    heads, seqs = p.int(1, 3), p.int(1, 3)  # ggml takes heads of 64 only
    tokens = seqs * p.int(1, 4)
    r, k, v, a, b = _vectors(p, 64, heads, tokens, 5, low=-0.2, high=0.2)
    decay = p.leaf(F32, (64, heads, tokens), low=0.3, high=1)
    p.nmse = 1e-6
    p.out("rwkv_wkv7", r, decay, k, v, a, b, p.leaf(F32, (64 * 64 * heads, seqs)))


@family("gated_linear_attn")
def gated_linear_attn(p: Program) -> None:
    s, heads, seqs = p.one_of(8, 16, 32), p.int(1, 4), p.int(1, 3)
    tokens = seqs * p.int(1, 5)
    k, v, q = _vectors(p, s, heads, tokens, 3)
    gate = p.leaf(F32, (s, heads, tokens), low=0.3, high=1)
    p.nmse = 1e-6
    p.out("gated_linear_attn", k, v, q, gate, p.leaf(F32, (s * s * heads, seqs)), p.float(0.1, 1))


@family("gated_delta_net")
def gated_delta_net(p: Program) -> None:
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


@family("solve_tri")
def solve_tri(p: Program) -> None:
    n, m, n2, n3 = p.int(1, 20), p.int(1, 6), p.extra(1, 3), p.extra(1, 2)
    a = p.random.uniform(-0.5, 0.5, (n3, n2, n, n)).astype(np.float32) + 2 * np.eye(n, dtype=np.float32)
    p.nmse = 1e-6
    p.out("solve_tri", p.leaf(F32, (n, n, n2, n3), a), p.leaf(F32, (m, n, n2, n3)), True, True, False)
