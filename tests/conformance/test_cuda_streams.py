"""CUDA devices, streams and events."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import numpy as np
import pytest
from cuda_gate import hold_up

from ggmlb import Context, DType, Graph, alloc_ctx_tensors
from ggmlb.backends.cuda.backend import CudaBackend
from ggmlb.enums import DeviceType
from ggmlb.errors import ArgumentError, FreedError
from ggmlb.interface import tensor_copy_async

if TYPE_CHECKING:
    from ggmlb.backends.cuda.device import CudaDevice
    from ggmlb.tensor import Tensor


def scaled(backend: CudaBackend, factor: float = 2.0, n: int = 1000) -> tuple[Tensor, Tensor, Graph]:
    ctx = Context()
    a = ctx.new_tensor(DType.F32, (n,))
    y = ctx.scale(a, factor)
    alloc_ctx_tensors(ctx, backend)
    return a, y, Graph().build_forward_expand(y)


def test_the_device_tells_what_it_is(cuda_device: CudaDevice) -> None:
    props = cuda_device.props
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
    assert cuda_device.facts.capability >= 50
    with pytest.raises(ArgumentError, match="takes none"):
        cuda_device.init_backend({"n_threads": 3})


def test_an_event_orders_two_streams(stream: CudaBackend, other: CudaBackend) -> None:
    event = stream.device.event_new()
    other.event_wait(event)  # never recorded: reached
    event.synchronize()
    a, y, graph = scaled(stream)
    y.memset(0)
    hold_up(stream)
    stream.set_tensor_async(a, np.ones(1000, np.float32))
    stream.graph_compute_async(graph)
    stream.event_record(event)
    other.event_wait(event)
    stream.event_record(event)  # moved; the wait that was queued is for where it was
    out = np.zeros(1000, np.float32)
    other.get_tensor_async(y, out)
    other.synchronize()
    assert np.array_equal(out, np.full(1000, 2))
    stream.synchronize()
    event.free()
    with pytest.raises(FreedError):
        stream.event_record(event)


@pytest.mark.parametrize("waited", [0, 1])
def test_copies_between_streams_are_ordered_on_both_sides(
    stream: CudaBackend, other: CudaBackend, waited: int
) -> None:
    ctx, ctx2 = Context(), Context()
    src, dst = ctx.new_tensor(DType.F32, (1000,)), ctx2.new_tensor(DType.F32, (1000,))
    alloc_ctx_tensors(ctx, stream)
    alloc_ctx_tensors(ctx2, other)
    dst.set(np.zeros(1000, np.float32))
    result = np.empty(1000, np.float32)
    hold_up(stream)
    stream.set_tensor_async(src, np.full(1000, 1, np.float32))
    tensor_copy_async(stream, other, src, dst)
    other.get_tensor_async(dst, result)  # later on the destination: must see the copy
    stream.set_tensor_async(src, np.full(1000, 2, np.float32))  # later on the source: must not be copied
    for backend in ((stream, other), (other, stream))[waited]:
        backend.synchronize()
    assert np.array_equal(result, np.full(1000, 1))
    assert src.to_numpy()[0] == 2


def test_freeing_a_stream_waits_for_its_work(cuda_device: CudaDevice) -> None:
    out = np.zeros(1000, np.float32)
    with cuda_device.init_backend() as stream:
        assert isinstance(stream, CudaBackend)
        a, y, graph = scaled(stream)
        a.set(np.ones(1000, np.float32))
        hold_up(stream)
        stream.graph_compute_async(graph)
        stream.get_tensor_async(y, out)
    assert np.array_equal(out, np.full(1000, 2))


def test_threads_with_streams_of_their_own_do_not_disturb_each_other(cuda_device: CudaDevice) -> None:
    wrong: list[object] = []
    lock = threading.Lock() if cuda_device.driver.xp.__name__ == "numpy" else None

    def work(seed: int) -> None:
        try:
            with cuda_device.init_backend() as stream:
                assert isinstance(stream, CudaBackend)
                a, y, graph = scaled(stream, float(seed))
                for i in range(20):
                    if lock is not None:
                        lock.acquire()  # the played driver is one thread's at a time
                    try:
                        a.set(np.full(1000, i, np.float32))
                        stream.graph_compute(graph)
                        if y.to_numpy()[999] != seed * i:
                            wrong.append((seed, i))
                    finally:
                        if lock is not None:
                            lock.release()
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=[seed]) for seed in (2, 3, 5)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong
