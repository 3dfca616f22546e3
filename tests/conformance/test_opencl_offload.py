"""Offloading to an OpenCL device: experts whose weights lie in host memory."""

from __future__ import annotations

import numpy as np
import pytest

from ggmlb import BufferUsage, Context, DType, Graph, Scheduler, alloc_ctx_tensors, init_by_name
from ggmlb.core.enums import Op


@pytest.mark.parametrize("dtype", [DType.F32, DType.Q8_0])
def test_experts_in_use_are_copied_and_give_what_the_cpu_gives(
    dtype: DType, monkeypatch: pytest.MonkeyPatch
) -> None:
    n_experts, width = 16, 64
    with init_by_name("OpenCL0") as device, init_by_name("CPU") as cpu:
        monkeypatch.setattr(type(device.device), "offload_op", lambda self, op: op.op is Op.MUL_MAT_ID)
        ctx = Context()
        w = ctx.new_tensor(dtype, (width, width, n_experts), "w")
        random = np.random.default_rng(0)
        with alloc_ctx_tensors(ctx, cpu) as buffer:
            buffer.usage = BufferUsage.WEIGHTS
            w.set_array(random.standard_normal((n_experts, width, width), np.float32))
            results = []
            for backends in ([device, cpu], [cpu]):
                uploaded = []
                whole = type(device)._set_tensor_async

                def note(backend, tensor, data, offset, whole=whole, uploaded=uploaded):
                    uploaded.append((tensor.name, data.size))
                    whole(backend, tensor, data, offset)

                monkeypatch.setattr(type(device), "_set_tensor_async", note)
                c = Context()
                x = c.set_input(c.new_tensor(DType.F32, (width, 2, 4)))
                ids = c.set_input(c.new_tensor(DType.I32, (2, 4)))
                y = c.set_output(c.mul_mat_id(w, x, ids))
                with Scheduler(backends) as sched:
                    sched.alloc_graph(Graph().build_forward_expand(y))
                    assert sched.placement[0].device == backends[0].name
                    for seed in range(3):
                        x.set_array(np.random.default_rng(seed).standard_normal((4, 2, width)))
                        ids.set_array(np.array([[3, 4], [5, 9], [3, 9], [4, 5]]))
                        sched.graph_compute(sched._graph)
                        results.append(y.to_numpy())
                monkeypatch.setattr(type(device), "_set_tensor_async", whole)
                if backends[0] is device:
                    sizes = [n for name, n in uploaded if name.endswith("#w")]
                    assert sizes == [w.nb[2] * 3, w.nb[2]] * 3
        for on_device, on_cpu in zip(results[:3], results[3:], strict=True):
            np.testing.assert_allclose(
                on_device, on_cpu, rtol=2e-2 if dtype is DType.Q8_0 else 1e-4, atol=1e-1
            )
