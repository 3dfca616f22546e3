"""OpenCL streams, events and plans."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import numpy as np
import pyopencl as cl
import pytest

from ggmlb import Context, DType, Graph, Status, alloc_ctx_tensors, device_by_name, reg_by_name
from ggmlb.backends.opencl.backend import OpenClBackend
from ggmlb.backends.opencl.plan import OpenClPlan
from ggmlb.enums import DeviceType
from ggmlb.errors import ArgumentError, FreedError, UnsupportedOpError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ggmlb.tensor import Tensor


@pytest.fixture
def streams() -> Iterator[tuple[OpenClBackend, OpenClBackend]]:
    device = device_by_name("OpenCL0")
    with device.init_backend() as first, device.init_backend() as second:
        assert isinstance(first, OpenClBackend)
        assert isinstance(second, OpenClBackend)
        yield first, second


def scaled(backend: OpenClBackend, factor: float = 2.0, n: int = 1000) -> tuple[Tensor, Tensor, Graph]:
    ctx = Context()
    a = ctx.new_tensor(DType.F32, (n,))
    y = ctx.scale(a, factor)
    alloc_ctx_tensors(ctx, backend)
    return a, y, Graph().build_forward_expand(y)


def test_the_device_tells_what_it_is() -> None:
    device = device_by_name("OpenCL0")
    props = device.props
    assert props.type in (DeviceType.GPU, DeviceType.IGPU, DeviceType.ACCEL)
    assert props.caps.async_
    assert props.caps.events
    assert props.caps.host_buffer
    assert 0 < props.memory_free <= props.memory_total
    assert device.buffer_type.alignment == 128
    with pytest.raises(ArgumentError, match="known: work_split"):
        device.init_backend({"n_threads": 3})
    with pytest.raises(ArgumentError, match="'cpu' or 'gpu'"):
        device.init_backend({"work_split": "tpu"})


def test_an_event_orders_two_streams(streams: tuple[OpenClBackend, OpenClBackend]) -> None:
    first, second = streams
    event = first.device.event_new()
    second.event_wait(event)  # never recorded: reached
    event.synchronize()
    a, y, graph = scaled(first)
    closed = cl.UserEvent(first.device.context)
    cl.enqueue_barrier(first.queue, wait_for=[closed])
    first.set_tensor_async(a, np.ones(1000, np.float32))
    first.graph_compute_async(graph)
    first.event_record(event)
    second.event_wait(event)
    out = np.zeros(1000, np.float32)
    second.get_tensor_async(y, out)
    time.sleep(0.05)
    assert not out.any(), "the second stream ran ahead"
    closed.set_status(cl.command_execution_status.COMPLETE)
    second.synchronize()
    assert np.array_equal(out, np.full(1000, 2))
    event.free()
    with pytest.raises(FreedError):
        first.event_record(event)


def test_an_event_lets_other_threads_run_while_waiting(
    streams: tuple[OpenClBackend, OpenClBackend],
) -> None:
    stream, _ = streams
    closed = cl.UserEvent(stream.device.context)
    cl.enqueue_barrier(stream.queue, wait_for=[closed])
    event = stream.device.event_new()
    stream.event_record(event)
    opener = threading.Timer(0.05, closed.set_status, [cl.command_execution_status.COMPLETE])
    opener.start()
    event.synchronize()
    opener.join()


def test_freeing_a_stream_waits_for_its_work() -> None:
    device = device_by_name("OpenCL0")
    out = np.zeros(1000, np.float32)
    with device.init_backend() as stream:
        assert isinstance(stream, OpenClBackend)
        a, y, graph = scaled(stream)
        a.set(np.ones(1000, np.float32))
        stream.graph_compute_async(graph)
        stream.get_tensor_async(y, out)
    assert np.array_equal(out, np.full(1000, 2))


def test_a_plan_is_made_once_and_again_where_tensors_moved(
    streams: tuple[OpenClBackend, OpenClBackend],
) -> None:
    stream, _ = streams
    a, y, graph = scaled(stream)
    a.set(np.ones(1000, np.float32))
    stream.graph_compute(graph)
    plan = stream._plans[graph]
    stream.graph_compute(graph)
    assert stream._plans[graph] is plan
    y.params["scale"] = 5.0
    other, _, _ = scaled(stream)  # a placement: plans look again
    stream.graph_compute(graph)
    assert stream._plans[graph] is not plan
    assert y.to_numpy()[0] == 5
    assert other.buffer is not None


def test_two_plans_share_no_kernel_object_and_give_theirs_back(
    streams: tuple[OpenClBackend, OpenClBackend],
) -> None:
    stream, _ = streams
    a, y, graph = scaled(stream)
    b, z, graph_b = scaled(stream, 3.0)
    a.set(np.ones(1000, np.float32))
    b.set(np.full(1000, 10, np.float32))
    plan, plan_b = stream.graph_plan_create(graph), stream.graph_plan_create(graph_b)
    assert isinstance(plan, OpenClPlan)
    assert isinstance(plan_b, OpenClPlan)
    kernels = [step[0] for step in plan.steps]
    assert kernels
    assert not any(k is step[0] for k in kernels for step in plan_b.steps)
    stream.graph_plan_compute(plan)
    stream.graph_plan_compute(plan_b)
    stream.synchronize()
    assert (y.to_numpy()[0], z.to_numpy()[0]) == (2, 30)
    stream.graph_plan_free(plan)
    again = stream.graph_plan_create(graph)
    assert isinstance(again, OpenClPlan)
    assert again.steps[0][0] is kernels[0]
    with pytest.raises(FreedError):
        stream.graph_plan_compute(plan)


def test_a_plan_notices_a_freed_buffer(streams: tuple[OpenClBackend, OpenClBackend]) -> None:
    stream, _ = streams
    a, _, graph = scaled(stream)
    plan = stream.graph_plan_create(graph)
    assert a.buffer is not None
    a.buffer.free()
    with pytest.raises(FreedError, match="buffer of the plan"):
        stream.graph_plan_compute(plan)


def test_a_plan_keeps_dropped_buffers_alive(streams: tuple[OpenClBackend, OpenClBackend]) -> None:
    stream, _ = streams
    _, _, graph = scaled(stream)
    plan = stream.graph_plan_create(graph)
    del graph
    assert stream.graph_plan_compute(plan) is Status.SUCCESS
    stream.synchronize()


def test_the_abort_callback_stops_between_steps(streams: tuple[OpenClBackend, OpenClBackend]) -> None:
    stream, _ = streams
    asked: list[int] = []
    abort = reg_by_name("OpenCL").get_proc_address("set_abort_callback")
    assert abort is not None
    a, y, graph = scaled(stream)
    a.set(np.ones(1000, np.float32))
    y.memset(0)
    abort(stream, lambda: asked.append(1) is None)
    assert stream.graph_compute(graph) is Status.ABORTED
    assert asked == [1]
    assert not y.to_numpy().any()
    abort(stream, None)
    assert stream.graph_compute(graph) is Status.SUCCESS
    assert y.to_numpy()[0] == 2


def test_an_op_without_a_kernel_is_refused_by_name(streams: tuple[OpenClBackend, OpenClBackend]) -> None:
    stream, _ = streams
    ctx = Context()
    a = ctx.new_tensor(DType.F64, (8,), "a")
    y = ctx.scale(a, 2.0)
    alloc_ctx_tensors(ctx, stream)
    with pytest.raises(UnsupportedOpError, match=r"SCALE.*'a' is f64"):
        stream.graph_compute(Graph().build_forward_expand(y))


def test_threads_with_streams_of_their_own_do_not_disturb_each_other() -> None:
    device = device_by_name("OpenCL0")
    wrong: list[object] = []

    def work(seed: int) -> None:
        try:
            with device.init_backend() as stream:
                assert isinstance(stream, OpenClBackend)
                a, y, graph = scaled(stream, float(seed))
                for i in range(30):
                    a.set(np.full(1000, i, np.float32))
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
