"""Several cards: copies between them, events, weights split by rows, sums; and a card that lacks memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

from ggmlb import Context, DType, Graph, Scheduler, alloc_ctx_tensors, init_by_name
from ggmlb.backends.cuda import CudaReg, backend_reg
from ggmlb.backends.cuda.backend import CudaBackend
from ggmlb.core.enums import BufferUsage
from ggmlb.core.errors import ArgumentError, BackendError
from ggmlb.interface import tensor_copy, tensor_copy_async
from tests.support.gpus import hold_up, host_driver, is_reached, leaf


@pytest.fixture(scope="module", params=["played", pytest.param("card", marks=pytest.mark.gpu)])
def reg(request: pytest.FixtureRequest) -> CudaReg:
    """Cards, at least two of them."""
    if request.param == "played":
        from tests.support.host_driver import HostDriver

        return CudaReg(HostDriver(n_devices=3, capacity=1 << 28))
    if len(backend_reg().devices) < 2:
        pytest.skip("needs two cards")
    return backend_reg()


@pytest.fixture
def streams(reg: CudaReg) -> Iterator[list[CudaBackend]]:
    backends: list[Any] = [device.init_backend() for device in reg.devices[:3]]
    yield backends
    for backend in backends:
        backend.free()


def test_cards_are_devices_of_their_own(streams: list[CudaBackend]) -> None:
    first, second = streams[:2]
    assert (first.name, second.name) == ("CUDA0", "CUDA1")
    assert first.device.device_id != second.device.device_id
    assert not first.supports_buft(second.default_buffer_type)
    event = first.device.event_new()
    with pytest.raises(BackendError, match="belongs to CUDA0"):
        second.event_record(event)


@pytest.mark.parametrize("waited", [0, 1])
def test_copies_between_cards_are_ordered_on_both_sides(streams: list[CudaBackend], waited: int) -> None:
    first, second = streams[:2]
    src, dst = leaf(first), leaf(second)
    dst.set(np.zeros(1000, np.float32))
    result = np.empty(1000, np.float32)
    hold_up(first)
    first.set_tensor_async(src, np.full(1000, 1, np.float32))
    tensor_copy_async(first, second, src, dst)
    second.get_tensor_async(dst, result)
    first.set_tensor_async(src, np.full(1000, 2, np.float32))
    streams[waited].synchronize()
    streams[1 - waited].synchronize()
    assert np.array_equal(result, np.full(1000, 1))
    tensor_copy(src, dst)
    assert np.array_equal(dst.to_numpy(), np.full(1000, 2))


def test_a_copy_on_one_stream_waits_for_no_other(streams: list[CudaBackend]) -> None:
    first, second = streams[:2]
    src, dst, out = leaf(first), leaf(second), np.empty(1000, np.float32)
    src.set(np.full(1000, 1, np.float32))
    dst.memset(0)
    hold_up(second, 200)
    second.set_tensor_async(leaf(second), out)
    slow, mark = second.device.event_new(), first.device.event_new()
    second.event_record(slow)
    assert first.copy_on_stream(src, dst)
    first.event_record(mark)
    second.event_wait(mark)
    second.get_tensor_async(dst, out)
    first.set_tensor_async(src, np.full(1000, 2, np.float32))  # after the copy
    first.synchronize()
    assert not is_reached(second.device, slow.handle)
    second.synchronize()
    assert (out == 1).all()
    assert (src.to_numpy()[0], dst.to_numpy()[0]) == (2, 1)
    assert second.copy_on_stream(src, dst), "the reader may queue it as well"
    assert dst.to_numpy()[0] == 2, "a transfer that blocks waits for it"
    assert not first.copy_on_stream(dst, dst), "overlapping"
    if len(streams) > 2:
        assert not streams[2].copy_on_stream(src, dst), "neither is its own"
    dst.buffer.free()  # type: ignore[union-attr]
    assert src.to_numpy()[0] == 2


@pytest.mark.parametrize("n_cards", [1, 2])
def test_a_pipeline_over_cards(
    streams: list[CudaBackend], n_cards: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two cards, or two streams of one: the host waits for neither, and every batch gives its bits."""
    used = streams[:2] if n_cards == 2 else [streams[0], streams[0].device.init_backend()]
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((256, 256), np.float32) / 16 for _ in used]
    weights = []
    for backend, data in zip(used, arrays, strict=True):
        ctx = Context()
        weights.append(ctx.new_tensor(DType.F32, (256, 256)))
        alloc_ctx_tensors(ctx, backend).usage = BufferUsage.WEIGHTS  # type: ignore[arg-type]
        weights[-1].set_array(data)
    batches = [np.full((8, 256), i, np.float32) for i in range(10)]
    results = [np.zeros((8, 256), np.float32) for _ in batches]
    sent, waited = [], []
    send, wait = type(used[0])._copy_on_stream, type(used[0])._synchronize
    monkeypatch.setattr(
        type(used[0]), "_copy_on_stream", lambda self, *a: sent.append(self) or send(self, *a)
    )
    monkeypatch.setattr(type(used[0]), "_synchronize", lambda self: waited.append(self) or wait(self))
    with init_by_name("CPU") as cpu, Scheduler([*used, cpu], parallel=True) as sched:
        for batch, result in zip(batches, results, strict=True):
            ctx = Context()
            x = ctx.set_input(ctx.new_tensor(DType.F32, (256, 8)))
            h = ctx.relu(ctx.mul_mat(weights[0], x))
            y = ctx.set_output(ctx.mul_mat(weights[1], h))
            sched.set_tensor_backend(h, used[0])
            sched.set_tensor_backend(y, used[1])
            graph = Graph().build_forward_expand(y)
            sched.alloc_graph(graph)
            x.set_array(batch)
            waited.clear()
            sched.graph_compute_async(graph)
            assert not waited, "the host waited"
            x.set_array(np.full_like(batch, 99))
            used[1].get_tensor_async(y, result)  # type: ignore[attr-defined]
        sched.synchronize()
    assert sent == [used[0]] * len(batches)
    for batch, result in zip(batches, results, strict=True):
        want = np.maximum(batch @ arrays[0].T, 0) @ arrays[1].T
        assert np.allclose(result, want, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("asked", "peers", "loses", "warning"),
    [
        ("", True, True, None),
        ("0", True, False, None),
        ("1", True, True, "direct copies corrupt the data"),
        ("1", False, True, "CUDA offers no direct copies"),
        ("1", True, False, None),
    ],
    ids=["unset", "off", "damaged", "no peers", "direct"],
)
@pytest.mark.parametrize("how", ["tensor_copy", "cpy_tensor_async", "copy_on_stream"])
def test_direct_copies_are_asked_for_and_tried_first(
    monkeypatch: pytest.MonkeyPatch, how: str, asked: str, peers: bool, loses: bool, warning: str | None
) -> None:
    """CUDA tells of no copy that is damaged on its way."""
    driver = host_driver(n_devices=2)
    driver.cards.peers, driver.cards.loses = peers, loses
    monkeypatch.setenv("GGMLB_CUDA_P2P", asked)
    first, second = (device.init_backend() for device in CudaReg(driver).devices)
    src, dst = leaf(first), leaf(second)
    src.set(np.ones(1000, np.float32))
    with pytest.warns(RuntimeWarning, match=warning) if warning else nullcontext():
        if how == "tensor_copy":
            tensor_copy(src, dst)
        else:
            assert getattr(second, how)(*([first] if how == "cpy_tensor_async" else []), src, dst)
    tensor_copy(dst, src)  # the other way, without another trial
    assert (dst.to_numpy() == 1).all() and (src.to_numpy() == 1).all()
    assert len(driver.cards.enabled) == (2 if asked == "1" and warning is None else 0)


def test_sums_over_cards(reg: CudaReg, streams: list[CudaBackend]) -> None:
    comm = reg.get_proc_address("comm_init")(streams)  # type: ignore[misc]
    if comm is None:
        pytest.skip("NCCL is not installed")
    allreduce, free = reg.get_proc_address("comm_allreduce_tensor"), reg.get_proc_address("comm_free")
    assert allreduce is not None
    assert free is not None
    for turn in range(3):
        parts = [leaf(stream) for stream in streams]
        for i, (stream, part) in enumerate(zip(streams, parts, strict=True)):
            data = np.full(1000, 10**i + turn, np.float32)
            # What is read below is waited for, even if nothing but the sum was queued with it.
            part.set(data) if turn else stream.set_tensor_async(part, data)
        assert allreduce(comm, parts)
        want = sum(10**i + turn for i in range(len(parts)))
        for part in parts:
            assert np.array_equal(part.to_numpy(), np.full(1000, want))
    assert not allreduce(comm, parts[::-1]), "tensors of other cards"
    free(comm)
    assert reg.get_proc_address("comm_init")([streams[0], streams[0]]) is None  # type: ignore[misc]


def test_features(reg: CudaReg) -> None:
    features = reg.get_proc_address("get_features")
    assert features is not None
    assert dict(features(reg))["GRAPHS"] == "1"


def test_host_memory_is_registered_by_name(reg: CudaReg) -> None:
    register, unregister = (reg.get_proc_address(f"{un}register_host_buffer") for un in ("", "un"))
    assert register is not None
    assert unregister is not None
    array = np.zeros((64, 64), np.float32)
    assert register(array)
    assert register(array), "once is enough"
    unregister(array)
    unregister(array)
    assert register(array)
    unregister(array)
    with pytest.raises(ArgumentError, match="contiguous"):
        register(array[:, ::2])
