"""The sanitizer finds each race of streams, events and copies that is planted, and no other."""

from __future__ import annotations

import numpy as np
import pytest

import ggmlb
from ggmlb import Context, alloc_ctx_tensors
from ggmlb.core.tensor import Tensor
from ggmlb.testing.fake import FakeBackend
from tests.support.races import F32, doubled, found, placed


class Hasty(FakeBackend):
    """A stream whose asynchronous write is done at once, before the work that was queued."""

    def _set_tensor_async(self, tensor: Tensor, data, offset: int) -> None:
        tensor.set(data, offset)


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
    with found("changed", "the data for", "'x'", "Fake0's set_tensor_async", "pass a copy"):
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
        (y,) = placed(bench.gpu0, "y")
        y.buffer.clear()
        y.to_numpy()


def test_of_memory_from_before_the_start_nobody_knows_who_wrote_it(bench):
    ctx = Context()
    x, y = ctx.new_tensor(F32, (8,), name="x"), Context().new_tensor(F32, (8,), name="y")
    alloc_ctx_tensors(ctx, bench.gpu0)
    with ggmlb.sanitize(unwritten=True):
        x.to_numpy()
        fresh = bench.gpu0.alloc_buffer(y.nbytes)
        ggmlb.tensor_alloc(fresh, y, 0)
        with found("unwritten", "reads", "'y'", "never written"):  # not a byte of it
            y.to_numpy()
