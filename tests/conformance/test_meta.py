"""The meta device: devices that share the work of each node compute what one computes."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

import ggmlb
from ggmlb import Context, DType, Graph, GraphAllocator, SplitAxis, SplitState, split_evenly
from ggmlb.backends.cuda import CudaReg
from ggmlb.core.ops import SPECS
from ggmlb.core.placement import overlap, same_place
from ggmlb.core.tensor import Tensor
from ggmlb.interface import Backend
from ggmlb.parallel.meta import MIRRORED
from ggmlb.parallel.meta.reduce import MetaCommunicator
from ggmlb.testing.devices import sharded_by_chance
from ggmlb.testing.fake import FakeReg
from ggmlb.testing.programs import Case
from ggmlb.testing.run import Runner, Selection, tasks
from tests.support.golden import CASES
from tests.support.processes import ROOT, python

CPU = ggmlb.device_by_name("CPU")


@pytest.mark.parametrize("n_devices", [2, 3])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_golden_programs_however_their_inputs_are_dealt_out(case: Case, n_devices: int) -> None:
    device = ggmlb.meta_device([CPU] * n_devices, lambda t: sharded_by_chance(t, n_devices, case.id))
    leafs = Context()
    built = case.build(leafs=leafs)
    with device.init_backend() as meta, ggmlb.alloc_ctx_tensors(leafs, meta):
        built.upload()
        allocator = GraphAllocator(device.buffer_type)
        allocator.alloc_graph(built.graph)
        meta.graph_compute(built.graph)
        states = {leaf.name: str(device.state(built.tensors[leaf.name])) for leaf in case.leafs}
        wrong = {name: verdict.reason for name, verdict in built.compare().items() if not verdict.ok}
        assert not wrong, states
        allocator.free()


@pytest.mark.parametrize("case", CASES[::3], ids=lambda case: case.id)
def test_results_in_an_operands_memory_have_its_layout(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a device whose work-items run at once would read what others have written already."""
    planned: list[Tensor] = []
    plan = Backend.graph_plan_create
    monkeypatch.setattr(Backend, "graph_plan_create", lambda b, g: (planned.extend(g.nodes), plan(b, g))[1])
    for seed in range(3):
        device = ggmlb.meta_device([CPU] * 2, lambda t: sharded_by_chance(t, 2, f"{case.id} {seed}"))  # noqa: B023
        leafs = Context()
        built = case.build(leafs=leafs)
        meta, allocator = device.init_backend(), GraphAllocator(device.buffer_type)
        with meta, ggmlb.alloc_ctx_tensors(leafs, meta), allocator:
            built.upload()
            allocator.alloc_graph(built.graph)
            meta.graph_compute(built.graph)
            pairs = [(node, src) for node in planned if SPECS[node.op].inplace for src in node.sources]
            assert planned and all(not overlap(*pair) or same_place(*pair) for pair in pairs)
            planned.clear()


def mixed(*names: str) -> list[ggmlb.Device]:
    """Devices by name; `Fake0` and on run as late as they may, and fill memory with NaN. Cards are played."""
    made: dict[str, Any] = {device.name: device for device in FakeReg(3).devices}
    if any(name.startswith("CUDA") for name in names):
        from tests.support.host_driver import HostDriver

        made |= {device.name: device for device in CudaReg(HostDriver(n_devices=2)).devices}
    return [made.get(name) or ggmlb.device_by_name(name) for name in names]


MIXTURES = [
    ("Fake0", "CPU"),
    ("CPU", "Fake0", "Fake1"),
    ("OpenCL0", "Fake0", "CPU"),
    pytest.param(("CUDA0", "CUDA1"), marks=pytest.mark.slow),
]


@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("names", MIXTURES, ids=str)
def test_golden_programs_on_devices_of_several_kinds(names: tuple[str, ...], part: int) -> None:
    devices = mixed(*names)
    n_run = 0
    for case in CASES[part * 6 :: 24]:
        deal = partial(sharded_by_chance, n_devices=len(devices), seed=f"{case.id} {names}")
        device = ggmlb.meta_device(devices, deal)
        leafs = Context()
        built = case.build(leafs=leafs)
        if any(device.declines(node) for node in built.graph.nodes):
            continue
        with ggmlb.sanitize(), device.init_backend() as meta, ggmlb.alloc_ctx_tensors(leafs, meta):
            built.upload()
            with GraphAllocator(device.buffer_type) as allocator:
                allocator.alloc_graph(built.graph)
                meta.graph_compute_async(built.graph)
                meta.synchronize()
                assert all(verdict.ok for verdict in built.compare().values()), case.id
        n_run += 1
    assert n_run > 25


@pytest.mark.parametrize("state", ["mirrored", "any"])
def test_it_behaves_as_a_device(state: str) -> None:
    deal = (lambda t: MIRRORED) if state == "mirrored" else partial(sharded_by_chance, n_devices=3)
    device = ggmlb.meta_device(mixed("CPU", "Fake0", "OpenCL0"), deal)
    assert device.caps.async_
    with Runner([device]) as runner:
        results = [r for t in tasks(device, Selection("behaviour")) for r in runner.run(t)]
    assert {r.id: r.reason for r in results if r.outcome.is_bad} == {}
    assert sum(r.outcome.ran for r in results) > 20


# -- computing ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 6, 7, 9])
def test_sums_are_the_same_bits_on_every_device(n: int) -> None:
    rng = np.random.default_rng(n)
    backends = [CPU.init_backend() for _ in range(n)]
    for has in ([True] * n, [j != 0 for j in range(n)], [j == n - 1 for j in range(n)]):
        if not any(has):
            continue
        ctx = Context()
        values = rng.normal(size=(n, 5, 7)).astype(np.float32)
        parts = [ctx.from_array(values[j], copy=True) for j in range(n)]
        communicator = MetaCommunicator(backends)
        communicator.sum_of(parts, has)()
        results = [p.to_numpy() for p in parts]
        np.testing.assert_allclose(results[0], values[has].sum(axis=0), rtol=1e-5, atol=1e-5)
        assert all(np.array_equal(r, results[0]) for r in results)
        communicator.free()
    for backend in backends:
        backend.free()


def test_a_gathered_tensor_is_gathered_anew_after_it_was_written() -> None:
    """An op without a rule reads a cache whole; then rows go to the slices; then it is read again."""
    device = ggmlb.meta_device([CPU] * 2, lambda t: SplitState(SplitAxis.AXIS_0, (split_evenly(t.ne[0], 2),)))
    leafs, ctx = Context(), Context()
    cache = leafs.new_tensor("f32", (8, 4), "cache")
    before = ctx.set_output(ctx.cont(ctx.roll(cache, 1, 0, 0, 0)))
    rows, index = ctx.new_tensor("f32", (8, 2), "rows"), ctx.new_tensor("i64", 2, "index")
    written = ctx.set_rows(cache, ctx.sqr(rows), index)
    after = ctx.set_output(ctx.roll(written, 1, 0, 0, 0))
    graph = Graph().build_forward_expand(before, after)
    values, new = np.arange(32.0).reshape(4, 8), np.arange(16.0).reshape(2, 8)
    with device.init_backend() as meta, ggmlb.alloc_ctx_tensors(leafs, meta):
        cache.set_array(values)
        allocator = GraphAllocator(device.buffer_type)
        allocator.alloc_graph(graph)
        rows.set_array(new)
        index.set_array(np.array([3, 1]))
        plan: Any = meta.graph_plan_create(graph)
        meta.graph_plan_compute(plan)
        np.testing.assert_array_equal(before.to_numpy(), np.roll(values, 1, axis=1))
        values[[3, 1]] = new**2
        np.testing.assert_array_equal(after.to_numpy(), np.roll(values, 1, axis=1))
        np.testing.assert_array_equal(cache.to_numpy(), values)
        assert plan.n_gathers == 2
        meta.graph_plan_free(plan)
        allocator.free()


def test_a_result_of_nothing_is_a_result() -> None:
    """Sums of empty rows are 0, and what is joined to nothing stays, though one operand is empty."""
    rows_cut = SplitState(SplitAxis.AXIS_1, ((1, 2),))
    device = ggmlb.meta_device([CPU] * 2, lambda t: rows_cut if t.name == "x" else MIRRORED)
    ctx = Context()
    empty, x = ctx.new_tensor("f32", (0, 3), "empty"), ctx.new_tensor("f32", (5, 3), "x")
    rows, joined = ctx.sum_rows(empty), ctx.concat(empty, x, 0)
    values = np.random.default_rng(0).normal(size=(3, 5)).astype(np.float32)
    with device.init_backend() as meta, ggmlb.alloc_ctx_tensors(ctx, meta) as buffer:
        buffer.clear(0xFF)
        x.set_array(values)
        meta.graph_compute(Graph().build_forward_expand(rows, joined))
        assert not rows.to_numpy().any()
        np.testing.assert_array_equal(joined.to_numpy(), values)


def test_alibi_is_not_cut_through_heads() -> None:
    """A device with heads 4 to 7 would count them 0 to 3, and take their slopes."""
    heads = SplitState(SplitAxis.AXIS_2, ((4, 4),))
    device = ggmlb.meta_device([CPU] * 2, lambda t: heads if t.name == "x" else MIRRORED)
    rng = np.random.default_rng(0)
    scores, bias = rng.normal(size=(8, 3, 6)).astype("f4"), rng.normal(size=(3, 6)).astype("f2")
    reference = Context()
    expected = ggmlb.evaluate(
        reference.soft_max_ext(reference.from_array(scores), reference.from_array(bias), 1.0, 8.0),
        devices="CPU",
    )
    leafs, ctx = Context(), Context()
    x, mask = leafs.new_tensor("f32", (6, 3, 8), "x"), leafs.new_tensor("f16", (6, 3), "mask")
    y = ctx.soft_max_ext(x, mask, 1.0, 8.0)
    with device.init_backend() as meta, ggmlb.alloc_ctx_tensors(leafs, meta), meta.alloc_buffer(4096) as room:
        x.set_array(scores)
        mask.set_array(bias)
        ggmlb.tensor_alloc(room, y, 0)
        meta.graph_compute(Graph().build_forward_expand(y))
        np.testing.assert_allclose(y.to_numpy(), expected, rtol=1e-5)


def test_an_abort_between_stages() -> None:
    device = ggmlb.meta_device([CPU] * 2, lambda t: SplitState(SplitAxis.AXIS_0, (split_evenly(t.ne[0], 2),)))
    leafs, ctx = Context(), Context()
    w = leafs.new_tensor("f32", (8, 4), "w")
    x = ctx.new_tensor("f32", (8, 1), "x")
    graph = Graph().build_forward_expand(ctx.sqr(ctx.mul_mat(w, x)))
    with device.init_backend() as meta, ggmlb.alloc_ctx_tensors(leafs, meta):
        GraphAllocator(device.buffer_type).alloc_graph(graph)
        asked: list[bool] = []

        def abort() -> bool:
            asked.append(True)
            return len(asked) == 2

        meta.abort_callback = abort
        assert meta.graph_compute(graph) is ggmlb.Status.ABORTED
        meta.abort_callback = None
        assert meta.graph_compute(graph) is ggmlb.Status.SUCCESS


def test_beside_other_backends_in_a_scheduler() -> None:
    """Weights on the meta device, inputs on the CPU, and an op that a request leaves to the CPU."""
    rng = np.random.default_rng(0)
    values = {"w1": rng.normal(size=(64, 32)).astype("f4"), "w2": rng.normal(size=(32, 64)).astype("f4")}
    x_values = rng.normal(size=(3, 32)).astype("f4")
    states = {
        "w1": SplitState(SplitAxis.AXIS_1, ((40, 24),)),
        "w2": SplitState(SplitAxis.AXIS_0, ((40, 24),)),
    }
    opencl = ggmlb.device_by_name("OpenCL0")
    for devices in ([CPU, CPU], [CPU, opencl], [opencl, opencl]):
        device = ggmlb.meta_device(devices, lambda t: states[t.name])
        leafs, ctx = Context(), Context()
        w = {name: leafs.new_tensor(DType.F32, v.shape[::-1], name) for name, v in values.items()}
        x = ctx.new_tensor("f32", (32, 3), "x")
        hidden = ctx.relu(ctx.mul_mat(w["w1"], x))
        shifted = ctx.scale(hidden, 2.0)
        y = ctx.add(ctx.mul_mat(w["w2"], shifted), x)
        graph = Graph().build_forward_expand(y)
        expected = (2 * np.maximum(x_values @ values["w1"].T, 0)) @ values["w2"].T + x_values
        with (
            device.init_backend() as meta,
            CPU.init_backend() as host,
            ggmlb.alloc_ctx_tensors(leafs, meta) as buffer,
            ggmlb.Scheduler([meta, host]) as scheduler,
        ):
            buffer.usage = ggmlb.BufferUsage.WEIGHTS
            for name, value in values.items():
                w[name].set_array(value)
            for request, n_splits in ((None, 1), (host, 3)):
                scheduler.set_tensor_backend(shifted, request)
                scheduler.alloc_graph(graph)
                for factor in (1, 2):
                    x.set_array(x_values * factor)
                    scheduler.graph_compute(graph)
                    np.testing.assert_allclose(y.to_numpy(), expected * factor, rtol=1e-4, atol=1e-4)
                assert scheduler.n_splits == n_splits


# -- the model ---------------------------------------------------------------------------------------

MINILM = """
import json
from pathlib import Path
import numpy as np
from ggmlb.models import BertEmbedder
golden = Path("tests/golden/minilm")
sentences = json.loads((golden / "sentences.json").read_text())
reference = np.load(golden / "embeddings.npz")["embeddings"]
for devices, weight_type, least in (
    (["OpenCL0+OpenCL1"], None, 0.99999),
    (["OpenCL0+OpenCL1", "CPU"], "q8_0", 0.999),
    (["OpenCL0+CPU+OpenCL1+OpenCL2+OpenCL3"], None, 0.99999),  # of 12 heads, two or three each
):
    with BertEmbedder(devices=devices, weight_type=weight_type) as embedder:
        cosines = (embedder.embed(sentences) * reference).sum(axis=1)
        assert cosines.min() >= least, (devices, cosines.min())
        plan = embedder.scheduler.splits[-1].plan
        assert (plan.n_reductions, plan.n_gathers) == (12, 0), "two sums a layer, and nothing else"
"""


def test_minilm_on_several_devices_at_once(only_pocl: dict[str, str]) -> None:
    done = python("-c", MINILM, cwd=ROOT, POCL_DEVICES="pthread pthread pthread pthread", **only_pocl)
    assert done.returncode == 0, done.stderr
