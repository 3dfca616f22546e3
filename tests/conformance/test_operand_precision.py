"""`prec_set_src`: a product whose operand may not be quantised is computed as exactly as float32 does."""

from __future__ import annotations

import numpy as np
import pytest

from ggmlb import Backend, Context, Device, DType, Graph, Prec, Scheduler, quantize
from tests.support.gpus import CUDA, LLVM, OPENCL, device_fixture

device = device_fixture(LLVM, OPENCL, *CUDA)


@pytest.mark.parametrize("n", [1, 3, 40])
@pytest.mark.parametrize("experts", [False, True], ids=["one", "experts"])
def test_an_operand_that_may_not_be_quantised_is_not(
    device: Device, cpu: Backend, n: int, experts: bool
) -> None:
    rng = np.random.default_rng(1)
    ctx = Context()
    w = ctx.new_tensor(DType.Q4_0, (256, 32, 4 if experts else 1))
    x = ctx.new_tensor(DType.F32, (256, 1, n) if experts else (256, n))
    ids = ctx.new_tensor(DType.I32, (1, n))
    bias = ctx.new_tensor(DType.F32, (32,))
    product = ctx.mul_mat_id(w, x, ids) if experts else ctx.mul_mat(w, x)
    for prec, bound in ((Prec.F32, 1e-4), (Prec.F16, 0.05), (Prec.Q8, 1.0)):
        assert ctx.prec_set_src(product, prec, 1) is product
        y = ctx.add(product, bias)  # that a product which is computed alone is not fused with
        with device.init_backend() as stream, Scheduler([stream, cpu]) as s:
            s.alloc_graph(graph := Graph().build_forward_expand(y))
            for t in (w, x, bias):
                t.set(quantize(rng.standard_normal(t.shape, np.float32), t.dtype))
            chosen = rng.integers(0, w.ne[2], ids.shape, np.int32)
            if experts:
                ids.set(chosen)
            weights, values, added = (t.to_numpy().astype("f8") for t in (w, x, bias))
            s.graph_compute(graph)
            exact = (
                np.einsum("tuk,tunk->tun", values.reshape(n, 1, 256), weights[chosen.reshape(n, 1)])
                if experts
                else values @ weights.T
            )
            error = np.abs(y.to_numpy() - exact - added).max()
        assert error < bound
