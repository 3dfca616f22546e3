"""What is dropped is gone at once, not at the next garbage collection; what is unique is not copied."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import ggmlb
from ggmlb import Context, Graph, Scheduler

DEVICES = ["CPU", "OpenCL0", "Numba"]


@pytest.fixture
def no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def layer() -> tuple[Context, Graph]:
    """A product that threads share, and rules that emit steps of each kind."""
    c = Context()
    w, x = c.new_tensor("f32", (512, 512), "w"), c.new_tensor("f32", (512, 64), "x")
    return c, Graph().build_forward_expand(c.soft_max(c.silu(c.mul_mat(w, x))))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.usefixtures("no_collection")
def test_a_dropped_scheduler_gives_its_memory_back(device: str) -> None:
    backends = [ggmlb.init_by_name(name) for name in dict.fromkeys((device, "CPU"))]
    c, graph = layer()
    scheduler = Scheduler(backends)
    scheduler.graph_compute(graph)
    left = [weakref.ref(t.buffer) for t in graph if t.buffer is not None]
    assert left
    del scheduler, c, graph
    assert [ref() for ref in left] == [None] * len(left)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.usefixtures("no_collection")
def test_a_dropped_backend_and_its_plans_are_gone(device: str) -> None:
    backend = ggmlb.init_by_name(device)
    c, graph = layer()
    left: list[Any] = [weakref.ref(backend), weakref.ref(ggmlb.alloc_ctx_tensors(c, backend))]
    backend.graph_compute(graph)
    del backend
    assert left[0]() is None
    del c, graph
    assert left[1]() is None


def test_a_plan_whose_backend_is_gone_says_so() -> None:
    backend = ggmlb.init_by_name("CPU")
    plan = backend.graph_plan_create(Graph())
    del backend
    with pytest.raises(ggmlb.FreedError, match="keep the backend"):
        _ = plan.backend


FREED = r"of the plan was freed|lies in a freed buffer"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("freed", ["operand", "result"])
def test_a_plan_does_not_compute_in_freed_memory(device: str, freed: str) -> None:
    with ggmlb.init_by_name(device) as backend:
        inside, outside = Context(), Context()
        x = inside.new_tensor("f32", 8)
        y = outside.sqr(x)
        buffers = {
            "operand": ggmlb.alloc_ctx_tensors(inside, backend),
            "result": ggmlb.alloc_ctx_tensors(outside, backend),
        }
        graph = Graph().build_forward_expand(y)
        plan = backend.graph_plan_create(graph)
        backend.graph_plan_compute(plan)
        buffers[freed].free()
        with pytest.raises(ggmlb.FreedError, match=FREED):
            backend.graph_plan_compute(plan)
        with pytest.raises(ggmlb.FreedError, match=FREED):
            backend.graph_compute(graph)


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, pickle.dumps])
def test_what_belongs_to_a_device_is_not_copied(copied: Callable[[Any], Any]) -> None:
    with ggmlb.init_by_name("CPU") as cpu, cpu.alloc_buffer(64) as buffer, Scheduler([cpu]) as scheduler:
        for it in (cpu, cpu.device, cpu.device.reg, cpu.default_buffer_type, buffer, scheduler):
            with pytest.raises(ggmlb.ArgumentError, match="to_numpy"):
                copied(it)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda t: pickle.loads(pickle.dumps(t))])
def test_a_tensor_is_copied_with_its_operands_until_it_is_placed(copied: Callable[[Any], Any]) -> None:
    c = Context()
    x = c.new_tensor("f32", 3, "x")
    y = copied(c.add(c.view_1d(x, 3, 0), x))
    assert y.src[0].view_src is y.src[1] is not x
    assert ggmlb.evaluate(y, {"x": [1, 2, 3]}, devices="CPU").tolist() == [2, 4, 6]
    ggmlb.alloc_ctx_tensors(c, ggmlb.init_by_name("CPU"))
    with pytest.raises(ggmlb.ArgumentError, match="tensors that lie there"):
        copied(x)
