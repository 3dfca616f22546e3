"""OpenCL buffers and transfers: what is OpenCL's alone. Memory counted, events kept, host memory in place."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyopencl as cl
import pytest

from ggmlb.backends.opencl.buffer import OpenClBuffer
from ggmlb.core.errors import AllocationError, BackendError
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
