"""The sanitizer finds each race that is planted, and nothing in what is right."""

from __future__ import annotations

import gc
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

import numpy as np
import pytest

import ggmlb
from ggmlb import Context, DType, Graph, Op, SanitizerError, Scheduler, alloc_ctx_tensors
from ggmlb.interface.observe import observers
from ggmlb.testing.fake import FakeBackend, FakeDevice, FakeReg

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ggmlb.interface import Event
    from ggmlb.tensor import Tensor

F32 = DType.F32


class Deaf(FakeBackend):
    """A stream that others forget to wait for, while a scheduler computes."""

    computes = False

    def synchronize(self) -> None:
        if not self.computes:
            super().synchronize()


class Eager(FakeBackend):
    """A stream that does not wait for events, while a scheduler computes."""

    computes = False

    def event_wait(self, event: Event) -> None:
        if not self.computes:
            super().event_wait(event)


class Hasty(FakeBackend):
    """A stream whose asynchronous write is done at once, before the work that was queued."""

    def _set_tensor_async(self, tensor: Tensor, data, offset: int) -> None:
        tensor.set(data, offset)


class OnHostMemory(FakeDevice):
    """A device that computes in the host's memory."""

    def supports_buft(self, buft) -> bool:
        return buft.is_host


@pytest.fixture
def sanitizer():
    with ggmlb.sanitize() as sanitizer:
        yield sanitizer


def placed(backend, *names: str, n: int = 8) -> list[Tensor]:
    ctx = Context()
    tensors = [ctx.new_tensor(F32, (n,), name=name) for name in names]
    buffer = alloc_ctx_tensors(ctx, backend)
    buffer.clear()
    return tensors


def doubled(x: Tensor, name: str = "y") -> tuple[Graph, Tensor]:
    """A graph of one node, in memory of its own beside `x`."""
    ctx = Context()
    y = ctx.set_name(ctx.scale(x, 2.0), name)
    alloc_ctx_tensors(ctx, x.buffer.buft)
    return Graph().build_forward_expand(y), y


@contextmanager
def forgotten(stream: FakeBackend) -> Iterator[None]:
    """Let nobody wait for the stream, if it is one that can be forgotten."""
    stream.computes = True
    try:
        yield
    finally:
        stream.computes = False


right = nullcontext


def found(kind: str, *words: str):
    """Expect an error of that kind whose message has the words in this order."""
    return pytest.raises(SanitizerError, check=lambda e: e.kind == kind, match=".*".join(words))


# -- streams, events, copies -----------------------------------------------------------------------


def test_a_result_read_before_it_was_waited_for(bench, sanitizer):
    (x,) = placed(bench.gpu0, "x")
    graph, y = doubled(x)
    bench.gpu0.graph_compute_async(graph)
    line = r"test_sanitizer.py:\d+"
    with found(
        "race",
        f"the host's get_tensor at {line} reads SCALE",
        "'y'",
        f"Fake0's graph_plan_compute, queued at {line}",
    ):
        y.to_numpy()
    bench.gpu0.synchronize()
    assert not y.to_numpy().any()


def test_an_input_overwritten_while_its_copy_is_in_flight(bench, sanitizer):
    (x,), (copy,) = placed(bench.gpu0, "x"), placed(bench.gpu1, "copy")
    assert bench.gpu1.cpy_tensor_async(bench.gpu0, x, copy)
    with found("race", "the host's set_tensor", "writes", "'x'", "Fake1's cpy_tensor_async", "still read"):
        x.set_array(np.ones(8))
    bench.gpu0.synchronize()  # waits for the copy too: it is ordered on both sides
    x.set_array(np.ones(8))


def test_host_memory_changed_while_its_write_is_in_flight(bench, sanitizer):
    (x,) = placed(bench.gpu0, "x")
    data = np.ones(8, np.float32)
    bench.gpu0.set_tensor_async(x, data)
    bench.gpu0.synchronize()
    data[:] = 2  # now it may be
    bench.gpu0.set_tensor_async(x, data)
    data[:] = 99
    with found("changed", "the data for", "'x'", "Fake0's set_tensor_async", "give it a copy"):
        bench.gpu0.synchronize()


@pytest.mark.parametrize("order", ["none", "event too early", "event", "event waited for by the host"])
def test_two_streams_of_a_device(bench, sanitizer, order):
    device = bench.reg.devices[0]
    (x,) = placed(bench.gpu0, "x")
    first, y = doubled(x)
    second, _ = doubled(y, "z")
    with device.init_backend() as other:
        event = device.event_new()
        if order == "event too early":
            bench.gpu0.event_record(event)
        bench.gpu0.graph_compute_async(first)
        if order.startswith("event") and "early" not in order:
            bench.gpu0.event_record(event)
        if order == "event waited for by the host":
            event.synchronize()
        elif order != "none":
            other.event_wait(event)
        if order in ("none", "event too early"):
            with found("race", r"Fake0 \(stream 2\)'s", "'y'", "record an event on Fake0 after the first"):
                other.graph_compute_async(second)
        else:
            other.graph_compute_async(second)


def test_an_event_waited_for_before_it_was_recorded(bench, sanitizer):
    event = bench.reg.devices[0].event_new()
    for wait in (lambda: bench.gpu1.event_wait(event), event.synchronize):
        with found("unrecorded", "an event of Fake0 that was never recorded", "record it"):
            wait()
    bench.gpu0.event_record(event)
    bench.gpu1.event_wait(event)


def test_order_passes_through_a_third_stream(bench, sanitizer):
    (x,), (copy,) = placed(bench.gpu0, "x"), placed(bench.gpu1, "copy")
    graph, y = doubled(x)
    bench.gpu0.graph_compute_async(graph)
    bench.gpu1.cpy_tensor_async(bench.gpu0, y, copy)
    back = bench.reg.devices[1].event_new()
    bench.gpu1.event_record(back)
    back.synchronize()
    y.to_numpy()


def test_bytes_beside_each_other_are_not_a_race(bench, sanitizer):
    (x,) = placed(bench.gpu0, "x")
    half = Context().view_1d(x, 4, 16)
    bench.gpu0.set_tensor_async(half, np.ones(4, np.float32))
    x.set(np.zeros(4, np.float32), 0)
    with found("race", "writes", "bytes 12 to 20"):
        x.set(np.zeros(2, np.float32), 12)


def test_a_backend_that_writes_before_its_queue_is_done(bench, sanitizer):
    with Hasty(bench.reg.devices[0]) as hasty:
        (x,) = placed(hasty, "x")
        graph, _ = doubled(x)
        hasty.set_tensor_async(x, np.ones(8, np.float32))
        hasty.graph_compute_async(graph)
        with found("race", "the host's set_tensor", "writes", "'x'"):
            hasty.set_tensor_async(x, np.ones(8, np.float32))


# -- memory that programs reach without a call ------------------------------------------------------


@pytest.fixture
def on_host(bench):
    """A stream whose work in the host's memory runs when it is waited for."""
    with OnHostMemory(bench.reg, 7, lambda op: None, 1 << 30).init_backend() as stream:
        yield stream


VIEWS = {
    "as_array": lambda x: x.as_array(),
    "numpy.asarray": np.asarray,
    "dlpack": np.from_dlpack,
    "base": lambda x: x.buffer.base[x.offset : x.offset + x.nbytes].view(np.float32),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
@pytest.mark.parametrize("again", [False, True])
def test_an_operand_overwritten_through_a_view(bench, on_host, sanitizer, view, again):
    (x,) = placed(bench.cpu, "x")
    graph, _ = doubled(x)
    values = view(x)
    values[:] = 1
    for _ in range(2):
        on_host.graph_compute_async(graph)
        on_host.synchronize()
        values[:] += 1  # now it may
    on_host.graph_compute_async(graph)
    values[3] = 99
    line = r"test_sanitizer.py:\d+"
    with found("changed", "'x'", f"Fake7's graph_plan_compute, queued at {line}", "synchronize Fake7"):
        if again:
            on_host.graph_compute_async(graph)
        else:
            on_host.synchronize()


@pytest.mark.parametrize("order", ["synchronize", "event"])
def test_an_operand_overwritten_in_order(bench, on_host, sanitizer, order):
    (x,) = placed(bench.cpu, "x")
    graph, _ = doubled(x)
    event = on_host.device.event_new()
    for _ in range(3):
        on_host.graph_compute_async(graph)
        on_host.event_record(event)
        on_host.synchronize() if order == "synchronize" else event.synchronize()
        x.as_array()[:] = 7
    on_host.synchronize()


def test_what_queued_work_writes_itself_is_no_change(bench, on_host, sanitizer):
    (x,) = placed(bench.cpu, "x")
    ctx = Context()
    y = ctx.scale_inplace(ctx.add(x, x), 3.0)
    z = ctx.cpy(y, x)  # read at first, and then written
    memory = alloc_ctx_tensors(ctx, bench.cpu)
    graph = Graph().build_forward_expand(z)
    x.set_array(np.ones(8))
    with on_host.device.init_backend() as other:
        for _ in range(3):
            on_host.graph_compute_async(graph)
        event = on_host.device.event_new()
        on_host.event_record(event)
        other.event_wait(event)
        other.set_tensor_async(x, np.zeros(8, np.float32))
        other.synchronize()
        on_host.synchronize()
    memory.free()


def test_bytes_between_the_elements_may_change(bench, on_host, sanitizer):
    (x,) = placed(bench.cpu, "x")
    left = Context().view_2d(x, 1, 4, 8, 0)  # each second element
    graph, _ = doubled(left)
    for i, rule in ((1, right()), (2, found("changed", "'x"))):
        on_host.graph_compute_async(graph)
        x.as_array()[i] = 99
        with rule:
            on_host.synchronize()


def test_a_view_given_to_a_transfer(bench, sanitizer):
    (x,), (copy,) = placed(bench.cpu, "x"), placed(bench.gpu0, "copy")
    bench.gpu0.set_tensor_async(copy, x.as_array())
    x.as_array()[0] = 5
    with found("changed", "the data for", "'copy'", "Fake0's set_tensor_async"):
        bench.gpu0.synchronize()


@pytest.mark.parametrize("export", [np.asarray, np.from_dlpack], ids=["asarray", "dlpack"])
def test_an_export_of_what_is_still_computed(bench, on_host, sanitizer, export):
    (x,) = placed(bench.cpu, "x")
    graph, y = doubled(x)
    on_host.graph_compute_async(graph)
    with found("race", "the host's", "reads", "'y'", "Fake7's graph_plan_compute", "still write"):
        export(y)
    y.as_array()  # for later
    on_host.synchronize()
    assert not export(y).any()


def test_an_array_under_a_buffer_of_a_real_device(sanitizer):
    with ggmlb.init_by_name("OpenCL0") as stream:
        if not stream.device.caps.buffer_from_host_ptr:
            pytest.skip("it has memory of its own")
        array = np.ones(1 << 12, np.float32)
        buffer = stream.device.buffer_from_host_ptr(array)
        x = Context().new_tensor(F32, (1 << 12,), name="x")
        ggmlb.tensor_alloc(buffer, x, 0)
        graph, _ = doubled(x)
        stream.graph_compute_async(graph)
        stream.synchronize()
        array[:] = 2
        stream.graph_compute_async(graph)
        array[17] = 99
        with found("changed", "'x'", "OpenCL0's graph_plan_compute"):
            stream.synchronize()


# -- lifetime --------------------------------------------------------------------------------------


def test_memory_freed_while_it_is_used(bench, sanitizer):
    (x,) = placed(bench.gpu0, "x")
    graph, y = doubled(x)
    bench.gpu0.graph_compute_async(graph)
    with found("race", "free", "frees", "may still write"):
        y.buffer.free()
    bench.gpu0.synchronize()
    y.buffer.free()


def test_a_plan_that_uses_freed_memory(bench, sanitizer):
    (x,) = placed(bench.gpu0, "x")
    graph, _ = doubled(x)
    plan = bench.gpu0.graph_plan_create(graph)
    x.buffer.free()
    with found("freed", "Fake0's graph_plan_compute", "reads", "'x'", "which was freed"):
        bench.gpu0.graph_plan_compute(plan)


def test_a_copy_from_freed_memory(bench, sanitizer):
    (x,), (copy,) = placed(bench.gpu0, "x"), placed(bench.gpu1, "copy")
    x.buffer.free()
    with found("freed", "Fake1's cpy_tensor_async", "reads", "'x'"):
        bench.gpu1.cpy_tensor_async(bench.gpu0, x, copy)


def test_bytes_that_nobody_wrote(bench):
    with ggmlb.sanitize(unwritten=True):
        ctx = Context()
        x = ctx.new_tensor(F32, (8,), name="x")
        alloc_ctx_tensors(ctx, bench.gpu0)
        x.set(np.ones(4, np.float32))
        assert x.get(0, 16).any()
        with found("unwritten", "reads", "'x'", "never written"):
            x.to_numpy()


# -- the scheduler ---------------------------------------------------------------------------------


class TwoProducers:
    """add(w0 x, w1 x): each product on its own device, the sum on the CPU."""

    def __init__(self, bench) -> None:
        ctx = Context()
        self.x = ctx.set_input(ctx.new_tensor(F32, (4, 2), name="x"))
        a = ctx.set_name(ctx.mul_mat(bench.weight(bench.gpu0, 4, 4, name="w0"), self.x), "a")
        b = ctx.set_name(ctx.mul_mat(bench.weight(bench.gpu1, 4, 4, name="w1"), self.x), "b")
        self.y = ctx.set_output(ctx.add(a, b))
        self.graph = Graph().build_forward_expand(self.y)


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("kind", [FakeBackend, Deaf])
def test_a_producer_that_is_not_waited_for(bench, which, kind):
    backends = list(bench.backends)
    stream = backends[which] = bench.stack.enter_context(kind(bench.reg.devices[which]))
    made = TwoProducers(bench)
    with Scheduler(backends, sanitize=True) as sched, forgotten(stream):
        sched.set_tensor_backend(made.y, bench.cpu)
        sched.alloc_graph(made.graph)
        made.x.set_array(np.ones((2, 4)))
        with (
            found("race", "reads", f"'{'ab'[which]}'", f"Fake{which}", "may still write")
            if kind is Deaf
            else right()
        ):
            sched.graph_compute(made.graph)


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("kind", [FakeBackend, Deaf])
def test_a_copy_ordered_on_one_side_only(make_bench, side, kind):
    # The devices decline queued copies, so both streams must be waited for before the host copies.
    bench = make_bench(FakeReg(2, async_copies=False))
    backends = list(bench.backends)
    stream = backends[side] = bench.stack.enter_context(kind(bench.reg.devices[side]))
    ctx = Context()
    x = ctx.new_tensor(F32, (4, 2), name="x")
    bench.stack.enter_context(alloc_ctx_tensors(ctx, bench.gpu0)).clear()
    a = ctx.set_name(ctx.mul_mat(bench.weight(bench.gpu0, 4, 4), x), "a")
    z = ctx.mul_mat(bench.weight(bench.gpu1, 4, 4, name="w1"), a)
    graph = Graph().build_forward_expand(ctx.set_output(z))
    with Scheduler(backends, sanitize=True) as sched, forgotten(stream):
        sched.alloc_graph(graph)
        # The second time, the copy must wait for those who read what it held before.
        with (
            found("race", "tensor_copy", f"Fake{side}", "read" if side else "write")
            if kind is Deaf
            else right()
        ):
            sched.graph_compute_async(graph)
            sched.graph_compute_async(graph)
        sched.synchronize()


@pytest.mark.parametrize("is_input", [True, False])
def test_an_input_that_is_copied_only_when_its_turn_comes(bench, is_input):
    ctx = Context()
    x = ctx.new_tensor(F32, (4, 2), name="x")
    if is_input:
        ctx.set_input(x)
    bench.stack.enter_context(alloc_ctx_tensors(ctx, bench.gpu0)).clear()
    y = ctx.set_output(ctx.mul_mat(bench.weight(bench.gpu1, 4, 4), x))
    graph = Graph().build_forward_expand(y)
    with Scheduler(bench.backends, sanitize=True) as sched:
        sched.alloc_graph(graph)
        sched.graph_compute_async(graph)
        with (
            right()
            if is_input
            else found("race", "writes", "'x'", "Fake1's cpy_tensor_async", "may still read")
        ):
            x.set_array(np.ones((2, 4)))
        sched.synchronize()


@pytest.mark.parametrize("kind", [FakeBackend, Deaf])
def test_a_split_without_inputs_in_memory_that_another_device_still_uses(bench, kind):
    host = bench.cpu.default_buffer_type
    device = OnHostMemory(bench.reg, 7, lambda op: "no kernel" if op.op is Op.SCALE else None, 1 << 30)
    stream = bench.stack.enter_context(kind(device))
    ctx = Context()
    x = ctx.set_input(ctx.new_tensor(F32, (64,), name="x"))
    a = ctx.set_name(ctx.sum_rows(ctx.set_name(ctx.exp(x), "a0")), "a")
    w = ctx.set_input(ctx.new_tensor(F32, (64,), name="w"))
    b = ctx.set_name(ctx.scale(w, 3.0), "b")  # reads nothing of the other device's, but may get a0's memory
    graph = Graph().build_forward_expand(ctx.set_output(a), ctx.set_output(b))
    with Scheduler([stream, bench.cpu], [host, host], sanitize=True) as sched, forgotten(stream):
        sched.alloc_graph(graph)
        assert [len(s.inputs) for s in sched.splits] == [0, 0], str(sched)
        x.set_array(np.ones(64))
        w.set_array(np.ones(64))
        with (
            found("race", "CPU's graph_plan_compute", "writes", "'b'", "Fake7", "'a0'")
            if kind is Deaf
            else right()
        ):
            sched.graph_compute(graph)


@pytest.mark.parametrize("kind", [FakeBackend, Deaf])
def test_an_upload_of_what_a_device_still_computes_in_host_memory(bench, kind):
    stream = bench.stack.enter_context(kind(OnHostMemory(bench.reg, 7, lambda op: None, 1 << 30)))
    ctx = Context()
    x = ctx.set_input(ctx.new_tensor(F32, (4, 2), name="x"))
    a = ctx.set_name(ctx.cpy(ctx.exp(x), bench.weight(bench.cpu, 4, 2, name="cache")), "a")
    z = ctx.set_output(ctx.mul_mat(bench.weight(bench.gpu0, 4, 4), a))
    graph = Graph().build_forward_expand(z)
    backends, host = [stream, bench.gpu0, bench.cpu], bench.cpu.default_buffer_type
    bufts = [host, bench.gpu0.default_buffer_type, host]
    with Scheduler(backends, bufts, sanitize=True) as sched, forgotten(stream):
        for node in graph.nodes:
            sched.set_tensor_backend(node, bench.gpu0 if node is z else stream)
        sched.alloc_graph(graph)
        x.set_array(np.ones((2, 4)))
        with found("race", "reads", "'a'", "Fake7", "may still write") if kind is Deaf else right():
            sched.graph_compute(graph)


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("kind", [FakeBackend, Eager])
def test_a_pipeline_that_forgets_an_event(bench, which, kind):
    # The source must wait before it overwrites a copy that is still read, the reader for the copy itself.
    backends = list(bench.backends)
    stream = backends[which] = bench.stack.enter_context(kind(bench.reg.devices[which]))
    ctx = Context()
    x = ctx.set_input(ctx.new_tensor(F32, (4, 2), name="x"))
    a = ctx.set_name(ctx.mul_mat(bench.weight(bench.gpu0, 4, 4), x), "a")
    z = ctx.mul_mat(bench.weight(bench.gpu1, 4, 4, name="w1"), a)
    graph = Graph().build_forward_expand(ctx.set_output(z))
    with Scheduler(backends, parallel=True, n_copies=2, sanitize=True) as sched, forgotten(stream):
        sched.alloc_graph(graph)
        what = ("write", "'Fake1#a'", "still read") if which == 0 else ("read", "'Fake1#a'", "still write")
        with found("race", *what) if kind is Eager else right():
            for _ in range(5):
                x.set_array(np.ones((2, 4)))
                sched.graph_compute_async(graph)
        sched.synchronize()


def test_a_scheduler_watches_while_it_lives(bench):
    n = len(observers)
    with Scheduler(bench.backends, sanitize=True):
        assert len(observers) == n + 1
    assert len(observers) == n
    sched = Scheduler(bench.backends, sanitize=True)
    del sched
    gc.collect()
    assert len(observers) == n
    with Scheduler(bench.backends):
        assert len(observers) == n
