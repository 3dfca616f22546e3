"""Faults that others had with memory, threads and interruptions, provoked on OpenCL: docs/traps.md."""

from __future__ import annotations

import gc
import signal
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import pyopencl as cl
import pytest

from ggmlb import Context, DType, Graph, GraphAllocator, Scheduler, alloc_ctx_tensors, device_by_name
from ggmlb.backends.gpu.buffer import PinnedBuffer
from ggmlb.backends.opencl.backend import OpenClBackend
from ggmlb.backends.opencl.buffer import MemoryLedger
from ggmlb.core.errors import ArgumentError
from ggmlb.core.tensor import Tensor
from tests.support.gpus import OPENCL, Gate, device_fixture, leaf

if TYPE_CHECKING:
    from ggmlb.backends.opencl.device import OpenClDevice

N = 1000


device = device_fixture(OPENCL)


def chain(n_nodes: int) -> tuple[Tensor, Tensor, Graph]:
    ctx = Context()
    a = y = ctx.set_input(ctx.new_tensor(DType.F32, (N,)))
    for _ in range(n_nodes):
        y = ctx.scale(y, 2.0)
    return a, ctx.set_output(y), Graph().build_forward_expand(y)


def test_trap_9_an_event_may_be_recorded_again_while_it_is_waited_for(
    device: OpenClDevice, stream: OpenClBackend
) -> None:
    with device.init_backend() as other:
        a = leaf(stream)
        event, out = device.event_new(), np.zeros(N, np.float32)
        gate = Gate(stream)
        stream.set_tensor_async(a, np.full(N, 1, np.float32))
        stream.event_record(event)
        other.event_wait(event)
        other.get_tensor_async(a, out)
        second = Gate(stream)
        stream.event_record(event)  # the earlier wait is for the earlier point
        gate.open()
        other.synchronize()
        assert out[0] == 1
        second.open()
        event.synchronize()


def test_trap_20_pinned_host_memory_is_not_the_devices_own(stream: OpenClBackend) -> None:
    assert not stream.supports_buft(stream.device.host_buffer_type)


def test_trap_29_memory_that_queued_work_uses_is_not_lent_again(stream: OpenClBackend) -> None:
    a, y, graph = chain(3)
    allocator = GraphAllocator(stream.default_buffer_type)
    allocator.alloc_graph(graph)
    a.set(np.full(N, 1, np.float32))
    out = np.empty(N, np.float32)
    gate = Gate(stream)
    stream.graph_compute_async(graph)
    stream.get_tensor_async(y, out)
    bigger = Context()
    wide = bigger.scale(bigger.set_input(bigger.new_tensor(DType.F32, (64 * N,))), 3.0)
    allocator.reserve(Graph().build_forward_expand(wide))  # frees the buffer that the graph is to use
    stream.alloc_buffer(4096).clear(0xFF)
    gate.open()
    stream.synchronize()
    assert (out == 8).all()
    allocator.free()


def test_trap_34_and_45_dropping_everything_with_a_copy_pending_does_not_hang(device: OpenClDevice) -> None:
    # A copy's event waits in its destructor, with the interpreter locked: for another thread, here.
    stream = device.init_backend()
    assert isinstance(stream, OpenClBackend)
    a = leaf(stream, 1 << 16)
    timer = Gate(stream).open_later()
    for i in range(600):  # more than are kept unlooked at
        stream.set_tensor_async(a, np.full(1 << 16, i, np.float32))
    gc.collect()
    del a
    gc.collect()
    stream.free()
    timer.join()


def test_trap_36_a_buffer_that_another_stream_uses_is_not_given_back(
    device: OpenClDevice, stream: OpenClBackend
) -> None:
    gc.collect()
    with device.init_backend() as other:
        assert isinstance(other, OpenClBackend)
        free = device.memory[0]
        t, out = leaf(stream), np.empty(N, np.float32)
        t.set(np.full(N, 3, np.float32))
        gate = Gate(other)
        other.get_tensor_async(t, out)
        stream.synchronize()
        del t
        gc.collect()
        assert device.memory[0] < free, "the other stream still reads it"
        gate.open()
        other.synchronize()
        assert (out == 3).all()
        assert device.memory[0] == free


def test_trap_38_without_pinned_memory_ordinary_memory_is_used_and_told(
    device: OpenClDevice, stream: OpenClBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(*_: object, **__: object) -> None:
        raise cl.MemoryError("no pages to pin", int(cl.status_code.MEM_OBJECT_ALLOCATION_FAILURE))

    t = leaf(stream)
    monkeypatch.setattr(cl, "Buffer", no_room)
    with pytest.warns(RuntimeWarning, match="OpenCL0_Host: the runtime gave no pinned memory"):
        buffer = device.host_buffer_type.alloc_buffer(4 * N)
    monkeypatch.undo()
    assert isinstance(buffer, PinnedBuffer)
    assert buffer.why_not_pinned is not None
    assert "no pages to pin" in buffer.why_not_pinned
    buffer.base.view(np.float32)[...] = 2
    stream.set_tensor_async(t, buffer.base)
    stream.synchronize()
    assert (t.to_numpy() == 2).all()
    pinned = device.host_buffer_type.alloc_buffer(64)
    assert isinstance(pinned, PinnedBuffer)
    assert pinned.why_not_pinned is None


def test_trap_40_strided_host_arrays_are_written_right_and_never_read_into(stream: OpenClBackend) -> None:
    t = leaf(stream)
    strided = np.arange(2 * N, dtype=np.float32)[::2]
    t.set(strided)
    assert np.array_equal(t.to_numpy(), strided)
    stream.set_tensor_async(t, strided + 1)
    stream.set_tensor_async(t, strided[::-1])
    stream.synchronize()
    assert np.array_equal(t.to_numpy(), strided[::-1])
    with pytest.raises(ArgumentError, match="contiguous"):
        stream.get_tensor_async(t, strided)


def test_trap_47_memory_is_counted_right_while_threads_free() -> None:
    ledger = MemoryLedger(1 << 40)

    def churn() -> None:
        for _ in range(2000):
            ticket = ledger.take(1)
            ledger.give_back(None, ticket, {})
            assert ledger.free <= 1 << 40

    threads = [threading.Thread(target=churn) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert ledger.free == 1 << 40


def test_trap_47_one_weight_is_read_by_the_streams_of_several_threads(device: OpenClDevice) -> None:
    wrong: list[object] = []
    with device.init_backend() as owner:
        weights = Context()
        w = weights.new_tensor(DType.F32, (64, 64))
        alloc_ctx_tensors(weights, owner)
        matrix = np.random.default_rng(0).standard_normal((64, 64), np.float32)
        w.set_array(matrix)

        def work(seed: int) -> None:
            try:
                with (
                    device.init_backend() as mine,
                    Scheduler([mine, device_by_name("CPU").init_backend()]) as s,
                ):
                    ctx = Context()
                    x = ctx.set_input(ctx.new_tensor(DType.F32, (64, 4)))
                    y = ctx.set_output(ctx.mul_mat(w, x))
                    graph = Graph().build_forward_expand(y)
                    s.alloc_graph(graph)
                    for i in range(20):
                        given = np.full((4, 64), seed * i, np.float32)
                        x.set_array(given)
                        s.graph_compute(graph)
                        if not np.allclose(y.to_numpy(), given @ matrix.T, atol=1e-2):
                            wrong.append((seed, i))
            except BaseException as error:
                wrong.append(error)

        threads = [threading.Thread(target=work, args=[seed]) for seed in (1, 2, 3)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    assert not wrong


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt: a shell's background job would ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
def test_trap_51_after_ctrl_c_in_the_middle_of_a_graph_all_can_be_used_on(stream: OpenClBackend) -> None:
    a, y, graph = chain(10)
    allocator = GraphAllocator(stream.default_buffer_type, keep_inputs=True)
    allocator.alloc_graph(graph)
    a.set(np.full(N, 1, np.float32))
    steps = 0

    def interrupted() -> bool:
        nonlocal steps
        steps += 1
        if steps == 5:
            signal.raise_signal(signal.SIGINT)
        return False

    stream.abort_callback = interrupted
    gate = Gate(stream)
    with pytest.raises(KeyboardInterrupt):
        stream.graph_compute_async(graph)
    used = a.buffer
    assert used is not None
    assert used.uses(), "four steps are queued, and use it"  # type: ignore[attr-defined]
    gate.open()
    stream.abort_callback = None
    stream.synchronize()
    stream.graph_compute(graph)
    assert (y.to_numpy() == 1024).all()
    allocator.free()
