"""Buffers and transfers of a GPU backend: bytes, order, lifetimes, host memory."""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from gpus import held, leaf

from ggmlb import Context, DType, Graph, alloc_ctx_tensors, device_by_name
from ggmlb.errors import ArgumentError, BackendError, BoundsError, FreedError
from ggmlb.interface import tensor_alloc, tensor_copy, tensor_copy_async

if TYPE_CHECKING:
    from ggmlb import Backend, Device

N = 1000


def full(value: float, n: int = N) -> np.ndarray:
    return np.full(n, value, np.float32)


def test_raw_bytes_come_back(stream: Backend) -> None:
    t = leaf(stream)
    data = np.random.default_rng(0).integers(0, 256, t.nbytes, np.uint8)
    t.set(data)
    assert np.array_equal(t.get(), data)
    t.set(b"\1\2\3", 5)
    assert bytes(t.get(4, 5)) == bytes([data[4], 1, 2, 3, data[8]])
    part = np.zeros(4, np.uint8)
    stream.set_tensor_async(t, np.array([9, 8], np.uint8), 6)
    stream.get_tensor_async(t, part, 5)
    stream.synchronize()
    assert part.tolist() == [1, 9, 8, data[8]]
    t.memset(7, 10, 20)
    assert np.array_equal(t.get(10, 20), np.full(20, 7))
    assert t.get(9, 1)[0] == data[9]
    assert t.get(30, 1)[0] == data[30]
    t.buffer.clear(0x5A)
    assert np.array_equal(t.get(), np.full(t.nbytes, 0x5A))


def test_transfers_beyond_the_end_are_refused(stream: Backend) -> None:
    t = leaf(stream)
    for transfer in (
        lambda: t.set(np.zeros(t.nbytes + 1, np.uint8)),
        lambda: t.get(t.nbytes - 3, 4),
        lambda: stream.set_tensor_async(t, np.zeros(8, np.uint8), t.nbytes - 4),
    ):
        with pytest.raises(BoundsError):
            transfer()


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("stride", [5, 9])
def test_strided_pieces(stream: Backend, is_async: bool, stride: int) -> None:
    t = leaf(stream, 25)
    t.memset(0)
    data = np.arange(60, dtype=np.uint8)
    where, suffix = (stream, "_async") if is_async else (t.buffer, "")
    getattr(where, f"set_tensor_2d{suffix}")(t, data, 3, 5, 4, stride, 7)
    out = np.zeros(60, np.uint8)
    getattr(where, f"get_tensor_2d{suffix}")(t, out, 3, 5, 4, stride, 6)
    stream.synchronize()
    want = np.zeros(100, np.uint8)
    for i in range(4):
        want[3 + i * stride :][:5] = data[7 * i :][:5]
        assert np.array_equal(out[6 * i :][:5], data[7 * i :][:5])
    assert np.array_equal(t.get(), want)


def test_pieces_closer_than_they_are_long_are_moved_in_order(stream: Backend) -> None:
    t = leaf(stream, 25)
    t.memset(0)
    t.buffer.set_tensor_2d(t, np.arange(40, dtype=np.uint8), 0, 8, 3, 4, 10)
    assert t.get(0, 16).tolist() == [0, 1, 2, 3, 10, 11, 12, 13, 20, 21, 22, 23, 24, 25, 26, 27]


def test_a_buffer_of_size_0_works(stream: Backend) -> None:
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


def test_a_synchronous_read_waits_for_queued_work(stream: Backend) -> None:
    n = 1 << 16
    ctx = Context()
    a = ctx.new_tensor(DType.F32, (n,))
    y = ctx.scale(a, 2.0)
    alloc_ctx_tensors(ctx, stream)
    graph = Graph().build_forward_expand(y)
    for i in range(5):
        a.set(full(i, n))
        with held(stream):
            stream.graph_compute_async(graph)
        assert np.array_equal(y.to_numpy(), full(2 * i, n))


def test_async_transfers_run_in_order(stream: Backend) -> None:
    t = leaf(stream)
    first, second = full(0), full(0)
    with held(stream):
        stream.set_tensor_async(t, full(1))
        stream.get_tensor_async(t, first)
        stream.set_tensor_async(t, full(2))
        stream.get_tensor_async(t, second)
    stream.synchronize()
    assert (first[0], second[0]) == (1, 2)


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


@pytest.mark.parametrize("waited", [0, 1])
def test_copies_between_streams_are_ordered_on_both_sides(
    stream: Backend, other: Backend, waited: int
) -> None:
    src, dst = leaf(stream), leaf(other)
    dst.set(full(0))
    result = full(0)
    with held(stream):
        stream.set_tensor_async(src, full(1))
        tensor_copy_async(stream, other, src, dst)
        other.get_tensor_async(dst, result)  # later on the destination: must see the copy
        stream.set_tensor_async(src, full(2))  # later on the source: must not be copied
    for backend in ((stream, other), (other, stream))[waited]:
        backend.synchronize()
    assert np.array_equal(result, full(1))
    assert src.to_numpy()[0] == 2


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


def test_the_host_buffer_is_numpy_memory(device: Device, stream: Backend) -> None:
    buft = device.host_buffer_type
    assert buft is not None
    assert buft.is_host
    assert device_by_name("CPU").supports_buft(buft)
    with buft.alloc_buffer(4096) as buffer:
        ctx = Context()
        t = ctx.new_tensor(DType.F32, (N,))
        tensor_alloc(buffer, t, 0)
        values = buffer.base[: t.nbytes].view(np.float32)
        values[...] = np.arange(N)
        assert np.array_equal(t.to_numpy(), np.arange(N))
        there = leaf(stream)
        stream.set_tensor_async(there, values)
        stream.synchronize()
        t.memset(0)
        assert not values.any()
        stream.get_tensor_async(there, values)
        stream.synchronize()
        assert np.array_equal(t.to_numpy(), np.arange(N))
        seen = buffer.base
    assert seen[4] == np.arange(N, dtype=np.float32).view(np.uint8)[4], "a view outlives the buffer"


@pytest.fixture
def takes_host_memory(device: Device, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A device that uses a caller's memory where it lies."""
    monkeypatch.setenv("GGMLB_CUDA_REGISTER_HOST", "1")
    if not device.caps.buffer_from_host_ptr:
        pytest.skip(f"{device.name} has memory of its own")
    return device


def test_read_only_host_memory_is_read_and_not_written(takes_host_memory: Device, stream: Backend) -> None:
    memory = np.arange(N, dtype=np.float32)
    memory.flags.writeable = False
    with takes_host_memory.buffer_from_host_ptr(memory) as buffer:
        ctx = Context()
        t = ctx.new_tensor(DType.F32, (N,))
        tensor_alloc(buffer, t, 0)
        assert np.array_equal(t.to_numpy(), memory)
        for write in (
            lambda: t.set(full(0)),
            lambda: t.memset(0),
            lambda: stream.set_tensor_async(t, full(0)),
            lambda: buffer.clear(),
        ):
            with pytest.raises(BackendError, match="read-only"):
                write()


def test_the_host_arrays_of_buffers_must_be_contiguous(takes_host_memory: Device) -> None:
    with pytest.raises(ArgumentError, match="contiguous"):
        takes_host_memory.buffer_from_host_ptr(np.zeros((8, 8), np.float32)[:, ::2])
    assert takes_host_memory.buffer_from_host_ptr(np.empty(0, np.uint8)).size == 0
