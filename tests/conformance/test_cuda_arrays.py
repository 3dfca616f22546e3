"""Arrays in and out by `__cuda_array_interface__`, version 3, with libraries that have nothing else."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import ggmlb
from ggmlb import Context, Tensor
from ggmlb.backends.cuda import CudaReg
from ggmlb.backends.cuda.device import CudaDevice
from ggmlb.interface import registry
from tests.support.gpus import host_driver


class LibraryArray(np.ndarray[Any, Any]):
    """What the simulated library's arrays are: they have the interface, as CuPy's have."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        strides = None if self.flags.c_contiguous else self.strides
        return {
            "shape": self.shape, "typestr": self.dtype.str, "strides": strides, "stream": 1, "version": 3,
            "data": (self.__array_interface__["data"][0], False),
        }  # fmt: skip


class Exporter:
    """An object that has the interface, and no attribute beside it."""

    def __init__(self, tensor: Tensor, **changes: Any) -> None:
        self.interface = {**tensor.__cuda_array_interface__, **changes}

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return self.interface


def consume(exporter: Any) -> np.ndarray[Any, Any]:
    """Read an exporter as the protocol says; on a played device addresses are the host's."""
    interface = exporter.__cuda_array_interface__
    assert interface["version"] == 3
    assert interface.get("mask") is None
    assert interface.get("stream") != 0, "0 names no stream: it is forbidden"
    shape, dtype = interface["shape"], np.dtype(interface["typestr"])
    address, read_only = interface["data"]
    assert isinstance(shape, tuple)
    assert type(address) is int
    assert read_only is False
    strides = interface["strides"]
    assert strides is None or len(strides) == len(shape)
    steps = strides or tuple(int(dtype.itemsize * np.prod(shape[i + 1 :])) for i in range(len(shape)))
    nbytes = dtype.itemsize + sum((n - 1) * s for n, s in zip(shape, steps, strict=True))
    memory = (ctypes.c_ubyte * nbytes).from_address(address)
    return np.ndarray(shape, dtype, memory, 0, steps)


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> list[CudaDevice]:
    """Two cards, played, as the registry would list them."""
    driver = host_driver(n_devices=2)
    view = driver.view
    monkeypatch.setattr(driver, "view", lambda *args: view(*args).view(LibraryArray))
    found: Any = CudaReg(driver).devices
    monkeypatch.setattr(registry, "devices", lambda: [*found, ggmlb.device_by_name("CPU")])
    return list(found)


@pytest.fixture
def theirs(devices: list[CudaDevice]) -> Iterator[Tensor]:
    """Memory on the second card, 3 rows of 8 numbers, that other libraries are to lend."""
    ctx = Context()
    tensor = ctx.new_tensor("f32", (8, 3), "theirs")
    with ggmlb.alloc_ctx_tensors(ctx, devices[1].buffer_type):
        tensor.set_array(np.arange(24, dtype=np.float32).reshape(3, 8))
        yield tensor


NUMBERS = np.arange(24, dtype=np.float32).reshape(3, 8)


@pytest.mark.parametrize("strides", [None, (32, 4)], ids=["no strides", "strides"])
@pytest.mark.parametrize("stream", [None, 1], ids=["no stream", "legacy stream"])
def test_memory_is_shared_where_it_lies(
    strides: Any, stream: Any, theirs: Tensor, devices: list[CudaDevice]
) -> None:
    tensor = Context().from_array(Exporter(theirs, strides=strides, stream=stream), copy=False)
    assert tensor.buffer is not None
    assert tensor.buffer.buft.device is devices[1]
    assert (tensor.ne, tensor.is_contiguous()) == ((8, 3, 1, 1), True)
    np.testing.assert_array_equal(tensor.to_numpy(), NUMBERS)
    theirs.set_array(-NUMBERS)
    np.testing.assert_array_equal(tensor.to_numpy(), -NUMBERS)
    tensor.set_array(2 * NUMBERS)
    np.testing.assert_array_equal(theirs.to_numpy(), 2 * NUMBERS)


def test_windows_and_types_are_as_they_say(theirs: Tensor) -> None:
    place, _ = theirs.__cuda_array_interface__["data"]
    window = Exporter(theirs, shape=(2, 3), strides=(32, 8), data=(place + 32 + 4, False))
    tensor = Context().from_array(window, copy=False)
    np.testing.assert_array_equal(tensor.to_numpy(), NUMBERS[1:, 1:7:2])
    words = Exporter(theirs, shape=(24,), strides=None, typestr="<i4")
    assert Context().from_array(words, copy=False).to_numpy().tobytes() == NUMBERS.tobytes()
    empty = Exporter(theirs, shape=(0, 8), strides=None, data=(0, False))
    assert Context().from_array(empty, copy=False).is_empty


def test_the_exporter_lives_as_long_as_the_tensor(theirs: Tensor) -> None:
    import gc
    import weakref

    exporter = Exporter(theirs)
    gone = weakref.ref(exporter)
    tensor = Context().from_array(exporter, copy=False)
    del exporter
    gc.collect()
    assert gone() is not None
    del tensor
    gc.collect()
    assert gone() is None


def test_the_stream_that_fills_it_is_waited_for(
    theirs: Tensor, devices: list[CudaDevice], monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[int] = []
    monkeypatch.setattr(devices[0].driver, "stream_synchronize", waited.append)
    for stream in (None, 1, 2, 0x5550):
        Context().from_array(Exporter(theirs, stream=stream), copy=False)
    assert waited == [1, 2, 0x5550]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"mask": object()}, "is masked; give an array without a mask"),
        ({"data": (4096, True)}, "is read-only, but tensors on a device are writable"),
        ({"strides": (-32, 4)}, r"no strides like \(-32, 4\), negative or 0"),
        ({"strides": (0, 4)}, r"no strides like \(0, 4\)"),
        ({"typestr": "<c8"}, "ggml has no type for complex64; give dtype="),
        ({"shape": (1, 1, 1, 1, 2), "strides": None}, "has 5 dimensions; tensors have at most 4"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_what_cannot_be_shared_is_refused_with_the_reason(
    changes: dict[str, Any], told: str, theirs: Tensor
) -> None:
    with pytest.raises((ggmlb.ArgumentError, ggmlb.DTypeError, ggmlb.ShapeError), match=told):
        Context().from_array(Exporter(theirs, **changes), copy=False)


def test_a_copy_needs_a_way_to_the_host(theirs: Tensor) -> None:
    with pytest.raises(ggmlb.ArgumentError, match="Exporter is on a device; copy it to the host first"):
        Context().from_array(Exporter(theirs), copy=True)

    class Fetching(Exporter):
        def get(self) -> np.ndarray[Any, Any]:
            return NUMBERS

    tensor = Context().from_array(Fetching(theirs), "f16")
    assert tensor.buffer is not None
    assert tensor.buffer.is_host
    np.testing.assert_allclose(tensor.to_numpy(), NUMBERS)


def test_memory_on_no_known_card_is_not_shared(
    theirs: Tensor, devices: list[CudaDevice], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "devices", lambda: [devices[0], ggmlb.device_by_name("CPU")])
    with pytest.raises(ggmlb.ArgumentError, match="no device can use the memory of"):
        Context().from_array(Exporter(theirs), copy=False)


def test_others_read_our_memory(theirs: Tensor) -> None:
    seen = consume(theirs)
    np.testing.assert_array_equal(seen, NUMBERS)
    seen *= 3
    np.testing.assert_array_equal(theirs.to_numpy(), 3 * NUMBERS)
    ctx = Context()
    window = ctx.transpose(ctx.view_2d(theirs, 4, 3, theirs.nb[1], 8))
    for view in ctx.tensors:
        if view.buffer is None:
            ggmlb.view_init(view)
    np.testing.assert_array_equal(consume(window), 3 * NUMBERS[:, 2:6].T)
    back = Context().from_array(window, copy=False)
    np.testing.assert_array_equal(back.to_numpy(), 3 * NUMBERS[:, 2:6].T)
    assert not hasattr(theirs, "__array_interface__")
    with pytest.raises(ggmlb.ArgumentError, match="to_numpy"):
        np.asarray(theirs)


def test_blocks_and_unplaced_tensors_have_no_interface(devices: list[CudaDevice]) -> None:
    ctx = Context()
    blocks, nowhere = ctx.new_tensor("q4_0", (32, 2)), Context().new_tensor("f32", (4,))
    with ggmlb.alloc_ctx_tensors(ctx, devices[0].buffer_type):
        for tensor in (blocks, nowhere):
            assert not hasattr(tensor, "__cuda_array_interface__")
