"""Kernels whose groups have stretches of rows, or several heads, where there is work for all processors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ggmlb import Context, DType, Graph, alloc_ctx_tensors, init_by_name
from ggmlb.backends.cuda.backend import CudaBackend
from ggmlb.core.tensor import Tensor
from tests.support.gpus import CUDA, device_fixture

device = device_fixture(*CUDA)


def beside_cpu(stream: CudaBackend, build: Callable[[Context], Tensor]) -> list[dict[str, str]]:
    """Compute the same on both, and return the macros of the kernels."""
    results: list[Any] = []
    macros: list[dict[str, str]] = []
    with init_by_name("CPU") as cpu:
        for backend in (stream, cpu):
            rng = np.random.default_rng(0)
            ctx = Context()
            y = build(ctx)
            graph = Graph().build_forward_expand(y)
            with alloc_ctx_tensors(ctx, backend):
                for t in graph.leafs:
                    if t.dtype is DType.I32:
                        t.set_array(rng.integers(0, 1000, t.shape, np.int32))
                    else:
                        t.set_array(rng.standard_normal(t.shape, np.float32))
                plan: Any = backend.graph_plan_create(graph)
                if backend is stream:
                    keys = [step.key for part in plan.parts for step in part.steps]
                    macros = [dict(defines) for _, defines, _ in keys]
                backend.graph_plan_compute(plan)
                backend.synchronize()
                results.append(y.to_numpy())
    np.testing.assert_allclose(results[0], results[1], rtol=1e-4, atol=1e-4)
    return macros


@pytest.mark.parametrize(
    ("ne", "per"),
    [((5000,), "8"), ((700,), "4"), ((2049, 3, 2), "8"), ((130, 3), "4"), ((2, 3), None), ((1500, 4), "8")],
    ids=str,
)
@pytest.mark.parametrize("what", ["map", "combine", "row", "glu", "copy", "to half", "in place", "permuted"])
def test_elements(stream: CudaBackend, ne: tuple[int, ...], per: str | None, what: str) -> None:
    def build(c: Context) -> Tensor:
        x = c.new_tensor(DType.F32, ne)
        return {
            "map": lambda: c.silu(x),
            "combine": lambda: c.sub(x, c.new_tensor(DType.F32, ne)),
            "row": lambda: c.mul(x, c.new_tensor(DType.F32, ne[:1])),
            "glu": lambda: c.swiglu_split(x, c.new_tensor(DType.F32, ne)),
            "copy": lambda: c.dup(x),
            "to half": lambda: c.cast(x, DType.F16),
            "in place": lambda: c.scale_inplace(x, 3.0),
            "permuted": lambda: c.cont(c.permute(c.new_tensor(DType.F32, (3, ne[0], 2)), 1, 0, 2, 3)),
        }[what]()

    macros = beside_cpu(stream, build)
    if stream.device.target.n_units == 2 and what not in ("row", "permuted") and per is not None:
        assert macros[-1].get("PER_LANE") == per


@pytest.mark.parametrize(
    ("n_dims", "heads", "tokens"), [(64, 6, 3), (64, 8, 70), (20, 7, 5), (128, 3, 2), (512, 2, 2)]
)
@pytest.mark.parametrize("mode", [0, 2])
def test_heads_that_share_a_groups_angles(
    stream: CudaBackend, n_dims: int, heads: int, tokens: int, mode: int
) -> None:
    def build(c: Context) -> Tensor:
        x = c.new_tensor(DType.F32, (n_dims + 8, heads, tokens))
        return c.rope(x, c.new_tensor(DType.I32, (tokens,)), n_dims, mode)

    beside_cpu(stream, build)
