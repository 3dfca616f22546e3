"""CPU_F32, the extra buffer type that dequantises at upload."""

from __future__ import annotations

from contextlib import contextmanager

import numpy as np
import pytest

import ggmlb
from ggmlb import BufferUsage, Context, DType, Graph, Scheduler, Tensor
from ggmlb.core.dtypes import dequantize, quantize
from ggmlb.core.errors import BackendError, ShapeError, UnsupportedOpError

K, M, N = 256, 48, 5


@pytest.fixture
def buft(cpu):
    (found,) = cpu.device.reg.get_proc_address("ggml_backend_dev_get_extra_bufts")(cpu.device)
    return found


@contextmanager
def weight(buft, dtype: DType, *ne: int):
    ctx = Context()
    tensor = ctx.new_tensor(dtype, ne, name="w")
    with ggmlb.alloc_ctx_tensors(ctx, buft) as buffer:
        buffer.usage = BufferUsage.WEIGHTS
        yield tensor


def blocks_of(dtype: DType, *shape: int) -> np.ndarray:
    return quantize(np.random.default_rng(0).standard_normal(shape).astype(np.float32), dtype)


def compute(cpu, y: Tensor, inputs: dict[Tensor, np.ndarray]) -> np.ndarray:
    graph = Graph().build_forward_expand(y)
    with Scheduler([cpu]) as sched:
        sched.alloc_graph(graph)
        for tensor, values in inputs.items():
            tensor.set_array(values)
        sched.graph_compute(graph)
        return y.to_numpy()


def test_what_it_cannot_do_is_said(cpu, buft):
    with weight(buft, DType.Q4_0, K, M) as w:
        w.set(blocks_of(DType.Q4_0, M, K))
        with pytest.raises(BackendError, match="keep the weight in CPU memory"):
            w.get()
        with pytest.raises(BackendError, match="whole rows"):
            w.set(b"\0" * 18, offset=18)
        ctx = Context()
        with pytest.raises(ShapeError, match="no views of them"):
            w.buffer.init_tensor(ctx.view_1d(w, K, 144))
        graph = Graph().build_forward_expand(ctx.cpy(w, ctx.new_tensor(DType.F32, (K, M))))
        with (
            Scheduler([cpu]) as sched,
            pytest.raises(UnsupportedOpError, match="CPU_F32 memory, which only products"),
        ):
            sched.alloc_graph(graph)
            sched.graph_compute(graph)


def test_a_view_is_read_only_where_it_is_the_whole_weight(cpu, buft):
    values = np.random.default_rng(0).standard_normal((M, K), np.float32)
    with weight(buft, DType.F32, K, M) as w:
        w.set_array(values)
        ctx = Context()
        a, b = (ctx.set_input(ctx.new_tensor(DType.F32, (k, N))) for k in (K, K // 2))
        x = np.ones((N, K), np.float32)
        y = compute(cpu, ctx.mul_mat(ctx.reshape_2d(w, K, M), a), {a: x})
        np.testing.assert_allclose(y, x @ values.T, rtol=1e-4, atol=1e-4)
        with pytest.raises(UnsupportedOpError, match="pass the whole weight to the product"):
            compute(cpu, ctx.mul_mat(ctx.reshape_2d(w, K // 2, 2 * M), b), {b: x[:, : K // 2]})


def test_a_view_that_was_made_before_its_weight_was_placed_is_refused_too(cpu, buft):
    leafs, ctx = Context(), Context()
    w, x = leafs.new_tensor("f32", (K, M)), ctx.set_input(ctx.new_tensor("f32", (K, N)))
    y = ctx.mul_mat(ctx.view_2d(w, K, M // 2, w.nb[1], 0), x)
    graph = Graph().build_forward_expand(y)
    refused = pytest.raises(UnsupportedOpError, match="pass the whole weight to the product")
    with ggmlb.alloc_ctx_tensors(leafs, buft), Scheduler([cpu]) as scheduler, refused:
        scheduler.alloc_graph(graph)


def test_out_prod_reads_a_weight(cpu, buft):
    blocks, g = blocks_of(DType.Q4_0, M, K), np.random.default_rng(3).standard_normal((N, M), np.float32)
    with weight(buft, DType.Q4_0, K, M) as w:
        w.set(blocks)
        ctx = Context()
        grad = ctx.set_input(ctx.new_tensor("f32", (M, N)))
        y = ctx.set_output(ctx.out_prod(w, ctx.transpose(grad)))
        found = compute(cpu, y, {grad: g})
    np.testing.assert_allclose(found, g @ dequantize(blocks, DType.Q4_0), rtol=1e-4, atol=1e-4)


def test_zero_memory_gives_zero_weights(cpu, buft):
    with weight(buft, DType.Q4_0, K, M) as w:
        w.buffer.clear(0)
        ctx = Context()
        a = ctx.set_input(ctx.new_tensor(DType.F32, (K, N)))
        y = compute(cpu, ctx.mul_mat(w, a), {a: np.ones((N, K), np.float32)})
    assert not y.any()
