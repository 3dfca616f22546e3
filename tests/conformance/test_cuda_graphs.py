"""CUDA graphs: when steps are captured, replayed, updated, and when not; what must hold meanwhile."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import pytest

from ggmlb import Context, DType, Graph, Status, alloc_ctx_tensors
from ggmlb.backends.cuda.backend import CudaBackend
from ggmlb.backends.cuda.plan import CudaPlan
from ggmlb.core.errors import BackendError, BackendUnavailable, FreedError
from ggmlb.core.tensor import Tensor
from tests.support.golden import FAMILIES, claimed
from tests.support.gpus import CUDA, device_fixture

device = device_fixture(*CUDA)

N = 1000


def chain(backend: CudaBackend, factor: float = 2.0) -> tuple[Tensor, Tensor, Graph]:
    """`relu(factor a) + a`."""
    ctx = Context()
    a = ctx.new_tensor(DType.F32, (N,), "a")
    y = ctx.add(ctx.relu(ctx.scale(a, factor)), a)
    alloc_ctx_tensors(ctx, backend)
    return a, y, Graph().build_forward_expand(y)


def ones(value: float = 1.0) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    return np.full(N, value, np.float32)


def plan_of(backend: CudaBackend, graph: Graph) -> CudaPlan:
    plan = backend.graph_plan_create(graph)
    assert isinstance(plan, CudaPlan)
    return plan


def test_a_plan_warms_up_is_captured_and_replayed(stream: CudaBackend) -> None:
    a, y, graph = chain(stream)
    plan = plan_of(stream, graph)
    (segment,) = plan.segments
    states = []
    for i in range(4):
        a.set(ones(i))
        y.memset(0xFF)
        assert stream.graph_plan_compute(plan) is Status.SUCCESS
        stream.synchronize()
        assert np.array_equal(y.to_numpy(), ones(3 * i))
        states.append(segment.is_captured)
    assert states == [False, True, True, True]


def test_a_new_graph_of_the_same_kernels_updates_the_old_ones_executable(stream: CudaBackend) -> None:
    for i in range(5):  # built anew for each step, as a model does
        a, y, graph = chain(stream, float(i))
        a.set(ones())
        stream.graph_compute(graph)
        stream.graph_compute(graph) if i == 0 else None
        assert np.array_equal(y.to_numpy(), ones(i + 1))
        plan = stream._plans[graph]
        assert isinstance(plan, CudaPlan)
        assert plan.segments[0].is_captured
        del a, y, graph, plan
        gc.collect()
    counts = getattr(stream.device.driver, "counts", None)
    if counts is not None:
        assert counts["update"] >= 4


def test_parameters_that_changed_are_noticed(stream: CudaBackend) -> None:
    a, y, graph = chain(stream)
    a.set(ones())
    for _ in range(3):
        stream.graph_compute(graph)
    graph.nodes[0].params["scale"] = 5.0
    stream.graph_compute(graph)
    assert y.to_numpy()[0] == 6


def test_row_numbers_and_positions_are_read_when_a_replay_runs(stream: CudaBackend) -> None:
    ctx = Context()
    cache = ctx.new_tensor(DType.F32, (8, 16), "cache")
    row, index = ctx.new_tensor(DType.F32, (8, 1)), ctx.new_tensor(DType.I64, (1,))
    position = ctx.new_tensor(DType.I32, (1,))
    turned = ctx.rope_ext(
        ctx.reshape_3d(row, 8, 1, 1), position, None, 8, 0, 0, 1e4, 1.0, 0.0, 1.0, 32.0, 1.0
    )
    put = ctx.set_rows(cache, ctx.reshape_2d(turned, 8, 1), index)
    graph = Graph().build_forward_expand(put)
    alloc_ctx_tensors(ctx, stream)
    cache.memset(0)
    plan = plan_of(stream, graph)
    data = np.arange(1, 9, dtype=np.float32)
    row.set(data)
    for i in range(5):
        index.set(np.array([3 * i], np.int64))
        position.set(np.array([i], np.int32))
        stream.graph_plan_compute(plan)
        stream.synchronize()
    found = cache.to_numpy()
    assert np.array_equal(np.flatnonzero(found.any(axis=1)), [0, 3, 6, 9, 12])
    assert np.array_equal(found[0], data)
    assert np.allclose(found[6, :2], [np.cos(2) - 2 * np.sin(2), np.sin(2) + 2 * np.cos(2)], atol=1e-5)


def test_graphs_off_gives_the_same(stream: CudaBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    a, y, graph = chain(stream)
    a.set(np.linspace(-3, 3, N, dtype=np.float32))
    for _ in range(3):
        stream.graph_compute(graph)
    replayed = y.to_numpy()
    monkeypatch.setenv("GGMLB_CUDA_GRAPHS", "0")
    plan = plan_of(stream, graph)
    for _ in range(3):
        y.memset(0xFF)
        stream.graph_plan_compute(plan)
        stream.synchronize()
    assert np.array_equal(y.to_numpy(), replayed)
    assert not plan.segments[0].is_captured


def test_the_abort_callback_works_on_a_captured_plan(stream: CudaBackend) -> None:
    a, y, graph = chain(stream)
    a.set(ones())
    for _ in range(3):
        stream.graph_compute(graph)
    asked: list[int] = []

    def stop_at_the_third() -> bool:
        asked.append(1)
        return len(asked) == 3

    y.memset(0)
    stream.abort_callback = stop_at_the_third
    assert stream.graph_compute(graph) is Status.ABORTED
    assert len(asked) == 3
    assert not y.to_numpy().any()
    stream.abort_callback = None
    assert stream.graph_compute(graph) is Status.SUCCESS
    assert y.to_numpy()[0] == 3


@pytest.mark.parametrize("family", FAMILIES)
def test_all_other_steps_are_captured(stream: CudaBackend, family: str) -> None:
    """Of every golden program that the device claims: launches and products of cuBLAS, nothing else."""
    for case in claimed(stream.device, family):
        built = case.build()
        with alloc_ctx_tensors(built.ctx, stream):
            steps = [step for part in CudaPlan(stream, built.graph).parts for step in part.steps]
        assert all(step.key is not None for step in steps), case.id


@contextmanager
def second_step_raises(segment: Any, error: BaseException) -> Iterator[None]:
    def fail(handle: int) -> None:
        raise error

    steps = segment.steps
    segment.steps = [steps[0], steps[1]._replace(call=fail), *steps[2:]]
    yield
    segment.steps = steps


@pytest.mark.parametrize("is_refused", [True, False], ids=["refused", "interrupted"])
def test_what_ends_a_capture_leaves_the_stream_usable(stream: CudaBackend, is_refused: bool) -> None:
    a, y, graph = chain(stream)
    a.set(ones())
    plan = plan_of(stream, graph)
    stream.graph_plan_compute(plan)
    segment = plan.segments[0]
    error = stream.device.driver.errors[0](900) if is_refused else KeyboardInterrupt()
    told = pytest.warns(RuntimeWarning, match="not replayed") if is_refused else nullcontext()
    raised = pytest.raises(BackendError if is_refused else KeyboardInterrupt)
    with second_step_raises(segment, error), told, raised:
        stream.graph_plan_compute(plan)  # if refused, the capture fails, and so does the step by itself
    y.memset(0)
    for _ in range(2):
        stream.graph_plan_compute(plan)
    stream.synchronize()
    assert y.to_numpy()[0] == 3
    assert (segment.why_not is not None) == is_refused == (not segment.is_captured)
    other = plan_of(stream, graph)
    for _ in range(3):
        stream.graph_plan_compute(other)
    stream.synchronize()
    assert other.segments[0].is_captured


def test_a_replay_with_freed_memory_is_refused(stream: CudaBackend) -> None:
    a, _, graph = chain(stream)
    plan = plan_of(stream, graph)
    for _ in range(3):
        stream.graph_plan_compute(plan)
    assert a.buffer is not None
    a.buffer.free()
    with pytest.raises(FreedError, match="buffer of the plan"):
        stream.graph_plan_compute(plan)


def test_a_captured_plan_keeps_dropped_buffers_alive(stream: CudaBackend) -> None:
    a, _, graph = chain(stream)
    a.set(ones())
    plan = plan_of(stream, graph)
    for _ in range(2):
        stream.graph_plan_compute(plan)
    y = plan.nodes[-1]
    del a, graph
    gc.collect()
    junk = [stream.alloc_buffer(4 * N) for _ in range(8)]
    for buffer in junk:
        buffer.clear(7)
    stream.graph_plan_compute(plan)
    stream.synchronize()
    assert y.to_numpy()[0] == 3


def test_without_cublas_kernels_compute_all_products(
    stream: CudaBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> None:
        raise BackendUnavailable("no cuBLAS")

    ctx = Context()
    w, x = ctx.new_tensor(DType.F32, (64, 48)), ctx.new_tensor(DType.F32, (64, 40))
    y = ctx.mul_mat(w, x)
    alloc_ctx_tensors(ctx, stream)
    rng = np.random.default_rng(0)
    a, b = rng.random((48, 64), np.float32), rng.random((40, 64), np.float32)
    w.set(a)
    x.set(b)
    graph = Graph().build_forward_expand(y)
    device = stream.device
    told = []
    for is_missing in (False, True):
        with monkeypatch.context() as patch:
            if is_missing:
                patch.setattr(device.driver, "blas", missing)
                for cached in ("has_blas", "target"):
                    patch.delitem(vars(device), cached, raising=False)
            plan = plan_of(stream, graph)
        for cached in ("has_blas", "target"):
            vars(device).pop(cached, None)
        told.append(
            [step.key[0] for part in plan.parts for step in part.steps if isinstance(step.key, tuple)]
        )
        for _ in range(3):
            y.memset(0xFF)
            stream.graph_plan_compute(plan)
            stream.synchronize()
            assert np.allclose(y.to_numpy(), b @ a.T, rtol=1e-3)
    assert told == [["gemm"], ["mul_mat_tile"]]


def test_a_late_error_is_reported_with_what_was_computed(
    stream: CudaBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, graph = chain(stream)
    driver = stream.device.driver

    def fail(handle: int) -> None:
        raise driver.errors[0](700)

    stream.graph_compute_async(graph)
    with monkeypatch.context() as patch:
        patch.setattr(driver, "event_synchronize", fail)
        with pytest.raises(BackendError, match=r"graph of 3 nodes, up to .*GGMLB_CUDA_SYNC=1"):
            stream.synchronize()
    monkeypatch.setenv("GGMLB_CUDA_SYNC", "1")
    plan = plan_of(stream, graph)
    plan.parts[1].steps[0] = plan.parts[1].steps[0]._replace(call=fail)
    with pytest.raises(BackendError, match="failed to compute RELU"):
        stream.graph_plan_compute(plan)


def test_too_many_matrices_for_a_grid_are_declined(stream: CudaBackend) -> None:
    ctx = Context()
    a, b = (ctx.new_tensor(DType.F32, (8, 2, 70_000)) for _ in range(2))
    why = stream.device.declines(ctx.mul_mat(a, b))
    assert why is not None
    assert "70000" in why
