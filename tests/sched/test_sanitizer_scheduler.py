"""The sanitizer finds each race of a scheduler's that is planted."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from ggmlb import Context, Graph, Op, Scheduler, alloc_ctx_tensors
from ggmlb.interface.observe import observers
from ggmlb.testing.fake import FakeBackend, FakeReg
from tests.support.races import F32, Deaf, Eager, OnHostMemory, forgotten, found, right


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
