"""Fused parts of DeepSeek V3.2 and V4."""

from __future__ import annotations

from ggmlb.testing.cases.draw import F16, F32, LOPSIDED, PADDED, PLAIN, Program, family
from ggmlb.testing.cases.products import WEIGHTS


@family("lightning_indexer")
def lightning_indexer(p: Program) -> None:
    dtype = p.one_of(F32, F16, *WEIGHTS)
    d = p.int(1, 2) * dtype.block_size if dtype.block_size > 1 else p.int(1, 70)
    heads, n_q, n_kv, streams = p.int(1, 5), p.extent(5, 20), p.extent(30, 200), p.int(1, 2)
    p.nmse = 1e-6 if dtype is F32 else 5e-4  # as of products
    q = p.operand(F32, (d, heads, n_q, streams), PLAIN, PADDED, **LOPSIDED)
    k = p.operand(dtype, (d, 1, n_kv, streams), PLAIN, PADDED, **LOPSIDED)
    mask = p.leaf(p.one_of(F32, F16), (n_kv, n_q, 1, streams))
    p.out("lightning_indexer", q, k, p.leaf(F32, (heads, n_q, 1, streams)), mask)


@family("dsv4_hc_pre")
def dsv4_hc_pre(p: Program) -> None:
    n, hc, tokens, _ = p.ne(70, 5, 6)
    p.nmse = 1e-6
    p.out("dsv4_hc_pre", p.leaf(F32, (n, hc, tokens)), p.leaf(F32, (hc, tokens), low=0.1))


@family("dsv4_hc_post")
def dsv4_hc_post(p: Program) -> None:
    n, hc, tokens, _ = p.ne(70, 5, 6)
    p.nmse = 1e-6
    streams = p.leaf(F32, (n, hc, tokens))
    p.out(
        "dsv4_hc_post",
        p.leaf(F32, (n, tokens)),
        streams,
        p.leaf(F32, (hc, tokens)),
        p.leaf(F32, (hc, hc, tokens)),
    )


@family("dsv4_hc_comb")
def dsv4_hc_comb(p: Program) -> None:
    hc, tokens = 4, p.extent(6, 100)
    n = 2 * hc + hc * hc
    p.nmse = 1e-6
    mixes = p.leaf(F32, (n, tokens), low=-3, high=3)
    p.out("dsv4_hc_comb", mixes, p.leaf(F32, (3,), low=0.5), p.leaf(F32, (n,)), 1e-6, p.int(1, 6))
