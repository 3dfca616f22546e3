"""Attention with heads over 256, as DeepSeek's latent ones: values are the first part of the keys."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ggmlb import Context, DType, Graph, alloc_ctx_tensors
from tests.support.gpus import CUDA, device_fixture, first

cuda = device_fixture(*CUDA)


def check(stream: Any, dtype: DType, n_q: int) -> None:
    """Compare with NumPy in f64; one KV head for all heads, and a causal mask."""
    d_k, d_v, n_kv, heads = 576, 512, 70, 5
    rng = np.random.default_rng(n_q)
    ctx = Context()
    q, k = ctx.new_tensor(DType.F32, (d_k, n_q, heads)), ctx.new_tensor(dtype, (d_k, n_kv, 1))
    v = ctx.view_3d(k, d_v, n_kv, 1, k.nb[1], k.nb[2], 0)
    mask = ctx.new_tensor(DType.F16, (n_kv, n_q))
    y = ctx.flash_attn_ext(q, k, v, mask, d_k**-0.5)
    seen = np.arange(n_kv) <= np.arange(n_q)[:, None] + n_kv - n_q
    with alloc_ctx_tensors(ctx, stream):
        for t in (q, k):
            t.set_array(rng.standard_normal(t.shape, np.float32))
        mask.set_array(np.where(seen, 0, -np.inf))
        stream.graph_compute(Graph().build_forward_expand(y))
        keys = k.to_numpy().astype("f8").reshape(n_kv, d_k)
        scores = np.where(seen, q.to_numpy().astype("f8") @ keys.T * d_k**-0.5, -np.inf)
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        want = (scores / scores.sum(-1, keepdims=True) @ keys[:, :d_v]).swapaxes(0, 1)
        got = y.to_numpy().reshape(want.shape)
    assert np.linalg.norm(got - want) < 1e-2 * np.linalg.norm(want)


@pytest.mark.parametrize(
    ("work_split", "dtype", "n_q"), [("gpu", DType.BF16, 1), ("cpu", DType.BF16, 9), ("cpu", DType.Q8_0, 1)]
)
def test_large_heads_on_opencl(work_split: str, dtype: DType, n_q: int) -> None:
    with first("OpenCL0").init_backend({"work_split": work_split}) as stream:
        check(stream, dtype, n_q)


@pytest.mark.parametrize("n_q", [1, 9])
@pytest.mark.parametrize("dtype", [DType.F16, DType.BF16, DType.Q8_0], ids=str)
def test_large_heads_on_cuda(cuda: Any, dtype: DType, n_q: int) -> None:
    with cuda.init_backend() as stream:
        check(stream, dtype, n_q)
