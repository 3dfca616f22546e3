"""Checks of execution order: on one stream, between streams, and between devices."""

from __future__ import annotations

import threading

import numpy as np

from ggmlb.core.errors import BackendError, FreedError
from ggmlb.interface import tensor_copy_async
from ggmlb.testing.behaviour.rig import Rig, check, expect_equal, expect_error, numbers, unsupported

N = 5000


@check("order")
def a_stream_runs_in_order(rig: Rig) -> None:
    """Writes, graphs and reads queued on a stream run in the order of the calls."""
    work = rig.doubling(N)
    rig.busy()
    outs = [np.zeros(N, np.float32) for _ in range(6)]
    data = [numbers(N, i) for i in range(6)]
    for values, out in zip(data, outs, strict=True):
        rig.stream.set_tensor_async(work.x, values)
        rig.stream.graph_compute_async(work.graph)
        rig.stream.get_tensor_async(work.y, out)
    rig.stream.synchronize()
    for i, (values, out) in enumerate(zip(data, outs, strict=True)):
        expect_equal(out, 2 * values, f"the result of round {i}, queued without waiting")


@check("order")
def graphs_follow_each_other(rig: Rig) -> None:
    """A graph queued again reads the results of its previous run."""
    work = rig.doubling(N, inplace=True)
    work.x.set_array(numbers(N))
    for _ in range(12):
        rig.stream.graph_compute_async(work.graph)
    rig.stream.synchronize()
    expect_equal(work.x.to_numpy(), 4096 * numbers(N), "x doubled 12 times in place")


@check("order")
def synchronize_waits(rig: Rig) -> None:
    """After `synchronize` all queued work is done, and its results can be read at once."""
    work = rig.doubling(N)
    work.y.memset(0)
    work.x.set_array(numbers(N))
    rig.busy()
    rig.stream.graph_compute_async(work.graph)
    out = np.zeros(N, np.float32)
    rig.stream.get_tensor_async(work.y, out)
    rig.stream.synchronize()
    expect_equal(out, 2 * numbers(N), "an array read asynchronously, after synchronize")
    expect_equal(work.y.to_numpy(), 2 * numbers(N), "a result after synchronize")


@check("order")
def graph_compute_waits(rig: Rig) -> None:
    """`graph_compute` returns when the results are complete."""
    work = rig.doubling(N)
    work.y.memset(0)
    work.x.set_array(numbers(N))
    rig.busy()
    rig.stream.graph_compute(work.graph)
    expect_equal(work.y.to_numpy(), 2 * numbers(N), "a result after graph_compute")


@check("order")
def a_copy_waits_for_its_source(rig: Rig) -> None:
    """A copy between streams runs after earlier and before later work on the source."""
    other = rig.new_stream()
    work, reader = rig.doubling(N), rig.doubling(N, stream=other)
    rig.busy()
    rig.stream.set_tensor_async(work.x, numbers(N))
    rig.stream.graph_compute_async(work.graph)
    tensor_copy_async(rig.stream, other, work.y, reader.x)
    rig.stream.set_tensor_async(work.y, np.full(N, -1, np.float32))  # must not reach the copy
    other.graph_compute_async(reader.graph)
    other.synchronize()
    expect_equal(reader.y.to_numpy(), 4 * numbers(N), "a copy of a result that was still being computed")
    rig.stream.synchronize()


@check("order")
def a_copy_waits_for_its_destination(rig: Rig) -> None:
    """A copy between streams waits for earlier reads of the destination."""
    other = rig.new_stream()
    work, reader = rig.doubling(N), rig.doubling(N, stream=other)
    reader.x.set_array(numbers(N, 3))
    work.x.set_array(numbers(N, 7))
    rig.busy(other)
    other.graph_compute_async(reader.graph)
    out = np.zeros(N, np.float32)
    other.get_tensor_async(reader.y, out)
    tensor_copy_async(rig.stream, other, work.x, reader.x)
    other.graph_compute_async(reader.graph)
    other.synchronize()
    rig.stream.synchronize()
    expect_equal(out, 2 * numbers(N, 3), "a result whose operand a later copy replaced")
    expect_equal(reader.y.to_numpy(), 2 * numbers(N, 7), "a result after the copy")


@check("order")
def copies_with_the_cpu(rig: Rig) -> None:
    """Copies to the CPU and back are ordered like those between streams."""
    cpu = rig.cpu()
    work = rig.doubling(N)
    host, back = rig.tensor(work.y.dtype, N, stream=cpu), rig.doubling(N)
    rig.busy()
    rig.stream.set_tensor_async(work.x, numbers(N))
    rig.stream.graph_compute_async(work.graph)
    tensor_copy_async(rig.stream, cpu, work.y, host)
    rig.stream.set_tensor_async(work.y, np.full(N, -1, np.float32))
    expect_equal(host.to_numpy(), 2 * numbers(N), "a result copied to the CPU while it was computed")
    tensor_copy_async(cpu, rig.stream, host, back.x)
    host.memset(0)
    rig.stream.graph_compute(back.graph)
    expect_equal(back.y.to_numpy(), 4 * numbers(N), "a graph after a copy from the CPU")


@check("order")
def an_event_orders_streams(rig: Rig) -> None:
    """Work queued after `event_wait` runs after the work before the event."""
    if not rig.device.caps.events:
        unsupported("the device has no events")
    other = rig.new_stream()
    work = rig.doubling(N)
    for round_ in range(3):
        event = rig.device.event_new()
        work.x.set_array(numbers(N, round_))
        work.y.memset(0)
        rig.busy()
        rig.stream.graph_compute_async(work.graph)
        rig.stream.event_record(event)
        other.event_wait(event)
        out = np.zeros(N, np.float32)
        other.get_tensor_async(work.y, out)
        other.synchronize()
        expect_equal(out, 2 * numbers(N, round_), "a result read by another stream, after event_wait")
        rig.stream.synchronize()
        event.free()


@check("order")
def an_event_can_be_waited_for(rig: Rig) -> None:
    """`Event.synchronize` returns when the work before the event is done; recording again moves the event."""
    if not rig.device.caps.events:
        unsupported("the device has no events")
    event = rig.device.event_new()
    event.synchronize()  # does not wait for an event that was never recorded
    rig.stream.event_wait(event)
    work = rig.doubling(N)
    for round_ in range(2):
        work.x.set_array(numbers(N, round_))
        rig.busy()
        rig.stream.graph_compute_async(work.graph)
        out = np.zeros(N, np.float32)
        rig.stream.get_tensor_async(work.y, out)
        rig.stream.event_record(event)
        event.synchronize()
        expect_equal(out, 2 * numbers(N, round_), f"an array after Event.synchronize, round {round_}")
    event.free()
    expect_error(FreedError, event.synchronize, "synchronize of a freed event")
    expect_error(FreedError, lambda: rig.stream.event_record(event), "event_record of a freed event")


@check("order")
def without_events_it_says_so(rig: Rig) -> None:
    """A device without events in `caps` refuses to create one."""
    if rig.device.caps.events:
        unsupported("the device has events")
    expect_error(BackendError, rig.device.event_new, "event_new on a device without events")


@check("order")
def streams_in_threads(rig: Rig) -> None:
    """Different streams may be used by different threads at once."""
    wrong: list[str] = []

    def work(seed: int) -> None:
        try:
            stream = rig.device.init_backend()
            task = rig.doubling(N, stream=stream)
            for i in range(10):
                task.x.set_array(numbers(N, seed * i))
                stream.graph_compute(task.graph)
                expect_equal(task.y.to_numpy(), 2 * numbers(N, seed * i), f"thread {seed}, round {i}")
            stream.free()
        except Exception as error:
            wrong.append(f"{type(error).__name__}: {error}")

    threads = [threading.Thread(target=work, args=[seed]) for seed in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expect_equal(len(wrong), 0, "; ".join(wrong))
