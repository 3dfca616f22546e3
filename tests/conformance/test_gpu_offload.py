"""Weights in host memory, uploaded by a second stream while the device computes the products before."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ggmlb import BufferUsage, Context, DType, Graph, Scheduler, alloc_ctx_tensors, init_by_name
from ggmlb.core.enums import Op
from tests.support.gpus import CUDA, OPENCL, device_fixture

device = device_fixture(OPENCL, *CUDA)


@pytest.mark.parametrize("memory", ["pinned", "pageable"])
@pytest.mark.parametrize("dtype", [DType.F16, DType.Q4_0], ids=str)
def test_weights_are_uploaded_ahead(
    device: Any, dtype: DType, memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    width, n_layers = 512, 5
    monkeypatch.setattr(type(device), "offload_op", lambda self, op: op.op is Op.MUL_MAT)
    random = np.random.default_rng(0)
    with device.init_backend() as stream, init_by_name("CPU") as cpu:
        ctx = Context()
        weights = [ctx.new_tensor(dtype, (width, width), f"w{i}") for i in range(n_layers)]
        home = cpu.default_buffer_type if memory == "pageable" else device.host_buffer_type
        with alloc_ctx_tensors(ctx, home) as buffer:
            buffer.usage = BufferUsage.WEIGHTS
            for w in weights:
                w.set_array(random.standard_normal((width, width), np.float32) / width**0.5)
            c = Context()
            x = y = c.set_input(c.new_tensor(DType.F32, (width, 40)))
            for w in weights:
                y = c.add(c.mul_mat(w, y), y)
            c.set_output(y)
            with Scheduler([stream, cpu], sanitize=True) as sched:
                sched.alloc_graph(Graph().build_forward_expand(y))
                ahead = [[item.tensor.name for item in split.next_weights] for split in sched.splits]
                assert ahead == [*([f"w{i}"] for i in range(1, n_layers)), []]
                for _ in range(3):
                    data = random.standard_normal((40, width), np.float32)
                    x.set(data)
                    sched.graph_compute(sched.graph)
                    for w in weights:
                        data = data + data @ w.to_numpy().T
                    error = np.linalg.norm(y.to_numpy() - data) / np.linalg.norm(data)
                    assert error < 1e-2
