"""Cases, samples and timings: matrix products, attention, parts of DeepSeek."""

from __future__ import annotations

from ggmlb.core.context import Context
from ggmlb.core.dtypes import DType
from ggmlb.core.enums import Op
from ggmlb.core.tensor import Tensor
from ggmlb.testing.draw import (
    ANY,
    BF16,
    F16,
    F32,
    I32,
    LOPSIDED,
    OUTER,
    PADDED,
    PLAIN,
    READ_ONLY,
    ROWS,
    WEIGHTS,
    Program,
)
from ggmlb.testing.ops.record import ROW, Perf, cases, f32, i32, main

# -- matmul ---


def _drawn_weight(p: Program) -> DType:
    dtype: DType = p.one_of(F32, F16, BF16, *WEIGHTS, beyond=READ_ONLY)
    return dtype


def _more_rows(dtype: DType) -> int:
    """Return the rows to add to a weight of random blocks, of which a single product may cancel."""
    return 32 if dtype in READ_ONLY else 0


def _timed_product(dtype: DType, n: int) -> Perf:
    """A product of `n` columns to be timed, with weights of that type."""
    k, m = (1024, 1024) if n > 8 else (2048, 4096)

    def build(c: Context, s: int) -> Tensor:
        return c.mul_mat(c.new_tensor(dtype, (k * s, m * s)), f32(c, k * s, n))

    return Perf("mul_mat", f"{dtype.name.lower()},f32;n={n}", build)


_PERF_TYPES = (F32, F16, BF16, DType.Q4_0, DType.Q8_0, DType.Q4_K, DType.Q6_K, DType.MXFP4)


@cases(
    Op.MUL_MAT,
    lambda c, t: c.mul_mat(main(c, t), f32(c, ROW, 8)),
    *(_timed_product(t, n) for n in (1, 8, 512) for t in _PERF_TYPES),
)
def mul_mat(p: Program) -> None:
    dtype = _drawn_weight(p)
    k = p.extent(3, 9) * dtype.block_size if dtype.block_size > 1 else p.extent(70, 700)
    n2, n3 = p.extra(1, 3), p.extra(1, 2)
    layouts = ROWS if dtype.block_size == 1 else (PLAIN, PADDED)
    m, n = p.extent(20, 200) + _more_rows(dtype), p.extent(12, 80)
    a = p.operand(dtype, (k, m, n2, n3), *layouts, beyond=ROWS, **LOPSIDED)
    b = p.operand(
        p.one_of(F32, beyond=(F16,)), (k, n, n2 * p.extra(1, 3), n3 * p.extra(1, 2)), *layouts, **LOPSIDED
    )
    p.nmse = 1e-6 if dtype is F32 else 1e-3
    p.out("mul_mat", a, b)


def _timed_experts(dtype: DType, n: int) -> Perf:
    def build(c: Context, s: int) -> Tensor:
        experts = c.new_tensor(dtype, (512 * s, 256 * s, 16))
        return c.mul_mat_id(experts, f32(c, 512 * s, 4, n), i32(c, 4, n))

    return Perf("mul_mat_id", f"{dtype.name.lower()},f32;n={n}", build)


@cases(
    Op.MUL_MAT_ID,
    lambda c, t: c.mul_mat_id(main(c, t, ROW, 4, 3), f32(c, ROW, 1, 8), i32(c, 2, 8)),
    *(_timed_experts(t, n) for n in (1, 64) for t in (F16, DType.Q4_0)),
)
def mul_mat_id(p: Program) -> None:
    dtype = _drawn_weight(p)
    k = p.int(1, 3) * dtype.block_size if dtype.block_size > 1 else p.int(1, 70)
    n_experts, n_used, n_tokens = p.int(1, 5), p.int(1, 4), p.extent(6, 40)
    n_used = min(n_used, n_experts)
    ids = [p.random.permutation(n_experts)[:n_used] for _ in range(n_tokens)]
    a = p.leaf(dtype, (k, p.extent(20, 100) + _more_rows(dtype), n_experts), **LOPSIDED)
    b = p.operand(F32, (k, p.one_of(1, n_used), n_tokens), PLAIN, PADDED, **LOPSIDED)
    p.nmse = 1e-6 if dtype is F32 else 1e-3
    p.out("mul_mat_id", a, b, p.leaf(I32, (n_used, n_tokens), ids))


@cases(Op.OUT_PROD, lambda c, t: c.out_prod(main(c, t), f32(c, 8, 4)))
def out_prod(p: Program) -> None:
    dtype = p.one_of(F32, *WEIGHTS)
    n = p.int(1, 2) * dtype.block_size if dtype.block_size > 1 else p.int(1, 40)
    k, m, n2, n3 = p.int(1, 12), p.int(1, 12), p.extra(1, 3), p.extra(1, 2)
    r2, r3 = (p.extra(1, 2), p.extra(1, 2)) if dtype is F32 else (1, 1)
    p.nmse = 1e-6
    a = p.operand(dtype, (n, k, n2, n3), PLAIN, PADDED)
    p.out("out_prod", a, p.operand(F32, (m, k, n2 * r2, n3 * r3), *ANY))


def _sample_flash_attn(c: Context, t: DType) -> Tensor:
    k, v = main(c, t, ROW, 32, 2), main(c, t, ROW, 32, 2)
    return c.flash_attn_ext(f32(c, ROW, 4, 4), k, v, c.new_tensor(F16, (32, 4)), 0.1)


def _timed_attention(kv: int, n: int, dtype: DType) -> Perf:
    def build(c: Context, s: int) -> Tensor:
        k, v = (c.new_tensor(dtype, (128, kv, 2 * s)) for _ in range(2))
        return c.flash_attn_ext(f32(c, 128, n, 8 * s), k, v, c.new_tensor(F16, (kv, n)), 0.1)

    return Perf("flash_attn_ext", f"f32,{dtype.name.lower()};n={n},kv={kv}", build)


# -- attention ---


@cases(
    Op.FLASH_ATTN_EXT,
    _sample_flash_attn,
    *(_timed_attention(kv, n, t) for t in (F16, DType.Q8_0) for kv, n in ((4096, 1), (1024, 512))),
)
def flash_attn_ext(p: Program) -> None:
    dtype = p.one_of(F32, F16, DType.Q8_0, DType.Q4_0, beyond=(BF16,))
    d, dv = 32 * p.int(1, 3), 32 * p.int(1, 2)
    heads_kv, batch, n_kv, n_q = p.int(1, 3), p.extra(1, 2), p.extent(40, 300), p.extent(7, 40)
    heads = heads_kv * p.extra(1, 3)
    q = p.operand(F32, (d, n_q, heads, batch), PLAIN, PADDED, OUTER)
    layouts = (PLAIN, PADDED, *([OUTER] if dtype.block_size == 1 else []))
    k = p.operand(dtype, (d, n_kv, heads_kv, batch), *layouts)
    v = p.operand(dtype, (dv, n_kv, heads_kv, batch), *layouts)
    mask, max_bias = None, 0.0
    if p.bool():
        mask = p.mask(F16, (n_kv, n_q, p.one_of(1, heads), p.one_of(1, batch)))
        max_bias = p.one_of(0.0, 8.0)
    p.nmse = 5e-4
    y = p.step("flash_attn_ext", q, k, v, mask, p.float(0.05, 0.5), max_bias, p.one_of(0.0, 5.0))
    if p.bool():
        p.void("flash_attn_ext_add_sinks", y, p.leaf(F32, (heads,)))
    p.compare(y)


cases(
    Op.FLASH_ATTN_BACK,
    lambda c, t: c.flash_attn_back(
        main(c, t, 32, 4, 2), f32(c, 32, 8, 2), f32(c, 8, 32, 2), f32(c, 32, 4, 2), False
    ),
)


# -- deepseek ---


@cases(
    Op.LIGHTNING_INDEXER,
    lambda c, t: c.lightning_indexer(
        f32(c, 128, 4, 3), main(c, t, 128, 1, 24), f32(c, 4, 3), c.new_tensor(F16, (24, 3))
    ),
)
def lightning_indexer(p: Program) -> None:
    dtype = p.one_of(F32, F16, *WEIGHTS)
    d = p.int(1, 2) * dtype.block_size if dtype.block_size > 1 else p.int(1, 70)
    heads, n_q, n_kv, streams = p.int(1, 5), p.extent(5, 20), p.extent(30, 200), p.int(1, 2)
    p.nmse = 1e-6 if dtype is F32 else 5e-4  # as products
    q = p.operand(F32, (d, heads, n_q, streams), PLAIN, PADDED, **LOPSIDED)
    k = p.operand(dtype, (d, 1, n_kv, streams), PLAIN, PADDED, **LOPSIDED)
    mask = p.leaf(p.one_of(F32, F16), (n_kv, n_q, 1, streams))
    p.out("lightning_indexer", q, k, p.leaf(F32, (heads, n_q, 1, streams)), mask)


@cases(
    Op.DSV4_HC_PRE,
    {
        "dsv4_hc_pre": lambda c, t: c.dsv4_hc_pre(main(c, t, 31, 4, 5), f32(c, 4, 5)),
        "dsv4_hc_pre gated": lambda c, t: c.dsv4_hc_pre_gated(main(c, t, 31, 4, 5), f32(c, 31, 4, 5), 0.25),
    },
)
def dsv4_hc_pre(p: Program) -> None:
    n, hc, tokens, _ = p.ne(70, 5, 6)
    p.nmse = 1e-6
    p.out("dsv4_hc_pre", p.leaf(F32, (n, hc, tokens)), p.leaf(F32, (hc, tokens), low=0.1))


@cases(Op.DSV4_HC_PRE)
def dsv4_hc_pre_gated(p: Program) -> None:
    ne = p.ne(70, 5, 6)[:3]
    p.nmse = 1e-6
    x, gate = (p.operand(F32, ne, PLAIN, PADDED, low=low, high=-low) for low in (-1, -9))
    p.out("dsv4_hc_pre_gated", x, gate, p.float(0.1, 2))


@cases(
    Op.DSV4_HC_POST,
    {
        "dsv4_hc_post": lambda c, t: c.dsv4_hc_post(
            main(c, t, 31, 5), f32(c, 31, 4, 5), f32(c, 4, 5), f32(c, 4, 4, 5)
        ),
        "dsv4_hc_post identity": lambda c, t: c.dsv4_hc_post(
            main(c, t, 31, 5), f32(c, 31, 4, 5), f32(c, 4, 5)
        ),
    },
)
def dsv4_hc_post(p: Program) -> None:
    n, hc, tokens, _ = p.ne(70, 5, 6)
    p.nmse = 1e-6
    streams = p.leaf(F32, (n, hc, tokens))
    p.out(
        "dsv4_hc_post",
        p.leaf(F32, (n, tokens)),
        streams,
        p.leaf(F32, (hc, tokens)),
        *([p.leaf(F32, (hc, hc, tokens))] if p.bool() else []),
    )


@cases(Op.DSV4_HC_COMB, lambda c, t: c.dsv4_hc_comb(main(c, t, 24, 5), f32(c, 3), f32(c, 24), 1e-6, 4))
def dsv4_hc_comb(p: Program) -> None:
    hc, tokens = 4, p.extent(6, 100)
    n = 2 * hc + hc * hc
    p.nmse = 1e-6
    mixes = p.leaf(F32, (n, tokens), low=-3, high=3)
    p.out("dsv4_hc_comb", mixes, p.leaf(F32, (3,), low=0.5), p.leaf(F32, (n,)), 1e-6, p.int(1, 6))
