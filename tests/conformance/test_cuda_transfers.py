"""CUDA buffers and transfers: order, lifetime, pinned memory, and memory given back."""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING

import numpy as np
import pytest
from cuda_gate import hold_up

from ggmlb import Context, DType, Graph, alloc_ctx_tensors, device_by_name
from ggmlb.backends.cuda.backend import MAX_HELD, CudaBackend
from ggmlb.backends.cuda.host import CudaHostBuffer
from ggmlb.errors import AllocationError, ArgumentError, BackendError, BoundsError, FreedError
from ggmlb.interface import tensor_alloc, tensor_copy, tensor_copy_async
from ggmlb.tensor import Tensor

if TYPE_CHECKING:
    from ggmlb.backends.cuda.device import CudaDevice


def leafs(backend: CudaBackend, n: int, n_elements: int = 1000) -> list[Tensor]:
    ctx = Context()
    made = [ctx.new_tensor(DType.F32, (n_elements,), f"t{i}") for i in range(n)]
    alloc_ctx_tensors(ctx, backend)
    return made


def test_raw_bytes_come_back(stream: CudaBackend) -> None:
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
    assert t.buffer is not None
    t.buffer.clear(0x5A)
    assert np.array_equal(t.get(), np.full(t.nbytes, 0x5A))
    with pytest.raises(BoundsError):
        stream.set_tensor_async(t, np.zeros(8, np.uint8), t.nbytes - 4)


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("stride", [5, 9])
def test_strided_pieces(stream: CudaBackend, is_async: bool, stride: int) -> None:
    (t,) = leafs(stream, 1, 25)
    t.memset(0)
    data = np.arange(60, dtype=np.uint8)
    where = stream if is_async else t.buffer
    assert where is not None
    suffix = "_async" if is_async else ""
    getattr(where, f"set_tensor_2d{suffix}")(t, data, 3, 5, 4, stride, 7)
    out = np.zeros(60, np.uint8)
    getattr(where, f"get_tensor_2d{suffix}")(t, out, 3, 5, 4, stride, 6)
    stream.synchronize()
    want = np.zeros(100, np.uint8)
    for i in range(4):
        want[3 + i * stride :][:5] = data[7 * i :][:5]
        assert np.array_equal(out[6 * i :][:5], data[7 * i :][:5])
    assert np.array_equal(t.get(), want)


def test_pieces_closer_than_they_are_long_are_moved_in_order(stream: CudaBackend) -> None:
    (t,) = leafs(stream, 1, 25)
    t.memset(0)
    assert t.buffer is not None
    t.buffer.set_tensor_2d(t, np.arange(40, dtype=np.uint8), 0, 8, 3, 4, 10)
    assert t.get(0, 16).tolist() == [0, 1, 2, 3, 10, 11, 12, 13, 20, 21, 22, 23, 24, 25, 26, 27]


def test_a_buffer_of_size_0_works(stream: CudaBackend) -> None:
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


def test_memory_is_given_back(cuda_device: CudaDevice, stream: CudaBackend) -> None:
    size = 64 << 20
    gc.collect()
    free = cuda_device.memory[0]
    buffer = stream.alloc_buffer(size)
    assert free - cuda_device.memory[0] >= size
    buffer.free()
    assert free - cuda_device.memory[0] < size
    with pytest.raises(FreedError):
        buffer.clear(0)
    stream.alloc_buffer(size)  # dropped
    gc.collect()
    assert free - cuda_device.memory[0] < size


def test_too_much_memory_is_an_allocation_error(cuda_device: CudaDevice, stream: CudaBackend) -> None:
    total = cuda_device.memory[1]
    with pytest.raises(AllocationError, match="no room") as caught:
        cuda_device.buffer_type.alloc_buffer(total + 1)
    assert (caught.value.asked, caught.value.total) == (total + 1, total)
    assert 0 < caught.value.free <= total
    (t,) = leafs(stream, 1)
    t.memset(1)
    assert t.get(0, 1)[0] == 1, "everything can be used on"


def test_memory_that_is_leaving_is_waited_for_before_an_allocation_fails(
    cuda_device: CudaDevice, stream: CudaBackend
) -> None:
    gc.collect()
    size = int(cuda_device.memory[0] * 0.6) // 4 * 4
    first = stream.alloc_buffer(size)
    hold_up(stream)
    ctx = Context()
    t = ctx.new_tensor(DType.F32, (1000,))
    tensor_alloc(first, t, 0)
    stream.set_tensor_async(t, np.ones(1000, np.float32))
    first.free()  # its memory is still in use
    second = stream.alloc_buffer(size)
    stream.synchronize()
    second.free()


def test_a_synchronous_read_waits_for_queued_work(stream: CudaBackend) -> None:
    ctx = Context()
    a = ctx.new_tensor(DType.F32, (1 << 16,))
    y = ctx.scale(a, 2.0)
    alloc_ctx_tensors(ctx, stream)
    graph = Graph().build_forward_expand(y)
    for i in range(5):
        a.set(np.full(1 << 16, i, np.float32))
        hold_up(stream, 5)
        stream.graph_compute_async(graph)
        assert np.array_equal(y.to_numpy(), np.full(1 << 16, 2 * i))


def test_async_transfers_run_in_order(stream: CudaBackend) -> None:
    (t,) = leafs(stream, 1)
    first, second = (np.empty(1000, np.float32) for _ in range(2))
    hold_up(stream)
    stream.set_tensor_async(t, np.full(1000, 1, np.float32))
    stream.get_tensor_async(t, first)
    stream.set_tensor_async(t, np.full(1000, 2, np.float32))
    stream.get_tensor_async(t, second)
    stream.synchronize()
    assert (first[0], second[0]) == (1, 2)


@pytest.mark.parametrize("pinned", [True, False])
def test_host_memory_of_a_transfer_is_kept_until_it_is_done(
    cuda_device: CudaDevice, stream: CudaBackend, pinned: bool
) -> None:
    (t,) = leafs(stream, 1)
    data = np.full(1000, 5, np.float32)
    if pinned:
        buffer = cuda_device.host_buffer_type.alloc_buffer(4000)
        buffer.base[...] = data.view(np.uint8)
        data = buffer.base.view(np.float32)
        buffer.free()
    memory = weakref.ref(data if data.base is None else data.base)
    hold_up(stream)
    stream.set_tensor_async(t, data)
    del data
    gc.collect()
    assert memory() is not None
    junk = [cuda_device.host_buffer_type.alloc_buffer(4000) for _ in range(4)]
    for other in junk:
        other.clear(9)
    stream.synchronize()
    gc.collect()
    assert memory() is None, "it is let go once the transfer is done"
    assert np.array_equal(t.to_numpy(), np.full(1000, 5))


def test_many_async_transfers_keep_few_arrays(stream: CudaBackend) -> None:
    (t,) = leafs(stream, 1)
    for i in range(5 * MAX_HELD):
        stream.set_tensor_async(t, np.full(1000, i, np.float32))
        if i % 50 == 0:
            stream.stream.synchronize()
    assert len(stream._held) < 3 * MAX_HELD
    stream.synchronize()
    assert not stream._held
    assert t.to_numpy()[0] == 5 * MAX_HELD - 1


def test_a_copy_between_others_memory_is_declined(stream: CudaBackend, other: CudaBackend) -> None:
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


def test_an_overlapping_copy_is_staged(stream: CudaBackend) -> None:
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


def test_a_buffer_freed_with_work_pending_stays_until_it_is_done(stream: CudaBackend) -> None:
    (t,), (keep,) = leafs(stream, 1), leafs(stream, 1)
    t.set(np.full(1000, 6, np.float32))
    out = np.empty(1000, np.float32)
    hold_up(stream)
    stream.get_tensor_async(t, out)
    assert t.buffer is not None
    t.buffer.free()
    stream.device.memory_pool.sweep()
    for _ in range(4):  # would get the memory, and overwrite it
        stream.alloc_buffer(4000).clear(1)
    stream.synchronize()
    assert np.array_equal(out, np.full(1000, 6))
    assert keep.buffer is not None


def test_a_tensor_is_an_array_of_the_devices_library(stream: CudaBackend) -> None:
    ctx = Context()
    base = ctx.new_tensor(DType.F32, (10, 6))
    view = ctx.transpose(ctx.view_2d(base, 4, 6, 40, 8))
    alloc_ctx_tensors(ctx, stream)
    data = np.arange(60, dtype=np.float32).reshape(6, 10)
    base.set(data)
    array = view.as_array()
    assert isinstance(array, stream.device.driver.xp.ndarray)
    assert array.shape == (4, 6)
    host = array if isinstance(array, np.ndarray) else array.get()
    assert np.array_equal(host, data[:, 2:6].T)
    if not isinstance(array, np.ndarray):
        free = stream.device.memory[0]
        assert base.buffer is not None
        base.buffer.free()
        assert stream.device.memory[0] <= free, "the memory stays while an array of it lives"
        assert np.array_equal(array.get(), data[:, 2:6].T)


class Lent:
    """Memory of a device as another library lends it: 3 rows of 4 floats, 10 apart, from the third on."""

    def __init__(self, address: int) -> None:
        self.shape, self.strides, self.dtype = (3, 4), (40, 4), np.dtype(np.float32)
        self.ndim = 2
        place = {"data": (address + 8, False), "shape": (3, 4), "strides": (40, 4), "typestr": "<f4"}
        self.__cuda_array_interface__ = {**place, "version": 3}

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0


def test_memory_of_another_library_is_used_as_it_lies(cuda_device: CudaDevice, stream: CudaBackend) -> None:
    ctx = Context()
    lender = ctx.new_tensor(DType.F32, (10, 3))
    with alloc_ctx_tensors(ctx, stream):
        data = np.arange(30, dtype=np.float32).reshape(3, 10)
        lender.set(data)
        shared = cuda_device.adopt(Lent(lender.buffer.address))
        assert shared is not None
        buffer, offset = shared
        tensor = Tensor(DType.F32, (4, 3, 1, 1), (4, 40, 120, 120))
        tensor.buffer, tensor.offset = buffer, offset
        assert offset % 256 == 8, "buffers begin where kernels expect it"
        assert np.array_equal(tensor.to_numpy(), data[:, 2:6])
        y = ctx.sqr(tensor)
        with stream.alloc_buffer(4096) as room:
            tensor_alloc(room, y, 0)
            stream.graph_compute(Graph().build_forward_expand(y))
            assert np.array_equal(y.to_numpy(), data[:, 2:6] ** 2)
        before = cuda_device.memory[0]
        buffer.free()
        assert cuda_device.memory[0] == before, "it is the lender's"
        assert np.array_equal(lender.to_numpy(), data)
    assert cuda_device.adopt(np.zeros(4)) is None


def test_the_host_buffer_is_numpy_memory(cuda_device: CudaDevice, stream: CudaBackend) -> None:
    buft = cuda_device.host_buffer_type
    assert buft.name == "CUDA_Host"
    assert buft.is_host
    assert not stream.supports_buft(buft), "kernels do not compute in host memory"
    assert device_by_name("CPU").supports_buft(buft)
    with buft.alloc_buffer(4096) as buffer:
        assert isinstance(buffer, CudaHostBuffer)
        assert buffer.is_pinned
        ctx = Context()
        t = ctx.new_tensor(DType.F32, (1000,))
        tensor_alloc(buffer, t, 0)
        values = buffer.base[: t.nbytes].view(np.float32)
        values[...] = np.arange(1000)
        assert np.array_equal(t.to_numpy(), np.arange(1000))
        (there,) = leafs(stream, 1)
        stream.set_tensor_async(there, values)
        stream.synchronize()
        t.memset(0)
        stream.get_tensor_async(there, values)
        stream.synchronize()
        assert np.array_equal(t.to_numpy(), np.arange(1000))
        seen = buffer.base
    assert seen[4] == np.arange(1000, dtype=np.float32).view(np.uint8)[4], "a view outlives the buffer"


def test_where_memory_cannot_be_pinned_other_memory_is_given(
    cuda_device: CudaDevice, stream: CudaBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = cuda_device.driver

    def refuse(nbytes: int) -> None:
        raise driver.errors[0](2)

    with monkeypatch.context() as patch:
        patch.setattr(driver, "pinned", refuse)
        buffer = cuda_device.host_buffer_type.alloc_buffer(4000)
    assert isinstance(buffer, CudaHostBuffer)
    assert not buffer.is_pinned
    monkeypatch.setenv("GGMLB_CUDA_NO_PINNED", "1")
    other = cuda_device.host_buffer_type.alloc_buffer(4000)
    assert isinstance(other, CudaHostBuffer)
    assert not other.is_pinned
    (t,) = leafs(stream, 1)
    buffer.base[...] = 3
    stream.set_tensor_async(t, buffer.base)
    stream.get_tensor_async(t, other.base)
    stream.synchronize()
    assert (other.base == 3).all()


def test_a_callers_memory_is_pinned_where_it_is_allowed(
    cuda_device: CudaDevice, stream: CudaBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = np.arange(4096, dtype=np.float32)
    with pytest.raises(BackendError, match="GGMLB_CUDA_REGISTER_HOST=1"):
        cuda_device.buffer_from_host_ptr(memory)
    monkeypatch.setenv("GGMLB_CUDA_REGISTER_HOST", "1")
    assert cuda_device.caps.buffer_from_host_ptr
    with pytest.raises(ArgumentError, match="contiguous"):
        cuda_device.buffer_from_host_ptr(np.zeros((8, 8), np.float32)[:, ::2])
    buffer = cuda_device.buffer_from_host_ptr(memory)
    assert isinstance(buffer, CudaHostBuffer)
    assert buffer.is_pinned
    ctx = Context()
    t = ctx.new_tensor(DType.F32, (1000,))
    tensor_alloc(buffer, t, 256)
    (there,) = leafs(stream, 1)
    tensor_copy(t, there)
    assert np.array_equal(there.to_numpy(), memory[64:1064])
    del t, ctx, buffer
    gc.collect()
    assert not cuda_device.registrations._arrays
    again = cuda_device.buffer_from_host_ptr(memory)  # unregistered, so it can be registered again
    assert isinstance(again, CudaHostBuffer)
    assert again.is_pinned


def test_read_only_memory_gives_read_only_tensors(
    cuda_device: CudaDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GGMLB_CUDA_REGISTER_HOST", "1")
    memory = np.arange(1000, dtype=np.float32)
    memory.flags.writeable = False
    with cuda_device.buffer_from_host_ptr(memory) as buffer:  # pinned, where the system can
        ctx = Context()
        t = ctx.new_tensor(DType.F32, (1000,))
        tensor_alloc(buffer, t, 0)
        assert np.array_equal(t.to_numpy(), memory)
        with pytest.raises(BackendError, match="read-only"):
            t.memset(0)
