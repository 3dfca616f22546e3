"""Graphs split between CUDA and the CPU, and over streams of one card."""

from __future__ import annotations

import numpy as np

import ggmlb
from ggmlb import Context, DType, Graph, Scheduler, alloc_ctx_tensors
from ggmlb.backends.cuda.backend import CudaBackend
from ggmlb.core.enums import BufferUsage
from tests.support.gpus import CUDA, device_fixture

device = device_fixture(*CUDA)


def test_a_network_split_between_card_and_cpu(stream: CudaBackend) -> None:
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((128, 128), np.float32) for _ in range(6)]
    with ggmlb.init_by_name("CPU") as cpu, Scheduler([stream, cpu]) as sched:
        weights = []
        for i, data in enumerate(arrays):
            ctx = Context()
            w = ctx.new_tensor(DType.F32, (128, 128), f"w{i}")
            alloc_ctx_tensors(ctx, (stream, cpu)[i % 2]).usage = BufferUsage.WEIGHTS
            w.set_array(data)
            weights.append(w)
        ctx = Context()
        x = ctx.set_input(ctx.new_tensor(DType.F32, (128, 16)))
        y = x
        for w in weights:
            y = ctx.tanh(ctx.mul_mat(w, y))
        graph = Graph().build_forward_expand(ctx.set_output(y))
        sched.alloc_graph(graph)
        assert sched.n_splits == 6
        for i in range(4):
            data = rng.standard_normal((16, 128), np.float32) * (i + 1) / 8
            x.set_array(data)
            sched.graph_compute(graph)
            want = data.astype(np.float64)
            for w in arrays:
                want = np.tanh(want @ w.T)
            assert np.abs(y.to_numpy() - want).max() < 2e-3


def test_a_pipeline_over_two_streams(stream: CudaBackend, other: CudaBackend) -> None:
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((256, 256), np.float32) / 16 for _ in range(2)]
    with ggmlb.init_by_name("CPU") as cpu, Scheduler([stream, other, cpu], parallel=True) as sched:
        ctx = Context()
        weights = [ctx.new_tensor(DType.F32, (256, 256)) for _ in arrays]
        alloc_ctx_tensors(ctx, stream).usage = BufferUsage.WEIGHTS
        for w, data in zip(weights, arrays, strict=True):
            w.set_array(data)
        ctx = Context()
        x = ctx.set_input(ctx.new_tensor(DType.F32, (256, 8)))
        h = ctx.relu(ctx.mul_mat(weights[0], x))
        y = ctx.set_output(ctx.mul_mat(weights[1], h))
        graph = Graph().build_forward_expand(y)
        sched.set_tensor_backend(h, stream)
        sched.set_tensor_backend(y, other)
        for i in range(10):
            data = np.full((8, 256), i, np.float32)
            sched.reset() if i == 0 else None
            sched.alloc_graph(graph)
            x.set_array(data)
            sched.graph_compute_async(graph)
            sched.synchronize()
            want = np.maximum(data @ arrays[0].T, 0) @ arrays[1].T
            assert np.allclose(y.to_numpy(), want, rtol=1e-3, atol=1e-3)
