"""What is dropped is gone at once, not at the next garbage collection; what is unique is not copied."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from functools import cached_property, partial
from typing import Any

import numpy as np
import pytest

import ggmlb
from ggmlb import Context, Graph, Scheduler, SplitAxis, SplitState, split_evenly
from ggmlb.parallel.meta import MIRRORED
from ggmlb.testing.fake import FakeBuffer, FakeReg

DEVICES = ["CPU", "OpenCL0", "LLVM"]


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


def dealt_out(*devices: ggmlb.Device) -> ggmlb.Device:
    """A device of two, each with half of the columns of what is 512 wide."""
    halves = SplitState(SplitAxis.AXIS_0, (split_evenly(512, 2),))
    return ggmlb.meta_device(devices, lambda t: halves if t.ne[0] == 512 else MIRRORED)


def opened(name: str) -> ggmlb.Backend:
    if name == "played":
        from tests.support.gpus import first

        return first(name).init_backend()
    if name == "Meta":
        return dealt_out(*[ggmlb.device_by_name("CPU")] * 2).init_backend()
    return ggmlb.init_by_name(name)


@pytest.mark.parametrize("device", [*DEVICES, "Meta", "played"])
@pytest.mark.usefixtures("no_collection")
def test_a_dropped_backend_and_its_plans_are_gone(device: str) -> None:
    backend = opened(device)
    c, graph = layer()
    left: list[Any] = [weakref.ref(backend), weakref.ref(ggmlb.alloc_ctx_tensors(c, backend))]
    backend.graph_compute(graph)
    del backend
    assert left[0]() is None
    del c, graph
    assert left[1]() is None


@pytest.mark.parametrize("device", ["CPU", "LLVM"])
@pytest.mark.usefixtures("no_collection")
def test_threads_end_with_their_backend(device: str) -> None:
    before = set(threading.enumerate())
    for freed in (True, False):
        backend = ggmlb.init_by_name(device, {"n_threads": 3})
        c, graph = layer()
        ggmlb.alloc_ctx_tensors(c, backend)
        backend.graph_compute(graph)
        threads = set(threading.enumerate()) - before
        assert len(threads) == 2
        if freed:
            backend.free()
        del backend
        for thread in threads:
            thread.join(300)
            assert not thread.is_alive()


@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize("how", ["free the backend", "free the plan", "drop the backend", "drop the plan"])
def test_what_a_meta_device_gathers_and_sums_goes_with_the_plan(how: str) -> None:
    device = dealt_out(*FakeReg(2).devices)

    def n_buffers() -> int:
        buffers = [each for each in gc.get_objects() if issubclass(type(each), FakeBuffer)]
        return sum(not buffer.is_freed for buffer in buffers)

    c = Context()
    x, w = c.new_tensor("f32", (512, 64)), c.new_tensor("f32", (512, 512))
    y = c.soft_max_inplace(c.add(x, c.soft_max(x)))
    graph = Graph().build_forward_expand(c.mul_mat(w, y))
    backend = device.init_backend()
    with ggmlb.alloc_ctx_tensors(c, backend):
        before = n_buffers()
        plan: Any = backend.graph_plan_create(graph)
        assert plan.n_gathers
        assert plan.n_reductions
        assert n_buffers() > before
        backend.graph_plan_compute(plan)
        backend.synchronize()
        if how == "free the plan":
            backend.graph_plan_free(plan)
        elif how == "free the backend":
            backend.graph_compute(graph)
            del plan
            backend.free()
        elif how == "drop the plan":
            del plan
        else:
            backend.graph_compute(graph)
            del plan, backend
        assert n_buffers() == before


@pytest.mark.parametrize("name", ["OpenCL0", "played"])
@pytest.mark.usefixtures("no_collection")
def test_a_dropped_backend_with_split_weights_is_gone(name: str) -> None:
    backend: Any = opened(name)
    buft = backend.device.reg.get_proc_address("split_buffer_type")(0, (1.0,))
    weights, c = Context(), Context()
    w = weights.new_tensor("f32", (64, 64))
    kept = ggmlb.alloc_ctx_tensors(weights, buft)
    graph = Graph().build_forward_expand(c.mul_mat(w, c.new_tensor("f32", (64, 8))))
    with kept, ggmlb.alloc_ctx_tensors(c, backend):
        backend.graph_compute(graph)
        left = weakref.ref(backend)
        del backend
        assert left() is None


def test_a_plan_whose_backend_is_gone_says_so() -> None:
    backend = ggmlb.init_by_name("CPU")
    plan = backend.graph_plan_create(Graph())
    del backend
    with pytest.raises(ggmlb.FreedError, match="keep a reference"):
        _ = plan.backend


FREED = r"of the plan was freed|is in a freed buffer"


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


# -- use after free ------------------------------------------------------------------------------


def freeable(kind: str, stack: ExitStack) -> Any:
    """Return an object that can be freed, of a kind, perhaps of a device."""
    kind, _, device = kind.partition(" ")
    backend = stack.enter_context(opened(device or "CPU"))
    c, graph = layer()
    if kind == "Backend":
        return stack.pop_all() and backend
    if kind == "Event":
        return backend.device.event_new()
    if kind == "Scheduler":
        scheduler = Scheduler([backend])
        scheduler.graph_compute(graph)
        return scheduler
    if kind == "GraphAllocator":
        return ggmlb.GraphAllocator(backend.default_buffer_type)
    buffer = ggmlb.alloc_ctx_tensors(c, backend)
    if kind == "Buffer":
        return buffer
    stack.enter_context(buffer)
    return ggmlb.GraphCopy(backend, graph)


@pytest.mark.parametrize(
    "kind",
    [f"{kind} {device}" for kind in ("Backend", "Buffer") for device in (*DEVICES, "Meta", "played")]
    + ["Event OpenCL0", "Scheduler", "GraphAllocator", "GraphCopy"],
)
def test_each_public_member_of_what_was_freed_raises(kind: str) -> None:
    with ExitStack() as stack:
        freed = freeable(kind, stack)
        members = {name: inspect.getattr_static(freed, name) for name in dir(freed)}
        freed.free()
    assert freed.is_freed
    assert type(freed).__name__ in repr(freed)
    assert "(freed)" in repr(freed)
    with pytest.raises(ggmlb.FreedError), freed:
        pass
    n_uses = 0
    for name, member in members.items():
        if name.startswith(("_", "check_")) or name in ("is_freed", "name"):
            continue
        if inspect.isfunction(member):
            uses = [lambda name=name: getattr(freed, name)()]
        elif isinstance(member, (property, cached_property)):
            uses = [partial(getattr, freed, name), partial(setattr, freed, name, None)]
        else:
            continue
        for use in uses:
            n_uses += 1
            with pytest.raises(ggmlb.FreedError, match=f"^{name}: this .* was freed$"):
                use()
    assert n_uses


# -- cycles: whatever a program does, nothing of it is left to the garbage collector -------------


def use_scheduler(device: str, **settings: Any) -> None:
    scheduler = Scheduler([opened(device), ggmlb.init_by_name("CPU")], **settings)
    c, graph = layer()
    scheduler.graph_compute(graph)
    shown = [str(scheduler), scheduler.placement, scheduler.to_svg(), repr(c), repr(graph)]
    with scheduler.trace() as trace:
        scheduler.graph_compute(graph)
    shown.append(trace)
    seen: list[Any] = []
    scheduler.set_eval_callback(lambda node, ask: seen.append(node) or True)
    scheduler.graph_compute(graph)


def use_backend(device: str) -> None:
    backend = opened(device)
    c, graph = layer()
    ggmlb.alloc_ctx_tensors(c, backend)
    plan = backend.graph_plan_create(graph)
    for _ in range(2):
        backend.graph_plan_compute(plan)
    if backend.device.caps.events:
        event = backend.device.event_new()
        backend.event_record(event)
        backend.event_wait(event)


def fail() -> None:
    """Errors hold the frames that they went through; no frame must hold an error."""
    cpu = ggmlb.init_by_name("CPU", {"n_threads": 2})
    c = Context()
    y = c.map_custom1(c.new_tensor("f32", 8), lambda *_: 1 / 0, 2)
    scheduler = Scheduler([opened("OpenCL0"), cpu])
    tries: list[Callable[[], object]] = [
        lambda: scheduler.graph_compute(Graph().build_forward_expand(y)),
        lambda: cpu.graph_compute(layer()[1]),
        lambda: cpu.alloc_buffer(1 << 60),
        lambda: c.softmax(y),
        lambda: c.mul_mat(y, c.new_tensor("f32", 3)),
        lambda: ggmlb.init_by_name("none"),
        lambda: ggmlb.load("none"),
    ]
    for each in tries:
        with suppress(ggmlb.Error):
            each()


def compare() -> None:
    backends = [ggmlb.init_by_name(name) for name in ("CPU", "LLVM")]
    c, graph = layer()
    ggmlb.alloc_ctx_tensors(c, backends[0])
    ggmlb.compare_graph_backend(*backends, graph, lambda *_: True)


def evaluate() -> None:
    c = Context()
    ggmlb.evaluate(c.sqr(c.from_array(np.ones(8, np.float32))), devices="CPU")


LIVES: dict[str, Callable[[], object]] = {
    "fail": fail,
    "compare": compare,
    "evaluate": evaluate,
    "parallel": lambda: use_scheduler("OpenCL0", parallel=True),
    "sanitized": lambda: use_scheduler("OpenCL0", sanitize=True),
    **{f"scheduler {name}": partial(use_scheduler, name) for name in (*DEVICES[1:], "Meta")},
    **{f"backend {name}": partial(use_backend, name) for name in (*DEVICES, "Meta")},
}


@pytest.mark.parametrize("life", LIVES)
@pytest.mark.usefixtures("no_collection")
def test_nothing_is_left_to_the_garbage_collector(life: str) -> None:
    LIVES[life]()  # what is made once, and kept
    gc.collect()
    try:
        gc.set_debug(gc.DEBUG_SAVEALL)
        LIVES[life]()
        gc.collect()
        left = {type(each) for each in gc.garbage}
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
    assert not {kind for kind in left if kind.__module__.startswith(("ggmlb", "numpy", "pyopencl"))}


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
    with pytest.raises(ggmlb.ArgumentError, match="and its tensors belong to this process"):
        copied(x)
