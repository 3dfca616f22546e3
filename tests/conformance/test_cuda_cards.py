"""Several cards: copies between them, events, weights split by rows, sums; and a card that lacks memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from cuda_gate import hold_up

from ggmlb import Context, DType, alloc_ctx_tensors
from ggmlb.backends.cuda import CudaReg, backend_reg
from ggmlb.errors import ArgumentError, BackendError
from ggmlb.interface import tensor_copy, tensor_copy_async

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ggmlb.backends.cuda.backend import CudaBackend
    from ggmlb.tensor import Tensor


@pytest.fixture(scope="module", params=["played", pytest.param("card", marks=pytest.mark.gpu)])
def reg(request: pytest.FixtureRequest) -> CudaReg:
    """Cards, at least two of them."""
    if request.param == "played":
        from host_driver import HostDriver

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


def leaf(backend: CudaBackend, n: int = 1000) -> Tensor:
    ctx = Context()
    t = ctx.new_tensor(DType.F32, (n,))
    alloc_ctx_tensors(ctx, backend)
    return t


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


def test_an_event_orders_two_cards(streams: list[CudaBackend]) -> None:
    first, second = streams[:2]
    src, dst = leaf(first), leaf(second)
    event = first.device.event_new()
    hold_up(first)
    first.set_tensor_async(src, np.full(1000, 3, np.float32))
    first.event_record(event)
    second.event_wait(event)
    tensor_copy_async(first, second, src, dst)
    assert dst.to_numpy()[0] == 3


def test_sums_over_cards(reg: CudaReg, streams: list[CudaBackend]) -> None:
    comm = reg.get_proc_address("comm_init")(streams)  # type: ignore[misc]
    if comm is None:
        pytest.skip("NCCL is not installed")
    allreduce, free = reg.get_proc_address("comm_allreduce_tensor"), reg.get_proc_address("comm_free")
    assert allreduce is not None
    assert free is not None
    parts = [leaf(stream) for stream in streams]
    for turn in range(3):
        for i, (stream, part) in enumerate(zip(streams, parts, strict=True)):
            stream.set_tensor_async(part, np.full(1000, 10**i + turn, np.float32))
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
