"""CuPy arrays in and out, without a copy: what one side writes the other reads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import ggmlb
from ggmlb import Context
from ggmlb.backends.cuda.device import CudaDevice


@pytest.fixture
def torch() -> Any:
    """PyTorch, where it reaches the card: one built for CUDA may find no driver of its own."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("PyTorch finds no CUDA card")
    return torch


@pytest.mark.parametrize("view", ["whole", "window", "transposed"])
def test_a_cupy_array_and_its_tensor_share_memory(card: CudaDevice, view: str) -> None:
    import cupy

    with cupy.cuda.Device(0):
        whole = cupy.arange(60, dtype=np.float32).reshape(6, 10)
        array = {"whole": whole, "window": whole[1:, 2:6], "transposed": whole.T}[view]
        tensor = Context().from_array(array, copy=False)
        assert np.array_equal(tensor.to_numpy(), array.get())
        array += 1
        cupy.cuda.get_current_stream().synchronize()
        assert np.array_equal(tensor.to_numpy(), array.get())
        squares = ggmlb.evaluate((ctx := Context()).sqr(ctx.cont(tensor)), devices=["CUDA0", "CPU"])
        assert np.array_equal(squares, array.get() ** 2)
        seen = tensor.as_array()
        seen *= 2
        cupy.cuda.get_current_stream().synchronize()
        assert np.array_equal(array.get(), seen.get())


def test_other_libraries_read_a_tensors_memory(card: CudaDevice) -> None:
    import cupy

    ctx = Context()
    tensor = ctx.new_tensor("f32", (4, 3))
    with card.init_backend() as backend, ggmlb.alloc_ctx_tensors(ctx, backend):
        tensor.set_array(np.arange(12).reshape(3, 4))
        assert np.array_equal(cupy.asarray(tensor).get(), tensor.to_numpy())
        assert np.array_equal(cupy.from_dlpack(tensor).get(), tensor.to_numpy())
        with pytest.raises(ggmlb.ArgumentError, match="to_numpy"):
            np.asarray(tensor)


def test_pytorch_reads_a_tensors_memory(card: CudaDevice, torch: Any) -> None:
    ctx = Context()
    tensor = ctx.new_tensor("f32", (4, 3))
    with card.init_backend() as backend, ggmlb.alloc_ctx_tensors(ctx, backend):
        tensor.set_array(np.arange(12).reshape(3, 4))
        assert np.array_equal(torch.from_dlpack(tensor).cpu().numpy(), tensor.to_numpy())


def test_pytorchs_tensors_and_ours_share_memory(card: CudaDevice, torch: Any) -> None:
    theirs = torch.arange(12.0, device="cuda").reshape(3, 4)
    tensor = Context().from_array(theirs.T, copy=False)
    assert np.array_equal(tensor.to_numpy(), theirs.T.cpu().numpy())
    theirs += 1
    torch.cuda.synchronize()
    assert np.array_equal(tensor.to_numpy(), theirs.T.cpu().numpy())
    seen = torch.as_tensor(tensor.as_array(), device="cuda")
    assert seen.data_ptr() == theirs.data_ptr()
    with pytest.raises(ggmlb.ArgumentError, match="gives no access"):
        Context().from_array(theirs.requires_grad_(), copy=False)
