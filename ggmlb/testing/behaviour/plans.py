"""Checks of graph plans: recomputation, moved and changed tensors, refusals and aborts."""

from __future__ import annotations

from collections.abc import Iterator

from ggmlb.core.context import Context
from ggmlb.core.dtypes import DType
from ggmlb.core.enums import Status
from ggmlb.core.errors import BackendError, FreedError, GraphError, NotAllocatedError, UnsupportedOpError
from ggmlb.core.graph import Graph
from ggmlb.core.tensor import Tensor
from ggmlb.interface import GraphPlan, tensor_alloc
from ggmlb.runtime.alloc import alloc_ctx_tensors
from ggmlb.testing.behaviour.rig import Rig, check, expect, expect_equal, expect_error, numbers, unsupported
from ggmlb.testing.claims import SAMPLES, TYPES, sample

N = 5000


@check("plans")
def a_plan_can_be_computed_again(rig: Rig) -> None:
    """A plan can be computed repeatedly, each time with the current inputs."""
    work = rig.doubling(N, times=3)
    plan = rig.stream.graph_plan_create(work.graph)
    for start in range(4):
        work.x.set_array(numbers(N, start))
        status = rig.stream.graph_plan_compute(plan)
        rig.stream.synchronize()
        expect(status is Status.SUCCESS, f"graph_plan_compute returned {status!r}")
        expect_equal(work.y.to_numpy(), 8 * numbers(N, start), f"a plan's result, run {start}")
    rig.stream.graph_plan_free(plan)


WAYS = ("graph_plan_compute", "graph_plan_update", "graph_compute")
"""Methods of `Backend` that compute a graph planned before."""


def compute(rig: Rig, way: str, graph: Graph, plan: GraphPlan) -> GraphPlan:
    """Compute a graph with its plan by the method named `way`, and wait; return the plan, updated or not."""
    if way == "graph_compute":
        rig.stream.graph_compute(graph)
        return plan
    if way == "graph_plan_update":
        plan = rig.stream.graph_plan_update(plan, graph)
    rig.stream.graph_plan_compute(plan)
    rig.stream.synchronize()
    return plan


@check("plans")
def a_plan_follows_moved_tensors(rig: Rig) -> None:
    """After tensors moved, the old plan, an updated plan, and `graph_compute` all use the new places."""
    for way in WAYS:
        ctx = Context()
        x = ctx.new_tensor(DType.F32, (N,), "x")
        y = rig.double(ctx, rig.double(ctx, x))
        middle = y.sources[0]
        graph = Graph().build_forward_expand(y)
        rig.keep(alloc_ctx_tensors(ctx, rig.stream))
        x.set_array(numbers(N))
        plan = compute(rig, way, graph, rig.stream.graph_plan_create(graph))
        expect_equal(y.to_numpy(), 4 * numbers(N), "a result in the first place")
        for start in (9, 20):
            x.buffer = y.buffer = middle.buffer = None
            second = rig.keep(rig.stream.alloc_buffer(3 * rig.room(x)))
            second.clear(0xFF)  # it may be reused memory that holds the right result
            for i, tensor in enumerate((y, x, middle)):
                tensor_alloc(second, tensor, i * rig.room(x))
            x.set_array(numbers(N, start))
            plan = compute(rig, way, graph, plan)
            expect_equal(y.to_numpy(), 4 * numbers(N, start), f"a result after its tensors moved, by {way}")
        rig.stream.graph_plan_free(plan)


@check("plans")
def a_plan_follows_changed_parameters(rig: Rig) -> None:
    """After op parameters changed, the old plan, an updated plan, and `graph_compute` use the new ones."""
    for way in WAYS:
        ctx = Context()
        x = ctx.new_tensor(DType.F32, (N,), "x")
        y = ctx.scale(x, 2.0)
        if not rig.device.supports_op(y):
            unsupported("the device does not compute SCALE of f32")
        rig.keep(alloc_ctx_tensors(ctx, rig.stream))
        graph = Graph().build_forward_expand(y)
        x.set_array(numbers(N))
        plan = compute(rig, way, graph, rig.stream.graph_plan_create(graph))
        for scale in (5.0, 3.0):
            y.params["scale"] = scale
            plan = compute(rig, way, graph, plan)
            expect_equal(y.to_numpy(), scale * numbers(N), f"a result after the scale was changed, by {way}")


@check("plans")
def two_plans_do_not_mix(rig: Rig) -> None:
    """Plans of the same op use their own operands."""
    first, second = rig.doubling(N), rig.doubling(N)
    first.x.set_array(numbers(N, 1))
    second.x.set_array(numbers(N, 100))
    plans = [rig.stream.graph_plan_create(work.graph) for work in (first, second)]
    for plan in (*plans, *plans):
        rig.stream.graph_plan_compute(plan)
    rig.stream.synchronize()
    expect_equal(first.y.to_numpy(), 2 * numbers(N, 1), "the first plan's result")
    expect_equal(second.y.to_numpy(), 2 * numbers(N, 100), "the second plan's result")


@check("plans")
def foreign_and_freed_plans_are_refused(rig: Rig) -> None:
    """Computing another stream's plan raises `GraphError`, a freed plan `FreedError`."""
    work, other = rig.doubling(N), rig.new_stream()
    plan = rig.stream.graph_plan_create(work.graph)
    expect_error(GraphError, lambda: other.graph_plan_compute(plan), "a plan of another stream")
    rig.stream.graph_plan_free(plan)
    expect_error(FreedError, lambda: rig.stream.graph_plan_compute(plan), "a freed plan")


@check("plans")
def unplaced_tensors_are_refused(rig: Rig) -> None:
    """A graph with unplaced tensors raises `NotAllocatedError`."""
    ctx = Context()
    y = rig.double(ctx, ctx.new_tensor(DType.F32, (N,), "x"))
    graph = Graph().build_forward_expand(y)
    expect_error(NotAllocatedError, lambda: rig.stream.graph_compute(graph), "a graph with unplaced tensors")


@check("plans")
def foreign_memory_is_refused(rig: Rig) -> None:
    """A graph in memory that the device cannot use raises `BackendError`."""
    cpu = rig.cpu()
    if rig.device.supports_buft(cpu.default_buffer_type):
        unsupported("the device can use plain host memory")
    ctx = Context()
    y = rig.double(ctx, ctx.new_tensor(DType.F32, (N,), "x"))
    rig.keep(alloc_ctx_tensors(ctx, cpu))
    graph = Graph().build_forward_expand(y)
    expect_error(BackendError, lambda: rig.stream.graph_compute(graph), "a graph in the CPU's memory")


@check("plans")
def unsupported_ops_are_refused(rig: Rig) -> None:
    """A declined node raises `UnsupportedOpError` with the reason, before anything runs."""
    ctx = Context()
    node = next((n for n in _samples() if not rig.device.supports_op(n)), None)
    if node is None:
        unsupported("the device computes every op")
    ctx.tensors += [*(t for t in node.src if t is not None), node]
    rig.keep(alloc_ctx_tensors(ctx, rig.stream))
    graph = Graph().build_forward_expand(node)
    expect_error(UnsupportedOpError, lambda: rig.stream.graph_compute(graph), f"{node.describe()}, declined,")


def _samples() -> Iterator[Tensor]:
    """Yield nodes of every op and type without views."""
    for name in SAMPLES:
        for dtype in TYPES:
            node = sample(name, dtype)
            if node is not None and not any(t.view_src for t in (node, *node.src) if t is not None):
                yield node


@check("plans")
def an_abort_callback_stops(rig: Rig) -> None:
    """An abort callback stops a computation with `Status.ABORTED`; graphs run again once it is removed."""
    set_abort = rig.device.reg.get_proc_address("set_abort_callback")
    if set_abort is None:
        unsupported("the backend has no set_abort_callback")
    work = rig.doubling(N, times=4)
    work.x.set_array(numbers(N))
    work.y.memset(0)
    asked: list[int] = []

    def abort() -> bool:
        asked.append(1)
        return True

    set_abort(rig.stream, abort)
    status = rig.stream.graph_compute(work.graph)
    expect(bool(asked), "the abort callback was never called")
    expect(status is Status.ABORTED, f"an aborted graph returned {status!r}")
    expect(not work.y.to_numpy().any(), "a graph aborted before its first node wrote its result")
    set_abort(rig.stream, lambda: False)
    expect(
        rig.stream.graph_compute(work.graph) is Status.SUCCESS,
        "a callback that returns False stopped the graph",
    )
    set_abort(rig.stream, None)
    expect(rig.stream.graph_compute(work.graph) is Status.SUCCESS, "the callback was not removed")
    expect_equal(work.y.to_numpy(), 16 * numbers(N), "a result after an aborted computation")
