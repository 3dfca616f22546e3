"""A CUDA device and its memory: what is CUDA's alone. Pinned memory, others' arrays, allocation."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest

from ggmlb import Context, DType, Graph, alloc_ctx_tensors
from ggmlb.backends.cuda.backend import CudaBackend
from ggmlb.backends.cuda.device import CudaDevice
from ggmlb.backends.cuda.stream import MAX_HELD
from ggmlb.backends.gpu.buffer import PinnedBuffer
from ggmlb.core.enums import DeviceType
from ggmlb.core.errors import ArgumentError, BackendError
from ggmlb.core.tensor import Tensor
from ggmlb.interface import tensor_alloc, tensor_copy
from tests.support.gpus import CUDA, device_fixture, first, hold_up, is_played, is_reached, leaf, scaled

device = device_fixture(*CUDA)


def test_the_device_tells_what_it_is(device: CudaDevice) -> None:
    props = device.props
    assert props.name == "CUDA0"
    assert props.type in (DeviceType.GPU, DeviceType.IGPU)
    assert {name for name, is_true in props.caps.as_dict().items() if is_true} == {
        "async",
        "host_buffer",
        "events",
    }
    assert 0 < props.memory_free <= props.memory_total
    domain, bus, slot = str(props.device_id).split(":")
    assert (len(domain), len(bus), len(slot)) == (4, 2, 4)
    assert device.facts.capability >= 50
    with pytest.raises(ArgumentError, match="takes none"):
        device.init_backend({"n_threads": 3})


def test_host_memory_is_pinned_and_not_the_devices_own(device: CudaDevice, stream: CudaBackend) -> None:
    buft = device.host_buffer_type
    assert buft.name == "CUDA_Host"
    assert not stream.supports_buft(buft), "kernels do not compute in host memory"
    with buft.alloc_buffer(4096) as buffer:
        assert isinstance(buffer, PinnedBuffer)
        assert buffer.why_not_pinned is None


def test_memory_that_is_leaving_is_waited_for_before_an_allocation_fails(
    device: CudaDevice, stream: CudaBackend
) -> None:
    gc.collect()
    size = int(device.memory[0] * 0.6) // 4 * 4
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


def test_many_async_transfers_keep_few_arrays(stream: CudaBackend) -> None:
    t = leaf(stream)
    for i in range(5 * MAX_HELD):
        stream.set_tensor_async(t, np.full(1000, i, np.float32))
        if i % 50 == 0:
            stream.stream.synchronize()
    assert len(stream._held) < 3 * MAX_HELD
    stream.synchronize()
    assert not len(stream._held)
    assert t.to_numpy()[0] == 5 * MAX_HELD - 1


def test_arrays_of_many_pending_transfers_are_all_kept(stream: CudaBackend) -> None:
    t = leaf(stream)
    alive = []
    hold_up(stream, 100)
    for i in range(2 * MAX_HELD):
        data = np.full(1000, i, np.float32)
        alive.append(weakref.ref(data))
        stream.set_tensor_async(t, data)
        del data
    gc.collect()
    first = stream._held._events[0][0]
    assert is_reached(stream.device, first) or all(array() is not None for array in alive)
    stream.synchronize()


@pytest.mark.parametrize("how", ["cpy_tensor_async", "copy_on_stream"])
@pytest.mark.parametrize("freed", [0, 1])
def test_memory_freed_with_a_copy_pending_stays_until_it_is_done(
    stream: CudaBackend, other: CudaBackend, how: str, freed: int
) -> None:
    src, dst = leaf(stream), leaf(other)
    src.set(np.full(1000, 6, np.float32))
    dst.memset(0)
    hold_up(other)
    args = (stream,) if how == "cpy_tensor_async" else ()
    assert getattr(other, how)(*args, src, dst)
    assert src.buffer is not None and dst.buffer is not None
    (src, dst)[freed].buffer.free()  # type: ignore[union-attr]
    stream.device.memory_pool.sweep()
    for _ in range(4):  # would get the memory, and overwrite it
        stream.alloc_buffer(4000).clear(1)
    other.synchronize()
    left = (dst, src)[freed]
    assert np.array_equal(left.to_numpy(), np.full(1000, 6))


def test_a_synchronous_copy_waits_for_work_queued_with_either_side(
    stream: CudaBackend, other: CudaBackend
) -> None:
    src, dst = leaf(stream), leaf(other)
    src.set(np.zeros(1000, np.float32))
    hold_up(stream), hold_up(other)
    stream.set_tensor_async(src, np.full(1000, 1, np.float32))
    other.set_tensor_async(dst, np.full(1000, 2, np.float32))
    tensor_copy(src, dst)
    other.synchronize()
    assert dst.to_numpy()[0] == 1


def test_a_tensor_is_an_array_of_the_devices_library(stream: CudaBackend) -> None:
    ctx = Context()
    base = ctx.new_tensor(DType.F32, (10, 6))
    view = ctx.transpose(ctx.view_2d(base, 4, 6, 40, 8))
    alloc_ctx_tensors(ctx, stream)
    data = np.arange(60, dtype=np.float32).reshape(6, 10)
    base.set(data)
    array = view.as_array()
    assert isinstance(array, np.ndarray) == is_played(stream)
    assert array.shape == (4, 6)
    host = array if isinstance(array, np.ndarray) else array.get()
    assert np.array_equal(host, data[:, 2:6].T)
    used, size = stream.device.memory[0], base.buffer.size
    base.buffer.free()
    assert stream.device.memory[0] < used + size, "the memory stays while an array of it lives"
    host = array if isinstance(array, np.ndarray) else array.get()
    assert np.array_equal(host, data[:, 2:6].T)
    if isinstance(array, np.ndarray):  # a card's driver gives memory back in large pieces
        del array, host
        gc.collect()
        assert stream.device.memory[0] >= used + size


@pytest.mark.parametrize("protocol", ["__dlpack__", "__cuda_array_interface__"])
def test_memory_handed_to_another_library_can_be_read_at_once(stream: CudaBackend, protocol: str) -> None:
    a, y, graph = scaled(stream)
    a.set(np.ones(1000, np.float32))
    stream.graph_compute(graph)
    hold_up(stream, 50)
    stream.graph_compute_async(graph)
    event = stream.device.event_new()
    stream.event_record(event)
    assert not is_reached(stream.device, event.handle)
    handed = getattr(y, protocol, None)  # the simulated driver's library has no interface of CUDA's
    if callable(handed):
        handed()
    assert is_reached(stream.device, event.handle)


class BorrowedMemory:
    """Memory of a device as another library lends it: 3 rows of 4 floats, 10 apart, from the third on."""

    def __init__(self, address: int, stream: int = 0) -> None:
        self.shape, self.strides, self.dtype = (3, 4), (40, 4), np.dtype(np.float32)
        self.ndim = 2
        place = {"data": (address + 8, False), "shape": (3, 4), "strides": (40, 4), "typestr": "<f4"}
        self.__cuda_array_interface__ = {**place, "version": 3, **({"stream": stream} if stream else {})}

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0


def test_where_memory_cannot_be_pinned_other_memory_is_given(
    device: CudaDevice, stream: CudaBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = device.driver

    def refuse(nbytes: int) -> None:
        raise driver.errors[0](2)

    with monkeypatch.context() as patch, pytest.warns(RuntimeWarning, match="no pinned memory for 4,"):
        patch.setattr(driver, "pinned", refuse)
        buffer = device.host_buffer_type.alloc_buffer(4000)
    assert isinstance(buffer, PinnedBuffer)
    assert buffer.why_not_pinned is not None
    monkeypatch.setenv("GGMLB_CUDA_NO_PINNED", "1")
    other = device.host_buffer_type.alloc_buffer(4000)
    assert isinstance(other, PinnedBuffer)
    assert other.why_not_pinned == "GGMLB_CUDA_NO_PINNED is set"
    t = leaf(stream)
    buffer.base[...] = 3
    stream.set_tensor_async(t, buffer.base)
    stream.get_tensor_async(t, other.base)
    stream.synchronize()
    assert (other.base == 3).all()


def test_a_callers_memory_is_pinned_where_it_is_allowed(
    device: CudaDevice, stream: CudaBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = np.arange(4096, dtype=np.float32)
    with pytest.raises(BackendError, match="GGMLB_CUDA_REGISTER_HOST=1"):
        device.buffer_from_host_ptr(memory)
    monkeypatch.setenv("GGMLB_CUDA_REGISTER_HOST", "1")
    assert device.caps.buffer_from_host_ptr
    buffer = device.buffer_from_host_ptr(memory)
    assert isinstance(buffer, PinnedBuffer)
    assert buffer.why_not_pinned is None
    ctx = Context()
    t = ctx.new_tensor(DType.F32, (1000,))
    tensor_alloc(buffer, t, 256)
    there = leaf(stream)
    tensor_copy(t, there)
    assert np.array_equal(there.to_numpy(), memory[64:1064])
    del t, ctx, buffer
    gc.collect()
    assert not device.host_buffer_type.registrations.pages
    again = device.buffer_from_host_ptr(memory)  # unregistered, so it can be registered again
    assert isinstance(again, PinnedBuffer)
    assert again.why_not_pinned is None


def test_a_callers_memory_stays_pinned_while_a_transfer_uses_it(
    device: CudaDevice, stream: CudaBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GGMLB_CUDA_REGISTER_HOST", "1")
    memory, t = np.arange(1000, dtype=np.float32), leaf(stream)
    first, second = (device.buffer_from_host_ptr(memory) for _ in range(2))
    hold_up(stream)
    stream.set_tensor_async(t, first.base)
    del first
    gc.collect()
    assert device.host_buffer_type.registrations.pages, "a transfer and another buffer use it"
    del second
    gc.collect()
    assert device.host_buffer_type.registrations.pages, "a transfer uses it"
    stream.synchronize()
    gc.collect()
    assert not device.host_buffer_type.registrations.pages
    assert np.array_equal(t.to_numpy(), memory)


def test_a_stream_that_is_dropped_leaves_when_its_work_is_done() -> None:
    device = first("played")
    driver: Any = device.driver
    kept = device.init_backend()
    a, _, _ = scaled(kept)
    a.set(np.zeros(1000, np.float32))
    kept.synchronize()
    before = driver.cards.leftovers()
    for _ in range(3):
        dropped = device.init_backend()
        ctx = Context()
        x = ctx.new_tensor(DType.F32, (1000, 64))
        graph = Graph().build_forward_expand(ctx.sqr(ctx.mul_mat(x, x)))
        with alloc_ctx_tensors(ctx, dropped):
            for _ in range(3):
                dropped.graph_compute_async(graph)
        dropped.event_record(device.event_new())
        data = np.full(1000, 7, np.float32)
        dropped.set_tensor_async(a, data)
        array = weakref.ref(data)
        del dropped, data
        assert array() is not None, "the copy is still queued"
        assert (a.to_numpy() == 7).all(), "a read is ordered after the work of a stream that was dropped"
        kept.synchronize()
        kept.synchronize()
        assert array() is None
    del ctx, graph, x
    kept.synchronize()
    assert driver.cards.leftovers() == before


def test_arrays_within_locked_memory_share_its_lock(
    device: CudaDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GGMLB_CUDA_REGISTER_HOST", "1")
    locked = device.host_buffer_type.registrations
    memory = np.zeros(3 << 12, np.uint8)
    parts = slice(None, 1 << 12), slice(None), slice(1 << 12, 2 << 12), slice(None)
    whole = device.buffer_from_host_ptr(memory[: 2 << 12])
    for part in parts:  # at the same address, beyond the end, within
        buffer = device.buffer_from_host_ptr(memory[part])
        assert isinstance(buffer, PinnedBuffer)
        assert (buffer.why_not_pinned is None) == (buffer.size <= whole.size)
        del buffer
        gc.collect()
        assert [p.stop - p.start for p in locked.pages] == [2 << 12]
    within = device.buffer_from_host_ptr(memory[100:200])
    del whole
    gc.collect()
    assert locked.pages, "an array within uses them"
    assert locked.add(memory[150:160])
    locked.remove(memory[200:].ctypes.data)  # never added
    del within
    gc.collect()
    assert locked.pages, "one that was registered by name uses them"
    for _ in range(2):
        locked.remove(memory[150:].ctypes.data)
    assert not locked.pages
    frozen = memory[:100]
    frozen.flags.writeable = False
    assert locked.add(frozen)
    assert not locked.add(memory[:50]), "what is locked for reading is not written"
    locked.remove(frozen.ctypes.data)
    assert not locked.pages


@pytest.mark.parametrize("use", ["none", "plan", "transfer"])
def test_memory_of_another_library_is_held_until_no_stream_uses_it(
    device: CudaDevice, stream: CudaBackend, use: str
) -> None:
    ctx = Context()
    lender, y = ctx.new_tensor(DType.F32, (10, 3)), ctx.new_tensor(DType.F32, (4, 3))
    with alloc_ctx_tensors(ctx, stream):
        lender.set(np.arange(30, dtype=np.float32))
        array = BorrowedMemory(lender.buffer.address)
        owner = weakref.ref(array)
        found = device.adopt(array)
        assert found is not None
        tensor = Tensor(DType.F32, (4, 3, 1, 1), (4, 40, 120, 120))
        tensor.buffer, tensor.offset = found
        pinned = device.host_buffer_type.alloc_buffer(256)
        out = np.asarray(pinned.base)[:16].view(np.float32)
        hold_up(stream)
        if use == "plan":
            stream.graph_compute_async(Graph().build_forward_expand(Context().cpy(tensor, y)))
            stream._plans.clear()
        elif use == "transfer":
            stream.get_tensor_async(tensor, out)
        del tensor, found, array
        gc.collect()
        assert (owner() is None) == (use == "none")
        stream.device.memory_pool.sweep()
        assert (owner() is None) == (use == "none")
        stream.synchronize()
        gc.collect()
        assert owner() is None
        if use == "transfer":
            assert out.tolist() == [2, 3, 4, 5]
    assert device.adopt(np.zeros(4)) is None
