"""OpenCL's memory for packed weights: the same results, and the same bytes when read back."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from ggmlb import Context, DType, Graph, alloc_ctx_tensors, device_by_name
from ggmlb.backends.opencl.device import OpenClDevice
from ggmlb.backends.opencl.packed_buffer import SCALE_SIZES
from ggmlb.core.errors import UnsupportedOpError
from ggmlb.core.tensor import Tensor
from ggmlb.interface import Backend, tensor_copy

K, M = 512, 40


@pytest.fixture(scope="module")
def device() -> OpenClDevice:
    found = device_by_name("OpenCL0")
    assert isinstance(found, OpenClDevice)
    return found


@pytest.fixture(scope="module", params=["cpu", "gpu"])
def stream(request: pytest.FixtureRequest, device: OpenClDevice) -> Iterator[Backend]:
    with device.init_backend({"work_split": request.param}) as backend:
        yield backend


def weight(
    device: OpenClDevice, dtype: DType, k: int = K, *, packed: bool = True
) -> tuple[Tensor, np.ndarray]:
    ctx = Context()
    w = ctx.new_tensor(dtype, (k, M))
    alloc_ctx_tensors(ctx, device.packed_buffer_type if packed else device.buffer_type)
    values = np.random.default_rng(0).standard_normal((M, k), np.float32)
    w.set_array(values)
    return w, values


def test_rows_that_are_no_whole_groups_lie_as_they_are(device: OpenClDevice, stream: Backend) -> None:
    w, values = weight(device, DType.Q8_0, 96)
    assert w.buffer is not None
    assert w.buffer.packing(w) == ""
    ctx = Context()
    x = ctx.new_tensor(DType.F32, (96, 1))
    y = ctx.mul_mat(w, x)
    alloc_ctx_tensors(ctx, stream)
    x.set_array(np.ones((1, 96), np.float32))
    stream.graph_compute(Graph().build_forward_expand(y))
    assert np.allclose(y.to_numpy().ravel(), values.sum(1), atol=0.2)


def test_only_weights_are_read_from_it(device: OpenClDevice, stream: Backend) -> None:
    w, _ = weight(device, DType.Q8_0)
    ctx = Context()
    y = ctx.cpy(w, ctx.new_tensor(DType.F32, (K, M)))
    alloc_ctx_tensors(ctx, stream)
    assert "only products and get_rows read" in str(device.declines(y))
    with pytest.raises(UnsupportedOpError, match="OpenCL0_Packed"):
        stream.graph_compute(Graph().build_forward_expand(y))


@pytest.mark.parametrize("dtype", SCALE_SIZES)
def test_windows_are_written_and_read_back_and_whole_rows_of_them_multiplied(
    device: OpenClDevice, stream: Backend, dtype: DType
) -> None:
    w, _ = weight(device, dtype)
    wanted, block = w.get(), dtype.type_size
    ctx = Context()
    window = ctx.view_1d(w, 256, 3 * block)  # begins in the middle of a group
    rows = ctx.view_2d(w, K, 4, w.nb[1], 5 * w.nb[1])
    assert np.array_equal(window.get(), wanted[3 * block : 11 * block])
    window.set(np.zeros(window.nbytes, np.uint8))
    wanted[3 * block : 11 * block] = 0
    assert np.array_equal(w.get(), wanted)
    x = ctx.new_tensor(DType.F32, (K, 2))
    y = ctx.mul_mat(rows, x)
    assert "must be contiguous and consist of whole rows" in str(
        device.declines(ctx.mul_mat(window, ctx.new_tensor(DType.F32, (256,))))
    )
    other, _ = weight(device, dtype)
    tensor_copy(window, ctx.view_1d(other, 256, 6 * block))
    assert not other.get(6 * block, window.nbytes).any()
    buffer = alloc_ctx_tensors(ctx, stream)
    x.set_array(np.ones((2, K), np.float32))
    stream.graph_compute(Graph().build_forward_expand(y))
    assert np.allclose(y.to_numpy()[1], w.to_numpy()[5:9].sum(1), atol=1e-3)
    buffer.free()


def test_it_is_offered_where_it_pays(device: OpenClDevice) -> None:
    extra_bufts = device.reg.get_proc_address("dev_get_extra_bufts")
    assert extra_bufts is not None
    assert extra_bufts(device) == ([] if device.is_cpu else [device.packed_buffer_type])
    assert device.supports_buft(device.packed_buffer_type)
