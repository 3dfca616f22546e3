"""CUDA's own kernels and cuBLAS on a card, in a model's sizes, beside the CPU backend."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from ggmlb import Context, DType, Graph, alloc_ctx_tensors, init_by_name
from ggmlb.backends.cuda.kernels.products import IN_SUB_BLOCKS
from ggmlb.core.dtypes import can_quantize, random_blocks
from ggmlb.core.tensor import Tensor
from ggmlb.interface import Backend

Fill = dict[str, "np.ndarray[tuple[int, ...], np.dtype[np.generic]]"]


def check(stream: Backend, build: Callable[[Context], Tensor], fill: Fill | None = None) -> None:
    """Compute the same on both; leafs are random but for those that `fill` names."""
    results = []
    with init_by_name("CPU") as cpu:
        for backend in (stream, cpu):
            ctx = Context()
            y = build(ctx)
            graph = Graph().build_forward_expand(y)
            rng = np.random.default_rng(7)
            with alloc_ctx_tensors(ctx, backend):
                for t in graph.leafs:
                    data = (fill or {}).get(t.name)
                    if data is None and not can_quantize(t.dtype):
                        t.set(random_blocks(t.dtype, t.n_elements))
                    else:
                        t.set_array(rng.standard_normal(t.shape, np.float32) if data is None else data)
                for _ in range(3):  # the second run captures a graph, the third replays it
                    backend.graph_compute(graph)
                results.append(y.to_numpy().astype(np.float64))
    got, want = results
    assert np.isfinite(got).all()
    assert ((got - want) ** 2).sum() < 5e-4 * (want**2).sum()


@pytest.mark.parametrize("n", [1, 3, 8, 9, 33, 64])
@pytest.mark.parametrize("dtype", sorted(IN_SUB_BLOCKS), ids=str)
def test_quantised_products(stream: Backend, dtype: DType, n: int) -> None:
    check(stream, lambda c: c.mul_mat(c.new_tensor(dtype, (4096, 259)), c.new_tensor(DType.F32, (4096, n))))


@pytest.mark.parametrize("dtype", [DType.Q8_0, DType.Q4_K, DType.Q6_K], ids=str)
def test_quantised_products_in_large_tiles(stream: Backend, dtype: DType) -> None:
    """Of as many rows that there is a block for each multiprocessor."""
    check(stream, lambda c: c.mul_mat(c.new_tensor(dtype, (512, 30003)), c.new_tensor(DType.F32, (512, 64))))


@pytest.mark.parametrize("n", [1, 5, 8, 100])
@pytest.mark.parametrize("dtype", [DType.F32, DType.F16, DType.BF16], ids=str)
def test_products_of_floats(stream: Backend, dtype: DType, n: int) -> None:
    check(
        stream,
        lambda c: c.mul_mat(c.new_tensor(dtype, (2048, 259, 2)), c.new_tensor(DType.F32, (2048, n, 4))),
    )


@pytest.mark.parametrize("dtype", [DType.Q4_0, DType.Q6_K, DType.IQ3_S, DType.F16], ids=str)
def test_experts(stream: Backend, dtype: DType) -> None:
    chosen = np.array([[3, 0], [7, 3], [5, 5]], np.int32)

    def build(c: Context) -> Tensor:
        ids = c.new_tensor(DType.I32, (2, 3), "ids")
        return c.mul_mat_id(c.new_tensor(dtype, (1024, 70, 8)), c.new_tensor(DType.F32, (1024, 1, 3)), ids)

    check(stream, build, {"ids": chosen})


@pytest.mark.parametrize("kv", [DType.F16, DType.BF16, DType.Q8_0], ids=str)
@pytest.mark.parametrize("head", [64, 80, 128, 256, 576])
@pytest.mark.parametrize("n_q", [1, 2, 200])
def test_attention(stream: Backend, n_q: int, head: int, kv: DType) -> None:
    if head % kv.block_size:
        pytest.skip("rows are whole blocks")
    n_kv = 1100
    seen = np.arange(n_kv) <= np.arange(n_q)[:, None] + n_kv - n_q

    def build(c: Context) -> Tensor:
        q = c.new_tensor(DType.F32, (head, n_q, 8))
        k, v = (c.new_tensor(kv, (head, n_kv, 2)) for _ in "kv")
        mask = c.new_tensor(DType.F16, (n_kv, n_q), "mask")
        return c.flash_attn_ext(q, k, v, mask, head**-0.5)

    check(stream, build, {"mask": np.where(seen, 0.0, -np.inf).astype(np.float32)})
