"""OpenCL buffers and transfers: bounds, order, host memory without copies, memory given back."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import numpy as np
import pyopencl as cl
import pytest

from ggmlb import Context, DType, Graph, alloc_ctx_tensors, device_by_name
from ggmlb.backends.opencl.backend import OpenClBackend
from ggmlb.backends.opencl.buffer import OpenClBuffer
from ggmlb.backends.opencl.device import OpenClDevice
from ggmlb.errors import AllocationError, ArgumentError, BackendError, BoundsError, FreedError
from ggmlb.interface import tensor_alloc, tensor_copy, tensor_copy_async

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ggmlb.tensor import Tensor


@pytest.fixture
def device() -> OpenClDevice:
    found = device_by_name("OpenCL0")
    assert isinstance(found, OpenClDevice)
    return found


@pytest.fixture
def stream(device: OpenClDevice) -> Iterator[OpenClBackend]:
    with device.init_backend() as backend:
        assert isinstance(backend, OpenClBackend)
        yield backend


@pytest.fixture
def other(device: OpenClDevice) -> Iterator[OpenClBackend]:
    with device.init_backend() as backend:
        assert isinstance(backend, OpenClBackend)
        yield backend


def leafs(backend: OpenClBackend, n: int, n_elements: int = 1000) -> list[Tensor]:
    ctx = Context()
    made = [ctx.new_tensor(DType.F32, (n_elements,), f"t{i}") for i in range(n)]
    alloc_ctx_tensors(ctx, backend)
    return made


def gate(backend: OpenClBackend) -> cl.UserEvent:
    """Hold up a queue until the event is completed."""
    event = cl.UserEvent(backend.device.context)
    cl.enqueue_barrier(backend.queue, wait_for=[event])
    return event


def open_gate(event: cl.UserEvent) -> None:
    event.set_status(cl.command_execution_status.COMPLETE)


def test_raw_bytes_come_back(stream: OpenClBackend) -> None:
    (t,) = leafs(stream, 1)
    data = np.random.default_rng(0).integers(0, 256, t.nbytes, np.uint8)
    t.set(data)
    assert np.array_equal(t.get(), data)
    t.set(b"\1\2\3", 5)
    assert bytes(t.get(4, 5)) == bytes([data[4], 1, 2, 3, data[8]])
    t.memset(7, 10, 20)
    assert np.array_equal(t.get(10, 20), np.full(20, 7))
    assert t.get(9, 1)[0] == data[9]
    assert t.get(30, 1)[0] == data[30]


def test_clear_fills_the_whole_buffer(stream: OpenClBackend) -> None:
    (t,) = leafs(stream, 1)
    assert t.buffer is not None
    t.buffer.clear(0x5A)
    assert np.array_equal(t.get(), np.full(t.nbytes, 0x5A))


def test_transfers_beyond_the_end_are_refused(stream: OpenClBackend) -> None:
    (t,) = leafs(stream, 1)
    with pytest.raises(BoundsError):
        t.set(np.zeros(t.nbytes + 1, np.uint8))
    with pytest.raises(BoundsError):
        t.get(t.nbytes - 3, 4)
    with pytest.raises(BoundsError):
        stream.set_tensor_async(t, np.zeros(8, np.uint8), t.nbytes - 4)


def test_a_buffer_of_size_0_works(stream: OpenClBackend) -> None:
    with stream.alloc_buffer(0) as buffer:
        ctx = Context()
        a, b = (ctx.new_tensor(DType.F32, (4, 0)) for _ in range(2))
        y = ctx.add(a, b)
        for t in (a, b, y):
            tensor_alloc(buffer, t, 0)
        a.set(b"")
        buffer.clear(1)
        stream.graph_compute(Graph().build_forward_expand(y))
        assert y.get().size == 0


def test_memory_is_counted_and_given_back(device: OpenClDevice, stream: OpenClBackend) -> None:
    gc.collect()
    free, total = device.memory
    assert 0 < free <= total
    buffer = stream.alloc_buffer(1 << 20)
    assert device.memory == (free - (1 << 20), total)
    buffer.free()
    assert device.memory == (free, total)
    with pytest.raises(FreedError):
        buffer.clear(0)


def test_memory_of_a_dropped_buffer_is_given_back(device: OpenClDevice, stream: OpenClBackend) -> None:
    gc.collect()
    free, _ = device.memory
    stream.alloc_buffer(1 << 20)
    gc.collect()
    assert device.memory[0] == free


def test_too_much_memory_is_an_allocation_error(device: OpenClDevice) -> None:
    buft = device.buffer_type
    with pytest.raises(AllocationError, match="at most") as caught:
        buft.alloc_buffer(buft.max_size + 1)
    assert caught.value.asked == buft.max_size + 1
    assert (caught.value.free, caught.value.total) == device.memory
    piece = min(buft.max_size, 1 << 30)
    held = []
    free = device.memory[0]
    with pytest.raises(AllocationError, match="no room"):  # the runtime would lend it, and fail later
        for _ in range(free // piece + 2):
            held.append(buft.alloc_buffer(piece))
    for buffer in held:
        buffer.free()
    assert device.memory[0] == free


def test_a_synchronous_read_waits_for_queued_work(stream: OpenClBackend) -> None:
    ctx = Context()
    a = ctx.new_tensor(DType.F32, (1 << 20,))
    y = ctx.scale(a, 2.0)
    alloc_ctx_tensors(ctx, stream)
    graph = Graph().build_forward_expand(y)
    for i in range(5):
        a.set(np.full(1 << 20, i, np.float32))
        stream.graph_compute_async(graph)
        assert np.array_equal(y.to_numpy(), np.full(1 << 20, 2 * i))


def test_a_synchronous_write_touches_no_buffer_that_other_work_holds(
    stream: OpenClBackend, other: OpenClBackend
) -> None:
    (held,), (free,) = leafs(stream, 1), leafs(other, 1)
    closed = gate(stream)
    stream.set_tensor_async(held, np.ones(1000, np.float32))
    free.set(np.full(1000, 3, np.float32))  # must not wait for the gate
    assert free.to_numpy()[0] == 3
    open_gate(closed)
    stream.synchronize()
    assert held.to_numpy()[0] == 1


def test_async_transfers_run_in_order(stream: OpenClBackend) -> None:
    (t,) = leafs(stream, 1)
    first, second = (np.empty(1000, np.float32) for _ in range(2))
    closed = gate(stream)
    stream.set_tensor_async(t, np.full(1000, 1, np.float32))
    stream.get_tensor_async(t, first)
    stream.set_tensor_async(t, np.full(1000, 2, np.float32))
    stream.get_tensor_async(t, second)
    open_gate(closed)
    stream.synchronize()
    assert first[0] == 1
    assert second[0] == 2


def test_the_host_array_of_an_async_write_is_kept_alive(stream: OpenClBackend) -> None:
    (t,) = leafs(stream, 1, 1 << 20)
    closed = gate(stream)
    stream.set_tensor_async(t, np.full(1 << 20, 5, np.float32))
    gc.collect()
    junk = [np.zeros(1 << 20, np.float32) for _ in range(4)]
    open_gate(closed)
    stream.synchronize()
    assert np.array_equal(t.to_numpy(), np.full(1 << 20, 5))
    assert junk


def test_many_async_transfers_keep_few_events(stream: OpenClBackend) -> None:
    (t,) = leafs(stream, 1)
    for i in range(2000):
        stream.set_tensor_async(t, np.full(1000, i, np.float32))
        if i % 500 == 0:
            stream.queue.finish()
    assert len(stream._held) < 1000
    stream.synchronize()
    assert t.to_numpy()[0] == 1999


def test_copies_between_streams_are_ordered_on_both_sides(
    stream: OpenClBackend, other: OpenClBackend
) -> None:
    (src,), (dst,) = leafs(stream, 1), leafs(other, 1)
    dst.set(np.zeros(1000, np.float32))
    result = np.empty(1000, np.float32)
    closed = gate(stream)
    stream.set_tensor_async(src, np.full(1000, 1, np.float32))
    tensor_copy_async(stream, other, src, dst)
    other.get_tensor_async(dst, result)  # later on the destination: must see the copy
    stream.set_tensor_async(src, np.full(1000, 2, np.float32))  # later on the source: must not be copied
    open_gate(closed)
    other.synchronize()
    stream.synchronize()
    assert np.array_equal(result, np.full(1000, 1))
    assert src.to_numpy()[0] == 2


def test_a_copy_between_others_memory_is_declined(stream: OpenClBackend, other: OpenClBackend) -> None:
    (src,) = leafs(stream, 1)
    with device_by_name("CPU").init_backend() as cpu:
        ctx = Context()
        host = ctx.new_tensor(DType.F32, (1000,))
        alloc_ctx_tensors(ctx, cpu)
        assert not other.cpy_tensor_async(cpu, src, host)
        assert not other.cpy_tensor_async(stream, src, host)
        src.set(np.full(1000, 4, np.float32))
        tensor_copy_async(stream, cpu, src, host)
        assert host.to_numpy()[0] == 4


def test_an_overlapping_copy_is_staged(stream: OpenClBackend) -> None:
    ctx = Context()
    base = ctx.new_tensor(DType.F32, (100,))
    low, high = ctx.view_1d(base, 60, 0), ctx.view_1d(base, 60, 160)
    alloc_ctx_tensors(ctx, stream)
    base.set_array(np.arange(100, dtype=np.float32))
    tensor_copy(low, high)
    assert np.array_equal(base.to_numpy()[40:], np.arange(60))
    base.set_array(np.arange(100, dtype=np.float32))
    tensor_copy_async(stream, stream, low, high)
    assert np.array_equal(base.to_numpy()[40:], np.arange(60))


def test_a_buffer_freed_with_work_pending_stays_until_it_is_done(
    device: OpenClDevice, stream: OpenClBackend
) -> None:
    gc.collect()
    free, _ = device.memory
    (t,) = leafs(stream, 1)
    (keep,) = leafs(stream, 1)
    out = np.empty(1000, np.float32)
    t.set(np.full(1000, 6, np.float32))
    closed = gate(stream)
    stream.get_tensor_async(t, out)
    buffer = t.buffer
    assert buffer is not None
    used = free - device.memory[0]
    buffer.free()
    assert free - device.memory[0] == used, "its memory is still in use"
    open_gate(closed)
    stream.synchronize()
    assert np.array_equal(out, np.full(1000, 6))
    assert free - device.memory[0] == used - buffer.size
    assert keep.buffer is not None
    keep.buffer.free()


def test_work_that_fails_is_reported_at_the_next_synchronize(stream: OpenClBackend) -> None:
    (t,) = leafs(stream, 1)
    t.set(np.zeros(1000, np.float32))
    failing = cl.UserEvent(stream.device.context)
    assert isinstance(t.buffer, OpenClBuffer)
    ones = np.ones(1000, np.float32)
    doomed = cl.enqueue_copy(stream.queue, t.buffer.memory, ones, wait_for=[failing], is_blocking=False)
    stream._hold(doomed, t.buffer)
    stream.set_tensor_async(t, np.ones(1000, np.float32))
    failing.set_status(-5)
    with pytest.raises(BackendError):
        stream.synchronize()
    stream.set_tensor_async(t, np.full(1000, 2, np.float32))
    stream.synchronize()
    assert t.to_numpy()[0] == 2


def test_the_host_buffer_is_numpy_memory(device: OpenClDevice, stream: OpenClBackend) -> None:
    buft = device.host_buffer_type
    assert buft.name == "OpenCL0_Host"
    assert buft.is_host
    with buft.alloc_buffer(4096) as buffer:
        ctx = Context()
        t = ctx.new_tensor(DType.F32, (1000,))
        tensor_alloc(buffer, t, 0)
        values = buffer.base[: t.nbytes].view(np.float32)
        values[...] = np.arange(1000)
        assert np.array_equal(t.to_numpy(), np.arange(1000))
        t.memset(0)
        assert not values.any()
        (there,) = leafs(stream, 1)
        values[...] = np.arange(1000)
        stream.set_tensor_async(there, values)
        values_back = buffer.base[: t.nbytes].view(np.float32)
        stream.synchronize()
        values_back[...] = 0
        stream.get_tensor_async(there, values_back)
        stream.synchronize()
        assert np.array_equal(t.to_numpy(), np.arange(1000))
        seen = buffer.base
    assert seen[4] == np.arange(1000, dtype=np.float32).view(np.uint8)[4], "a view outlives the buffer"


def test_a_host_array_is_used_in_place(device: OpenClDevice, stream: OpenClBackend) -> None:
    if not device.caps.buffer_from_host_ptr:
        with pytest.raises(BackendError, match="memory of its own"):
            device.buffer_from_host_ptr(np.zeros(8, np.uint8))
        return
    memory = np.zeros(2 * 1024, np.float32)
    free = device.memory
    with device.buffer_from_host_ptr(memory) as buffer:
        assert device.memory == free, "it takes no memory of the device"
        ctx = Context()
        a = ctx.new_tensor(DType.F32, (1000,))
        y = ctx.scale(a, 3.0)
        tensor_alloc(buffer, a, 0)
        tensor_alloc(buffer, y, 4096)
        memory[:1000] = np.arange(1000)
        stream.graph_compute(Graph().build_forward_expand(y))
        assert np.array_equal(memory[1024:2024], 3 * np.arange(1000, dtype=np.float32))
        assert stream.supports_buft(buffer.buft)


def test_read_only_host_memory_is_read_and_not_written(device: OpenClDevice, stream: OpenClBackend) -> None:
    memory = np.arange(1000, dtype=np.float32)
    memory.flags.writeable = False
    with device.buffer_from_host_ptr(memory) as buffer:
        ctx = Context()
        a = ctx.new_tensor(DType.F32, (1000,))
        tensor_alloc(buffer, a, 0)
        out = Context()
        y = out.scale(a, 2.0)
        alloc_ctx_tensors(out, stream)
        stream.graph_compute(Graph().build_forward_expand(y))
        assert np.array_equal(y.to_numpy(), 2 * memory)
        with pytest.raises(BackendError, match="read-only"):
            a.set(np.zeros(1000, np.float32))
        with pytest.raises(BackendError, match="read-only"):
            stream.set_tensor_async(a, np.zeros(1000, np.float32))
        with pytest.raises(BackendError, match=r"cannot clear.*read-only"):
            buffer.clear()


def test_the_host_arrays_of_buffers_must_be_contiguous(device: OpenClDevice) -> None:
    with pytest.raises(ArgumentError, match="contiguous"):
        device.buffer_from_host_ptr(np.zeros((8, 8), np.float32)[:, ::2])
    assert isinstance(device.buffer_from_host_ptr(np.empty(0, np.uint8)), OpenClBuffer)
