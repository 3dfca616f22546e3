"""Threads that share a stream or a card: what one asks for while another captures, waits or computes."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from ggmlb import Context, DType, Event, Graph, alloc_ctx_tensors
from ggmlb.backends.cuda.backend import CudaBackend
from ggmlb.backends.cuda.plan import CudaPlan
from ggmlb.interface import tensor_alloc
from tests.support.gpus import PLAYED, device_fixture, leaf, scaled

device = device_fixture(PLAYED)

N = 1000


class Shared:
    """What the threads have: two streams of a card, a tensor of each, and a recorded event."""

    def __init__(self, stream: CudaBackend, other: CudaBackend) -> None:
        self.stream, self.other = stream, other
        self.mine, self.theirs = leaf(stream, N), leaf(other, N)
        for t in (self.mine, self.theirs):
            t.memset(0)
        self.data = np.full(N, 7, np.float32)
        self.out = np.zeros(N, np.float32)
        self.event: Event = stream.device.event_new()
        other.event_record(self.event)

    def free_and_allocate(self) -> None:
        assert self.mine.buffer is not None
        self.stream.set_tensor_async(self.mine, self.data)
        self.mine.buffer.free()
        self.stream.alloc_buffer(4096).free()


CALLS: dict[str, Callable[[Shared], Any]] = {
    "set_tensor_async": lambda s: s.stream.set_tensor_async(s.mine, s.data),
    "get_tensor_async": lambda s: s.stream.get_tensor_async(s.mine, s.out),
    "set_tensor_2d_async": lambda s: s.stream.set_tensor_2d_async(s.mine, s.data, 0, 4, 10, 8, 4),
    "get_tensor_2d_async": lambda s: s.stream.get_tensor_2d_async(s.mine, s.out, 0, 4, 10, 8, 4),
    "cpy_tensor_async, to it": lambda s: s.stream.cpy_tensor_async(s.other, s.theirs, s.mine),
    "cpy_tensor_async, from it": lambda s: s.other.cpy_tensor_async(s.stream, s.mine, s.theirs),
    "copy_on_stream": lambda s: s.stream.copy_on_stream(s.theirs, s.mine),
    "event_record": lambda s: s.stream.event_record(s.event),
    "event_wait": lambda s: s.stream.event_wait(s.event),
    "synchronize": lambda s: s.stream.synchronize(),
    "a read that waits": lambda s: s.mine.to_numpy(),
    "free and allocate": lambda s: s.free_and_allocate(),
}


@pytest.mark.parametrize("call", CALLS)
def test_what_another_thread_asks_during_a_capture_is_no_part_of_the_graph(
    stream: CudaBackend, other: CudaBackend, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ctx = Context()
    a = ctx.new_tensor(DType.F32, (N,))
    y = ctx.add(ctx.relu(ctx.scale(a, 2.0)), a)
    alloc_ctx_tensors(ctx, stream)
    a.set(np.ones(N, np.float32))
    plan = stream.graph_plan_create(Graph().build_forward_expand(y))
    assert isinstance(plan, CudaPlan)
    stream.graph_plan_compute(plan)  # it is captured the second time
    stream.synchronize()
    shared = Shared(stream, other)
    driver: Any = stream.device.driver
    failed: list[BaseException] = []

    def work() -> None:
        try:
            CALLS[call](shared)
        except BaseException as error:
            failed.append(error)

    thread, begin = threading.Thread(target=work), driver.capture_begin

    def capture_begin(handle: int) -> None:
        begin(handle)
        thread.start()
        thread.join(0.2)  # it gets as far as it may

    with monkeypatch.context() as patch:
        patch.setattr(driver, "capture_begin", capture_begin)
        stream.graph_plan_compute(plan)
    thread.join()
    assert not failed
    (segment,) = plan.segments
    assert segment.is_captured, segment.why_not
    replayed = [op.name for op in driver.cards.execs[segment._held[0]]]
    assert replayed == [step.key[0] for step in segment.steps]  # type: ignore[index]
    stream.synchronize()
    assert np.array_equal(y.to_numpy(), np.full(N, 3))


def test_an_array_that_another_thread_queues_during_a_wait_is_kept(
    stream: CudaBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    t = leaf(stream, N)
    driver: Any = stream.device.driver
    arrays: list[weakref.ref[Any]] = []

    def queue() -> None:
        data = np.full(N, 5, np.float32)
        arrays.append(weakref.ref(data))
        stream.set_tensor_async(t, data)

    def after(wait: Callable[[int], None]) -> Callable[[int], None]:
        def waited(handle: int) -> None:
            wait(handle)
            if not arrays:
                thread = threading.Thread(target=queue)
                thread.start()
                thread.join()

        return waited

    stream.set_tensor_async(t, np.zeros(N, np.float32))
    with monkeypatch.context() as patch:
        for name in ("event_synchronize", "stream_synchronize"):
            patch.setattr(driver, name, after(getattr(driver, name)))
        stream.synchronize()
    gc.collect()
    (array,) = arrays
    assert array() is not None
    stream.synchronize()
    assert array() is None
    assert t.to_numpy()[0] == 5


@pytest.fixture
def frees(stream: CudaBackend, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How much work other streams had in their queues when memory was freed: for each time."""
    driver: Any = stream.device.driver
    free, busy = driver.free, []

    def counted(address: int) -> None:
        busy.append(sum(len(s.queue) for s in driver.cards.streams.values()))
        free(address)

    monkeypatch.setattr(driver, "free", counted)
    yield busy


def test_memory_that_was_freed_is_given_back_by_the_next_wait(stream: CudaBackend, frees: list[int]) -> None:
    """A stream is idle once its work is done: a record that is asked for at once never is."""
    gc.collect()
    t, buffer = leaf(stream), stream.alloc_buffer(4096)
    ctx = Context()
    tensor_alloc(buffer, ctx.new_tensor(DType.F32, (4,)), 0)
    stream.set_tensor_async(ctx.tensors[0], np.zeros(4, np.float32))
    stream.set_tensor_async(t, np.zeros(N, np.float32))
    stream.synchronize()
    with stream.device.on():
        assert stream.stream.is_idle()
    frees.clear()
    buffer.free()
    stream.synchronize()
    assert frees == [0]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("nbytes", [4000, 1 << 20])
def test_no_lock_is_held_while_the_device_is_waited_for(
    stream: CudaBackend, other: CudaBackend, call: str, nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The simulated driver waits where CUDA may, and fails where that is under a stream's lock."""
    monkeypatch.setattr(__name__ + ".N", nbytes // 4)
    for backend in (stream, other):
        _, _, graph = scaled(backend)
        backend.graph_compute_async(graph)
        backend.start_timing()
    CALLS[call](Shared(stream, other))
    for backend in (stream, other):
        backend.synchronize()
        backend.clock._last = 0  # type: ignore[union-attr]  # as after a pause, when times are taken anew
    CALLS[call](Shared(stream, other))
    for backend in (stream, other):
        backend.stop_timing()


def test_a_wait_for_one_stream_does_not_stall_the_card_to_free_memory(
    stream: CudaBackend, other: CudaBackend, frees: list[int]
) -> None:
    gc.collect()
    stream.synchronize()
    frees.clear()
    _, _, graph = scaled(other)
    other.graph_compute_async(graph)  # and runs on
    buffer = stream.alloc_buffer(4096)
    frees.clear()
    buffer.free()
    stream.synchronize()
    assert not frees, "cudaFree waits for all streams of a card"
    other.synchronize()
    stream.synchronize()
    assert frees == [0]


def uploads(driver: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[list[bool], list[Any]]:
    """Note of each copy to the card whether it comes from page-locked memory; and that memory."""
    from ggmlb.backends.cuda.driver import CopyKind, address_of

    pinned: list[Any] = []
    found: list[bool] = []
    copy, lock = driver.copy, driver.pinned

    def noted(dst: int, src: int, nbytes: int, way: CopyKind, stream: int) -> None:
        if way is CopyKind.TO_DEVICE:
            found.append(any(0 <= src - address_of(p) <= p.size - nbytes for p in pinned))
        copy(dst, src, nbytes, way, stream)

    def locked(nbytes: int) -> Any:
        pinned.append(lock(nbytes))
        return pinned[-1]

    monkeypatch.setattr(driver, "copy", noted)
    monkeypatch.setattr(driver, "pinned", locked)
    return found, pinned


def test_a_scheduler_uploads_activations_from_page_locked_memory(
    stream: CudaBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ggmlb import Scheduler, init_by_name

    found, pinned = uploads(stream.device.driver, monkeypatch)
    with init_by_name("CPU") as cpu, Scheduler([stream, cpu]) as scheduler:
        ctx = Context()
        x = ctx.set_input(ctx.new_tensor(DType.F32, (N,)))
        between = [ctx.scale(x, 2.0)]
        for _ in range(3):
            between.append(ctx.relu(between[-1]))
            between.append(ctx.scale(between[-1], 3.0))
        for i, t in enumerate(between):
            scheduler.set_tensor_backend(t, (cpu, stream)[i % 2])
        graph = Graph().build_forward_expand(between[-1])
        scheduler.alloc_graph(graph)
        for i in range(1, 6):
            x.set_array(np.full(N, i, np.float32))
            found.clear()
            scheduler.graph_compute(graph)
            assert found
            assert all(found)
            assert np.array_equal(between[-1].to_numpy(), np.full(N, 54 * i))
        assert len(pinned) < 20, "memory that was locked serves again"
