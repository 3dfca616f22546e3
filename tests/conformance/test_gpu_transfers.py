"""Buffers and transfers of a GPU backend: what the conformance kit does not ask of every device."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest

from ggmlb import Backend, Context, Device, DType, alloc_ctx_tensors, device_by_name
from ggmlb.core.errors import FreedError
from ggmlb.interface import tensor_copy, tensor_copy_async
from tests.support.gpus import held, leaf

N = 1000


def full(value: float, n: int = N) -> np.ndarray:
    return np.full(n, value, np.float32)


def test_pieces_closer_than_they_are_long_are_moved_in_order(stream: Backend) -> None:
    t = leaf(stream, 25)
    t.memset(0)
    t.buffer.set_tensor_2d(t, np.arange(40, dtype=np.uint8), 0, 8, 3, 4, 10)
    assert t.get(0, 16).tolist() == [0, 1, 2, 3, 10, 11, 12, 13, 20, 21, 22, 23, 24, 25, 26, 27]


def test_memory_is_given_back(device: Device, stream: Backend) -> None:
    size = 64 << 20
    gc.collect()
    free, total = device.memory
    assert 0 < free <= total
    buffer = stream.alloc_buffer(size)
    assert free - device.memory[0] >= size
    buffer.free()
    assert free - device.memory[0] < size
    with pytest.raises(FreedError):
        buffer.clear(0)
    stream.alloc_buffer(size)  # dropped
    gc.collect()
    assert free - device.memory[0] < size


@pytest.mark.parametrize("pinned", [True, False])
def test_host_memory_of_a_transfer_is_kept_until_it_is_done(
    device: Device, stream: Backend, pinned: bool
) -> None:
    t, data, buft = leaf(stream), full(5), device.host_buffer_type
    assert buft is not None
    if pinned:
        buffer = buft.alloc_buffer(4 * N)
        buffer.base[...] = data.view(np.uint8)
        data = buffer.base.view(np.float32)
        buffer.free()
        del buffer
    memory = weakref.ref(data if data.base is None else data.base)
    with held(stream):
        stream.set_tensor_async(t, data)
        del data
        gc.collect()
        assert memory() is not None
        for other in [buft.alloc_buffer(4 * N) for _ in range(4)]:
            other.clear(9)
    out = full(0)
    stream.get_tensor_async(t, out)
    stream.synchronize()
    gc.collect()
    assert memory() is None, "it is let go once the transfer is done, by the next one at the latest"
    assert np.array_equal(out, full(5))


def test_a_copy_between_others_memory_is_declined(stream: Backend, other: Backend) -> None:
    src = leaf(stream)
    with device_by_name("CPU").init_backend() as cpu:
        host = leaf(cpu)
        assert not other.cpy_tensor_async(cpu, src, host)
        assert not other.cpy_tensor_async(stream, src, host)
        src.set(full(4))
        tensor_copy_async(stream, cpu, src, host)
        assert host.to_numpy()[0] == 4


def test_an_overlapping_copy_is_staged(stream: Backend) -> None:
    ctx = Context()
    base = ctx.new_tensor(DType.F32, (100,))
    low, high = ctx.view_1d(base, 60, 0), ctx.view_1d(base, 60, 160)
    alloc_ctx_tensors(ctx, stream)
    base.set_array(np.arange(100, dtype=np.float32))
    tensor_copy(low, high)
    assert np.array_equal(base.to_numpy()[40:], np.arange(60))
    base.set_array(np.arange(100, dtype=np.float32))
    assert not stream.cpy_tensor_async(stream, low, high)
    tensor_copy_async(stream, stream, low, high)
    assert np.array_equal(base.to_numpy()[40:], np.arange(60))
