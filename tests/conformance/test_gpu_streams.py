"""Streams, events and plans of a GPU backend: order, lifetimes, threads."""

from __future__ import annotations

import threading
import time
from contextlib import nullcontext
from typing import TYPE_CHECKING

import numpy as np
import pytest
from gpus import held, is_played, scaled

from ggmlb import Status
from ggmlb.errors import FreedError

if TYPE_CHECKING:
    from ggmlb import Backend, Device

ONES = np.ones(1000, np.float32)


def test_an_event_orders_two_streams(stream: Backend, other: Backend) -> None:
    event = stream.device.event_new()
    other.event_wait(event)  # never recorded: reached
    event.synchronize()
    a, y, graph = scaled(stream)
    y.memset(0)
    out = np.zeros(1000, np.float32)
    with held(stream):
        stream.set_tensor_async(a, ONES)
        stream.graph_compute_async(graph)
        stream.event_record(event)
        other.event_wait(event)
        stream.event_record(event)  # moved; the wait that was queued is for where it was
        other.get_tensor_async(y, out)
        if stream.device.reg.name == "OpenCL":  # which is held up for as long as it takes
            time.sleep(0.05)
            assert not out.any(), "the second stream ran ahead"
    other.synchronize()
    assert np.array_equal(out, 2 * ONES)
    stream.synchronize()
    event.free()
    with pytest.raises(FreedError):
        stream.event_record(event)


def test_freeing_a_stream_waits_for_its_work(device: Device) -> None:
    out = np.zeros(1000, np.float32)
    with device.init_backend() as stream:
        a, y, graph = scaled(stream)
        a.set(ONES)
        with held(stream):
            stream.graph_compute_async(graph)
            stream.get_tensor_async(y, out)
    assert np.array_equal(out, 2 * ONES)


def test_a_plan_is_made_once_and_again_where_tensors_moved(stream: Backend) -> None:
    a, y, graph = scaled(stream)
    a.set(ONES)
    stream.graph_compute(graph)
    plan = stream._plans[graph]
    stream.graph_compute(graph)
    assert stream._plans[graph] is plan
    y.params["scale"] = 5.0
    moved, _, _ = scaled(stream)  # a placement: plans look again
    stream.graph_compute(graph)
    assert stream._plans[graph] is not plan
    assert y.to_numpy()[0] == 5
    assert moved.buffer is not None


def test_a_plan_notices_a_freed_buffer(stream: Backend) -> None:
    a, _, graph = scaled(stream)
    plan = stream.graph_plan_create(graph)
    a.buffer.free()
    with pytest.raises(FreedError, match="buffer of the plan"):
        stream.graph_plan_compute(plan)


def test_a_plan_keeps_dropped_buffers_alive(stream: Backend) -> None:
    _, _, graph = scaled(stream)
    plan = stream.graph_plan_create(graph)
    del graph
    assert stream.graph_plan_compute(plan) is Status.SUCCESS
    stream.synchronize()


def test_threads_with_streams_of_their_own_do_not_disturb_each_other(device: Device) -> None:
    wrong: list[object] = []
    lock = threading.Lock()

    def work(seed: int) -> None:
        try:
            with device.init_backend() as stream:
                turn = lock if is_played(stream) else nullcontext()
                a, y, graph = scaled(stream, float(seed))
                for i in range(20):
                    with turn:
                        a.set(i * ONES)
                        stream.graph_compute(graph)
                        if y.to_numpy()[999] != seed * i:
                            wrong.append((seed, i))
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=[seed]) for seed in (2, 3, 5)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong
