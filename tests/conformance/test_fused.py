"""Fused kernels give what the nodes give one by one, and leave nothing out that anybody sees.

Each graph is computed some times over: on CUDA by steps, captured, and replayed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from ggmlb import Context, DType, Graph, GraphAllocator, Scheduler, alloc_ctx_tensors, init_by_name
from ggmlb.backends.common.fusion import Group, fuse
from ggmlb.backends.cuda.kernels.products import GLU_COLUMNS
from ggmlb.core.enums import NO_OPS
from ggmlb.core.tensor import Tensor
from tests.support.fusable import DecodeLayer, RandomGraph
from tests.support.golden import CASES
from tests.support.gpus import CARD, LLVM, PLAYED, first

Found = tuple[dict[int, np.ndarray], int]
"""Results by number, and the number of fused groups."""

Way = Callable[[RandomGraph, Any], Found]

N_RUNS = 3

ROWS_PER_CORE = pytest.param("cpu", id="rows per core")
GROUPS_PER_ROW = pytest.param("gpu", id="groups per row")


PARAMS = {"cpu": {"work_split": "cpu"}, "gpu": {"work_split": "gpu"}, "LLVM": {"n_threads": 3}}


@pytest.fixture(params=[ROWS_PER_CORE, GROUPS_PER_ROW, LLVM, PLAYED, CARD])
def stream(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Of OpenCL with each work split, of LLVM, and of CUDA."""
    device = first("OpenCL0" if request.param in ("cpu", "gpu") else request.param)
    with device.init_backend(PARAMS.get(request.param)) as backend:
        yield backend


def is_cuda(stream: Any) -> bool:
    return bool(stream.device.reg.name == "CUDA")


def has_top_k(stream: Any) -> bool:
    return bool(stream.device.reg.name != "LLVM")


def patterns(graph: Graph, stream: Any) -> list[str]:
    return sorted(item.pattern for item in fuse(graph, stream.can_fuse) if isinstance(item, Group))


def in_memory_of_an_allocator(drawn: RandomGraph, stream: Any) -> Found:
    stream.graph_optimize(drawn.graph)
    with GraphAllocator(stream.default_buffer_type) as allocator:
        allocator.alloc_graph(drawn.graph)
        for _ in range(N_RUNS):
            fill(drawn.graph, drawn.leafs)
            stream.graph_compute(drawn.graph)
        return values(drawn, drawn.outputs, stream)


def in_memory_of_a_user(drawn: RandomGraph, stream: Any) -> Found:
    with alloc_ctx_tensors(drawn.ctx, stream):
        fill(drawn.graph, drawn.leafs)
        stream.graph_compute(drawn.graph)
        return values(drawn, drawn.nodes, stream)


def part_by_part(drawn: RandomGraph, stream: Any) -> Found:
    with GraphAllocator(stream.default_buffer_type) as allocator:
        allocator.alloc_graph(drawn.graph)
        fill(drawn.graph, drawn.leafs)
        cut = len(drawn.graph) // 2
        for part in (drawn.graph.view(0, cut), drawn.graph.view(cut, len(drawn.graph))):
            stream.graph_compute(part)
        return values(drawn, drawn.outputs, stream)


def by_a_scheduler(drawn: RandomGraph, stream: Any) -> Found:
    """Every third node, about, is computed elsewhere; every third is watched."""
    choice = random.Random(len(drawn.graph))
    seen: dict[int, np.ndarray] = {}
    numbers = {node: i for i, node in enumerate(drawn.graph.nodes)}
    watched = {node for node in drawn.graph.nodes if choice.random() < 0.3}

    def watch(node: Tensor, ask: bool) -> bool:
        if not ask:
            seen[-1 - numbers[node]] = node.to_numpy()
        return not ask or node in watched

    with init_by_name("CPU") as cpu, Scheduler([stream, cpu]) as scheduler:
        for node in drawn.graph.nodes:
            if node.op not in NO_OPS and node.view_src is None:
                scheduler.set_tensor_backend(node, cpu if choice.random() < 0.3 else stream)
        scheduler.alloc_graph(drawn.graph)
        fill(drawn.graph, drawn.leafs)
        scheduler.graph_compute(drawn.graph)
        results, n_groups = values(drawn, drawn.outputs, stream)
        fill(drawn.graph, drawn.leafs)
        scheduler.set_eval_callback(watch)
        scheduler.graph_compute(drawn.graph)
    assert len(seen) == len(watched)
    return results | seen, n_groups


N_FUSED = {in_memory_of_an_allocator: 1.0, in_memory_of_a_user: 0.25, part_by_part: 1.0, by_a_scheduler: 1.0}
"""The ways to compute a random graph, and how many groups are fused in one, at least, on an average."""


def fill(graph: Graph, leafs: list[tuple[Tensor, np.ndarray]]) -> None:
    for t in graph:
        if t.view_src is None:
            t.memset(0xFF)  # NaN, whatever is not written
    for t, data in leafs:
        if t.buffer is not None:
            t.set_array(data)


def values(drawn: RandomGraph, chosen: Sequence[Tensor], stream: Any) -> Found:
    found = {i: t.to_numpy() for i, t in enumerate(drawn.nodes) if t in chosen}
    return found, len(patterns(drawn.graph, stream))


@pytest.mark.parametrize("way", N_FUSED)
def test_random_graphs(stream: Any, way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    n_fused, n_graphs, least, tolerance = 0, 40, N_FUSED[way], 1e-5
    if is_cuda(stream):  # its own products are fused less often, and round in another order
        n_graphs, least, tolerance = 20, least / 2, 1e-4
    for seed in range(n_graphs):
        told = []
        for fused in ("0", "1"):
            monkeypatch.setenv("GGMLB_FUSE", fused)
            drawn = RandomGraph(seed, in_place=way is not by_a_scheduler, experts=has_top_k(stream))
            found, n = way(drawn, stream)
            told.append(found)
            n_fused += n
        plain, fused_ = told
        assert plain.keys() == fused_.keys()
        assert plain
        for i, want in plain.items():
            assert np.isfinite(want).all(), (seed, i)
            # One rounding more or less, of values that products made large.
            atol = tolerance * float(np.abs(want).max())
            np.testing.assert_allclose(fused_[i], want, tolerance, atol, err_msg=f"{seed=}, node {i}")
    assert n_fused >= least * n_graphs


@pytest.mark.parametrize(
    ("n", "norms", "n_expert"), [(1, False, 0), (5, True, 0), (12, False, 0), (1, True, 8), (12, True, 3)]
)
def test_a_llama_like_layer(
    stream: Any, n: int, norms: bool, n_expert: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if n_expert and not has_top_k(stream):
        pytest.skip("LLVM has no kernel of top-k")
    results = []
    for fused in ("0", "1"):
        monkeypatch.setenv("GGMLB_FUSE", fused)
        layer = DecodeLayer(n, norms=norms, n_expert=n_expert)
        stream.graph_optimize(layer.graph)
        with GraphAllocator(stream.default_buffer_type) as allocator:
            allocator.alloc_graph(layer.graph)
            for _ in range(N_RUNS):
                for t, data in layer.leafs:
                    t.set_array(data)
                stream.graph_compute(layer.graph)
            results.append(layer.result.to_numpy())
            found = patterns(layer.graph, stream)
    target = getattr(stream, "target", getattr(stream.device, "target", None))
    on_gpu = is_cuda(stream) or (target is not None and not target.on_cpu)
    want = (
        ["norm", "norm", "norm", "rope_kv"] if on_gpu else ["norm"] * (5 if norms else 3) + ["rope_set_rows"]
    )
    if on_gpu and n_expert:
        want += ["routing", "experts_sum"]
    if n_expert:
        want += ["glu_id"] if n == 1 else []
    else:
        want += ["glu"] if n <= (GLU_COLUMNS if is_cuda(stream) else 8) else []
    if is_cuda(stream) and n <= 8:
        want += ["mul_mats"] if n <= GLU_COLUMNS or n_expert else ["mul_mats", "mul_mats"]
    assert found == sorted(want)
    tolerance = 1e-3 if is_cuda(stream) else 1e-4
    np.testing.assert_allclose(*results, rtol=tolerance, atol=tolerance / 10)


@pytest.mark.parametrize(
    ("n_experts", "n_used", "of_logits"),
    [(6, 2, False), (128, 8, False), (160, 6, False), (1000, 8, False), (6, 2, True), (160, 6, True)],
)
@pytest.mark.parametrize("is_sorted", [True, False])
def test_experts_are_chosen_as_by_the_nodes_one_by_one(
    stream: Any,
    n_experts: int,
    n_used: int,
    of_logits: bool,
    is_sorted: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also of equal shares, of rows that are NaN, and of logits that are infinite."""
    if not has_top_k(stream):
        pytest.skip("LLVM has no kernel of top-k")
    rng = np.random.default_rng(3)
    data = rng.standard_normal((9, n_experts)).astype(np.float32)
    data[1] = 0.5
    data[2] = rng.integers(0, 2, n_experts)
    data[3, n_experts // 2] = np.nan
    data[4] = -np.inf
    data[5, 1:] = -np.inf
    data[6, 2] = np.inf
    data[7] *= 100
    results = []
    for fused in ("0", "1"):
        monkeypatch.setenv("GGMLB_FUSE", fused)
        ctx = Context()
        logits = ctx.set_input(ctx.new_tensor(DType.F32, (n_experts, len(data))))
        shares = logits if of_logits else ctx.soft_max(logits)
        chosen = ctx.set_output((ctx.argsort_top_k if is_sorted else ctx.top_k)(shares, n_used))
        weights = ctx.get_rows(ctx.reshape_3d(shares, 1, *logits.ne[:2]), chosen)
        weights = ctx.reshape_2d(weights, n_used, len(data))
        if of_logits:
            weights = ctx.set_output(ctx.soft_max(weights))
        else:
            weights = ctx.set_output(ctx.div(weights, ctx.clamp(ctx.sum_rows(weights), 2.0**-14, np.inf)))
        graph = Graph().build_forward_expand(chosen, weights)
        stream.graph_optimize(graph)
        with GraphAllocator(stream.default_buffer_type) as allocator:
            allocator.alloc_graph(graph)
            for _ in range(N_RUNS):
                fill(graph, [(logits, data)])
                stream.graph_compute(graph)
            ids, shares_of = chosen.to_numpy(), weights.to_numpy()
            if not is_sorted:  # the order is undefined, and which of equal shares are chosen
                ids, shares_of = np.sort(ids, axis=1), np.sort(shares_of, axis=1)
            results.append((ids, shares_of))
            on_cpu = getattr(getattr(stream, "target", None), "on_cpu", False)
            assert patterns(graph, stream) == (["routing"] if fused == "1" and not on_cpu else [])
    (ids, want), (fused_ids, got) = results
    data_rows = [row for row in range(len(data)) if not (of_logits and row == 3)]  # NaN has no order
    rows = data_rows if is_sorted else [0, 8]
    np.testing.assert_array_equal(fused_ids[rows], ids[rows])
    assert all(len({*row}) == n_used and min(row) >= 0 and max(row) < n_experts for row in fused_ids.tolist())
    np.testing.assert_allclose(got[data_rows], want[data_rows], rtol=1e-5)
    assert np.isnan(got[6]).all()


@pytest.mark.parametrize("n", [3, 12])
def test_a_product_of_long_rows_is_added_to_a_residual_in_place(
    stream: Any, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A panel adds up parts of the product in the result's memory, which here is the residual's."""
    rng = np.random.default_rng(0)
    results = []
    for fused in ("0", "1"):
        monkeypatch.setenv("GGMLB_FUSE", fused)
        ctx = Context()
        w, x, r = (ctx.set_input(ctx.new_tensor(DType.F32, ne)) for ne in ((600, 64), (600, n), (64, n)))
        residual = ctx.relu(r)
        result = ctx.set_output(ctx.add(residual, ctx.mul_mat(w, x)))
        graph = Graph().build_forward_expand(result)
        with GraphAllocator(stream.default_buffer_type) as allocator:
            allocator.alloc_graph(graph)
            assert result.offset == residual.offset
            fill(graph, [(t, rng.standard_normal(t.shape, np.float32)) for t in (w, x, r)])
            stream.graph_compute(graph)
            results.append(result.to_numpy())
        rng = np.random.default_rng(0)
    np.testing.assert_allclose(*results, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("part", range(4))
def test_golden_programs(stream: Any, part: int) -> None:
    """Those with something to fuse, in memory that an allocator placed: every fourth, as kernels are many."""
    n_cases = 0
    for case in CASES[part::4]:
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
    assert n_cases >= (1 if is_cuda(stream) else 2)
