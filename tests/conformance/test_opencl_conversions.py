"""Quantising on OpenCL from every plain float type: the CPU's bytes."""

from __future__ import annotations

import numpy as np
import pytest

from ggmlb import Context, DType, Graph, alloc_ctx_tensors, device_by_name, init_by_name
from ggmlb.interface import Backend


def written(backend: Backend, src: DType, dst: DType) -> np.ndarray:
    ctx = Context()
    a, d = ctx.new_tensor(src, (96, 5)), ctx.new_tensor(dst, (96, 5))
    y = ctx.cpy(a, d)
    with alloc_ctx_tensors(ctx, backend):
        a.set_array(np.random.default_rng(0).standard_normal((5, 96), np.float32))
        backend.graph_compute(Graph().build_forward_expand(y))
        return d.get()


@pytest.mark.parametrize("split", ["cpu", "gpu"])
@pytest.mark.parametrize("dst", [DType.Q8_0, DType.Q5_1])
@pytest.mark.parametrize("src", [DType.F16, DType.BF16])
def test_copies_quantise_halves(split: str, src: DType, dst: DType) -> None:
    with device_by_name("OpenCL0").init_backend({"work_split": split}) as stream, init_by_name("CPU") as cpu:
        assert np.array_equal(written(stream, src, dst), written(cpu, src, dst))
