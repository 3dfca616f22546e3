"""OpenCL buffers and transfers: what is OpenCL's alone. Memory counted, events kept, host memory in place."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import numpy as np
import pyopencl as cl
import pytest

from ggmlb import Context, DType, Graph
from ggmlb.backends.opencl.buffer import OpenClBuffer
from ggmlb.core.errors import AllocationError, BackendError
from ggmlb.interface import tensor_alloc
from tests.support.gpus import OPENCL, device_fixture, held, leaf

if TYPE_CHECKING:
    from ggmlb.backends.opencl.backend import OpenClBackend
    from ggmlb.backends.opencl.device import OpenClDevice

device = device_fixture(OPENCL)


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


def test_a_synchronous_write_touches_no_buffer_that_other_work_holds(
    stream: OpenClBackend, other: OpenClBackend
) -> None:
    busy, free = leaf(stream), leaf(other)
    with held(stream):
        stream.set_tensor_async(busy, np.ones(1000, np.float32))
        free.set(np.full(1000, 3, np.float32))  # must not wait
        assert free.to_numpy()[0] == 3
    stream.synchronize()
    assert busy.to_numpy()[0] == 1


def test_many_async_transfers_keep_few_events(stream: OpenClBackend) -> None:
    t = leaf(stream)
    for i in range(2000):
        stream.set_tensor_async(t, np.full(1000, i, np.float32))
        if i % 500 == 0:
            stream.queue.finish()
    assert len(stream._held) < 1000
    stream.synchronize()
    assert t.to_numpy()[0] == 1999


def test_a_buffer_freed_with_work_pending_stays_until_it_is_done(
    device: OpenClDevice, stream: OpenClBackend
) -> None:
    gc.collect()
    free, _ = device.memory
    t, keep = leaf(stream), leaf(stream)
    out = np.empty(1000, np.float32)
    t.set(np.full(1000, 6, np.float32))
    with held(stream):
        stream.get_tensor_async(t, out)
        buffer = t.buffer
        used = free - device.memory[0]
        buffer.free()
        assert free - device.memory[0] == used, "its memory is still in use"
    stream.synchronize()
    assert np.array_equal(out, np.full(1000, 6))
    assert free - device.memory[0] == used - buffer.size
    keep.buffer.free()


def test_work_that_fails_is_reported_at_the_next_synchronize(stream: OpenClBackend) -> None:
    t = leaf(stream)
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


def test_a_host_array_is_used_in_place(device: OpenClDevice, stream: OpenClBackend) -> None:
    if not device.caps.buffer_from_host_ptr:
        with pytest.raises(BackendError, match="not share the host"):
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
