"""A product with quantised weights never holds the whole float32 matrix."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

import ggmlb
from ggmlb import BufferUsage, Context, DType, Graph, Scheduler
from ggmlb.core.dtypes import dequantize

K, M, N = 14336, 4096, 8


@pytest.mark.parametrize("dtype", [DType.Q4_0, DType.F16])
def test_a_large_product_takes_less_than_64_mib_besides_its_tensors(dtype):
    ctx = Context()
    w = ctx.new_tensor(dtype, (K, M))
    with ggmlb.init_by_name("CPU") as cpu, ggmlb.alloc_ctx_tensors(ctx, cpu) as buffer:
        buffer.usage = BufferUsage.WEIGHTS
        pattern = np.random.default_rng(0).integers(0, 64, (64, dtype.row_size(K)), np.uint8)
        w.set(np.tile(pattern, (M // 64, 1)))
        graph_ctx = Context()
        x = graph_ctx.set_input(graph_ctx.new_tensor(DType.F32, (K, N)))
        y = graph_ctx.mul_mat(w, x)
        graph = Graph().build_forward_expand(y)
        with Scheduler([cpu]) as sched:
            sched.alloc_graph(graph)
            values = np.random.default_rng(1).standard_normal((N, K), np.float32)
            x.set_array(values)
            tracemalloc.start()
            try:
                sched.graph_compute(graph)
                _, peak = tracemalloc.get_traced_memory()
            finally:
                tracemalloc.stop()
            assert peak <= 64 << 20, f"{peak / 2**20:.1f} MiB"
            expected = values @ dequantize(pattern, dtype).reshape(64, K).T
            got = y.to_numpy()
    np.testing.assert_allclose(got[:, :64], expected, rtol=1e-4, atol=1e-3 * np.abs(expected).max())
    np.testing.assert_array_equal(got[:, 64:128], got[:, :64])
