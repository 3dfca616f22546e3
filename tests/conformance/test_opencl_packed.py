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


@pytest.mark.parametrize("dtype", SCALE_SIZES)
@pytest.mark.parametrize("n", [1, 3, 20])
def test_products_are_those_of_plain_memory(
    device: OpenClDevice, stream: Backend, dtype: DType, n: int
) -> None:
    found = []
    for packed in (True, False):
        w, _ = weight(device, dtype, packed=packed)
        ctx = Context()
        x = ctx.new_tensor(DType.F32, (K, n))
        y = ctx.mul_mat(w, x)
        alloc_ctx_tensors(ctx, stream)
        x.set_array(np.random.default_rng(1).standard_normal((n, K), np.float32))
        stream.graph_compute(Graph().build_forward_expand(y))
        found.append(y.to_numpy())
    assert np.array_equal(*found)


@pytest.mark.parametrize("dtype", SCALE_SIZES)
def test_rows_and_products_of_experts_are_read_too(
    device: OpenClDevice, stream: Backend, dtype: DType
) -> None:
    ctx = Context()
    w = ctx.new_tensor(dtype, (K, 8, 3))
    alloc_ctx_tensors(ctx, device.packed_buffer_type)
    w.set_array(np.random.default_rng(0).standard_normal((3, 8, K), np.float32))
    plain = w.to_numpy()
    ctx = Context()
    x, ids = ctx.new_tensor(DType.F32, (K, 1, 5)), ctx.new_tensor(DType.I32, (2, 5))
    y, rows = ctx.mul_mat_id(w, x, ids), ctx.get_rows(w, ctx.view_2d(ids, 2, 3, ids.nb[1], 0))
    alloc_ctx_tensors(ctx, stream)
    given = np.random.default_rng(1).standard_normal((5, 1, K), np.float32)
    chosen = np.array([[0, 1], [2, 0], [1, 2], [2, 1], [0, 2]], np.int32)
    x.set_array(given)
    ids.set(chosen)
    stream.graph_compute(Graph().build_forward_expand(y, rows))
    assert np.allclose(y.to_numpy(), np.einsum("tsmk,tk->tsm", plain[chosen], given[:, 0]), atol=1e-3)
    assert np.array_equal(rows.to_numpy(), plain[np.arange(3)[:, None], chosen[:3]])


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
    assert "not a contiguous run of whole rows" in str(
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
