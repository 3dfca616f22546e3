"""Fused kernels on CUDA give what the nodes give one by one; captured and replayed too."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from fusable import DecodeLayer, RandomGraph

from ggmlb import GraphAllocator
from ggmlb.fusion import Group, fuse
from ggmlb.testing.programs import load_cases

if TYPE_CHECKING:
    from ggmlb import Graph
    from ggmlb.backends.cuda.backend import CudaBackend
    from ggmlb.tensor import Tensor

N_SEEDS, N_RUNS = 12, 3


def patterns(graph: Graph, stream: CudaBackend) -> list[str]:
    return sorted(item.pattern for item in fuse(graph, stream.takes) if isinstance(item, Group))


def fill(graph: Graph, leafs: list[tuple[Tensor, np.ndarray]]) -> None:
    for t in graph:
        if t.view_src is None:
            t.memset(0xFF)  # NaN, whatever is not written
    for t, data in leafs:
        if t.buffer is not None:
            t.set_array(data)


def test_random_graphs(stream: CudaBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    n_fused = 0
    for seed in range(N_SEEDS):
        told = []
        for fused in ("0", "1"):
            monkeypatch.setenv("GGMLB_FUSE", fused)
            drawn = RandomGraph(seed, in_place=True)
            stream.graph_optimize(drawn.graph)
            with GraphAllocator(stream.default_buffer_type) as allocator:
                allocator.alloc_graph(drawn.graph)
                for _ in range(N_RUNS):
                    fill(drawn.graph, drawn.leafs)
                    stream.graph_compute(drawn.graph)
                told.append({i: t.to_numpy() for i, t in enumerate(drawn.nodes) if t in drawn.outputs})
            n_fused += len(patterns(drawn.graph, stream))
        plain, fused_ = told
        assert plain
        for i, want in plain.items():
            assert np.isfinite(want).all(), (seed, i)
            atol = 1e-4 * float(np.abs(want).max())  # products may round in another order
            np.testing.assert_allclose(fused_[i], want, rtol=1e-4, atol=atol, err_msg=f"{seed=}, node {i}")
    assert n_fused >= N_SEEDS // 2


@pytest.mark.parametrize("n", [1, 12])
def test_a_llama_like_layer(stream: CudaBackend, n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for fused in ("0", "1"):
        monkeypatch.setenv("GGMLB_FUSE", fused)
        layer = DecodeLayer(n)
        stream.graph_optimize(layer.graph)
        with GraphAllocator(stream.default_buffer_type) as allocator:
            allocator.alloc_graph(layer.graph)
            for _ in range(N_RUNS):
                for t, data in layer.leafs:
                    t.set_array(data)
                stream.graph_compute(layer.graph)
            results.append(layer.result.to_numpy())
            found = patterns(layer.graph, stream)
    assert {"norm", "rope_set_rows"} <= set(found)
    assert "glu" not in found, "CUDA's own products are faster than the portable one with what follows"
    np.testing.assert_allclose(*results, rtol=1e-3, atol=1e-4)


def test_golden_programs(stream: CudaBackend) -> None:
    """Those with something to fuse, in memory that an allocator placed."""
    n_cases = 0
    for case in load_cases(Path(__file__).parents[1] / "golden/programs"):
        built = case.build()
        for name, t in built.tensors.items():
            if name in {spec.name for spec in case.outputs}:
                built.ctx.set_output(t)
        if not patterns(built.graph, stream) or not all(map(stream.supports_op, built.graph.nodes)):
            continue
        with GraphAllocator(stream.default_buffer_type) as allocator:
            allocator.alloc_graph(built.graph)
            for _ in range(N_RUNS):
                fill(built.graph, [])
                built.upload()
                stream.graph_compute(built.graph)
                wrong = {name: v.reason for name, v in built.compare().items() if not v.ok}
                assert not wrong, case.id
        n_cases += 1
    assert n_cases > 3
