"""CuPy's own arrays in and out, over the memory of a simulated card. Needs CuPy; on a card, see tests/gpu."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import ggmlb
from ggmlb import Context
from ggmlb.backends.cuda import CudaReg
from ggmlb.backends.cuda.device import CudaDevice
from ggmlb.core.tensor import spanned_bytes
from ggmlb.interface import registry
from tests.support.gpus import host_driver

cupy = pytest.importorskip("cupy", reason="needs CuPy: pip install cupy-cuda13x")

pytestmark = pytest.mark.skipif(cupy.cuda.is_available(), reason="there is a card")

NUMBERS = np.arange(60, dtype=np.float32).reshape(6, 10)


def read(array: Any) -> np.ndarray[Any, Any]:
    """Return what a CuPy array lies over, as it lies: a simulated card's memory is the host's."""
    assert isinstance(array, cupy.ndarray)
    memory = (ctypes.c_ubyte * max(1, spanned_bytes(array))).from_address(array.data.ptr)
    return np.ndarray(array.shape, array.dtype, memory, 0, array.strides)


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> list[CudaDevice]:
    """Two simulated cards, whose arrays are made by the methods that make them on a card."""
    from ggmlb.backends.cuda.cupy_driver import CupyDriver

    driver = host_driver(n_devices=2)
    for name in ("array", "view"):
        monkeypatch.setattr(driver, name, getattr(CupyDriver, name).__get__(driver))
    found: Any = CudaReg(driver).devices
    monkeypatch.setattr(registry, "devices", lambda: [*found, ggmlb.device_by_name("CPU")])
    return list(found)


@pytest.fixture
def theirs(devices: list[CudaDevice]) -> Iterator[Any]:
    """A CuPy array on the second card that holds the numbers."""
    driver = devices[1].driver
    with driver.on(1):
        address = driver.malloc(NUMBERS.nbytes)
    memory = cupy.cuda.UnownedMemory(address, NUMBERS.nbytes, None, 1)
    array = cupy.ndarray(NUMBERS.shape, np.float32, cupy.cuda.MemoryPointer(memory, 0))
    read(array)[...] = NUMBERS
    yield array
    with driver.on(1):
        driver.free(address)


VIEWS = {
    "whole": lambda a: a,
    "window": lambda a: a[1:, 2:6],
    "every other": lambda a: a[::2, 1::3],
    "transposed": lambda a: a.T,
    "four dimensions": lambda a: a.reshape(3, 2, 5, 2).transpose(2, 0, 3, 1),
    "scalar": lambda a: a[3, 4],
    "empty": lambda a: a[6:],
    "other type": lambda a: a.view(np.int32),
    "bfloat16": lambda a: a.view(ml_dtypes.bfloat16),
}


@pytest.mark.parametrize("view", VIEWS)
def test_what_one_side_writes_the_other_reads(view: str, theirs: Any, devices: list[CudaDevice]) -> None:
    array = VIEWS[view](theirs)
    tensor = Context().from_array(array, copy=False)
    assert tensor.buffer is not None
    assert array.size == 0 or tensor.buffer.buft.device is devices[1]
    assert tensor.ne == (*reversed(array.shape), 1, 1, 1, 1)[:4]
    same = array.shape or (1,)
    np.testing.assert_array_equal(tensor.to_numpy().reshape(same), read(array).reshape(same))
    read(array)[...] *= 2
    np.testing.assert_array_equal(tensor.to_numpy().reshape(same), read(array).reshape(same))
    tensor.set_array(-tensor.to_numpy())
    np.testing.assert_array_equal(tensor.to_numpy().reshape(same), read(array).reshape(same))
    back = tensor.as_array()
    assert back.data.ptr == array.data.ptr or not array.size
    assert back.dtype == array.dtype


def test_a_graph_reads_and_writes_cupys_memory(theirs: Any) -> None:
    ctx = Context()
    tensor = ctx.from_array(theirs, copy=False)
    squares = ggmlb.evaluate(ctx.sqr(ctx.cont(ctx.transpose(tensor))), devices=["CPU"])
    np.testing.assert_array_equal(squares, NUMBERS.T**2)
    graph = ggmlb.Graph().build_forward_expand(ctx.scale_inplace(tensor, 3.0))
    assert tensor.buffer is not None
    with tensor.buffer.buft.device.init_backend() as backend:
        backend.graph_compute(graph)
    np.testing.assert_array_equal(read(theirs), 3 * NUMBERS)


def test_a_tensor_is_an_array_of_cupys(devices: list[CudaDevice]) -> None:
    ctx = Context()
    tensor = ctx.new_tensor("f32", (10, 6))
    window = ctx.transpose(ctx.view_2d(tensor, 4, 3, tensor.nb[1], tensor.nb[1] + 8))
    with ggmlb.alloc_ctx_tensors(ctx, devices[0].buffer_type):
        tensor.set_array(NUMBERS)
        np.testing.assert_array_equal(read(tensor.as_array()), NUMBERS)
        np.testing.assert_array_equal(read(window.as_array()), NUMBERS[1:4, 2:6].T)
        assert window.__cuda_array_interface__ == window.as_array().__cuda_array_interface__
        read(window.as_array())[...] = 0
        assert not tensor.to_numpy()[1:4, 2:6].any()
