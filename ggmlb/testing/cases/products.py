"""Products of matrices and attention."""

from __future__ import annotations

from ggmlb.core import dtypes
from ggmlb.core.dtypes import DType
from ggmlb.testing.cases.draw import (
    ANY,
    BF16,
    F16,
    F32,
    I32,
    LOPSIDED,
    OUTER,
    PADDED,
    PLAIN,
    ROWS,
    Program,
    family,
)

NO_WEIGHTS = (DType.Q8_1, DType.Q8_K, DType.Q2_0)
"""ggml quantises activations to the first two; the last is newer than the ggml of ggml-python."""
WEIGHTS = tuple(t for t in DType if t.is_quantized and dtypes.can_quantize(t) and t not in NO_WEIGHTS)
"""Quantised types whose blocks can be made here, and which ggml multiplies."""

READ_ONLY = tuple(t for t in DType if t.is_quantized and not dtypes.can_quantize(t))
"""Quantised types whose blocks are made elsewhere, with the help of a model's statistics."""


def _weight(p: Program) -> DType:
    dtype: DType = p.one_of(F32, F16, BF16, *WEIGHTS, beyond=READ_ONLY)
    return dtype


@family("mul_mat")
def mul_mat(p: Program) -> None:
    dtype = _weight(p)
    k = p.extent(3, 9) * dtype.block_size if dtype.block_size > 1 else p.extent(70, 700)
    n2, n3 = p.extra(1, 3), p.extra(1, 2)
    layouts = ROWS if dtype.block_size == 1 else (PLAIN, PADDED)
    m, n = p.extent(20, 200), p.extent(12, 80)
    a = p.operand(dtype, (k, m, n2, n3), *layouts, beyond=ROWS, **LOPSIDED)
    b = p.operand(
        p.one_of(F32, beyond=(F16,)), (k, n, n2 * p.extra(1, 3), n3 * p.extra(1, 2)), *layouts, **LOPSIDED
    )
    p.nmse = 1e-6 if dtype is F32 else 1e-3
    p.out("mul_mat", a, b)


@family("mul_mat_id")
def mul_mat_id(p: Program) -> None:
    dtype = _weight(p)
    k = p.int(1, 3) * dtype.block_size if dtype.block_size > 1 else p.int(1, 70)
    n_experts, n_used, n_tokens = p.int(1, 5), p.int(1, 4), p.extent(6, 40)
    n_used = min(n_used, n_experts)
    ids = [p.random.permutation(n_experts)[:n_used] for _ in range(n_tokens)]
    a = p.leaf(dtype, (k, p.extent(20, 100), n_experts), **LOPSIDED)
    b = p.operand(F32, (k, p.one_of(1, n_used), n_tokens), PLAIN, PADDED, **LOPSIDED)
    p.nmse = 1e-6 if dtype is F32 else 1e-3
    p.out("mul_mat_id", a, b, p.leaf(I32, (n_used, n_tokens), ids))


@family("out_prod")
def out_prod(p: Program) -> None:
    dtype = p.one_of(F32, *WEIGHTS)
    n = p.int(1, 2) * dtype.block_size if dtype.block_size > 1 else p.int(1, 40)
    k, m, n2, n3 = p.int(1, 12), p.int(1, 12), p.extra(1, 3), p.extra(1, 2)
    r2, r3 = (p.extra(1, 2), p.extra(1, 2)) if dtype is F32 else (1, 1)
    p.nmse = 1e-6
    a = p.operand(dtype, (n, k, n2, n3), PLAIN, PADDED)
    p.out("out_prod", a, p.operand(F32, (m, k, n2 * r2, n3 * r3), *ANY))


@family("flash_attn_ext")
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
