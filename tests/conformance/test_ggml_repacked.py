"""Weights in other orders, for which ggml's CPU has memory: the same products, the same bytes when read."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest

from ggmlb import BackendError, Context, DType, Graph, Tensor, alloc_ctx_tensors
from ggmlb.core.dtypes import random_blocks
from tests.support.gpus import first

TYPES = [DType.Q4_0, DType.Q4_K, DType.IQ4_NL, DType.MXFP4]
"""Bytes that move, bits that move, and values of other tables."""


@pytest.fixture(scope="module")
def device() -> Any:
    found = first("ggml:CPU")
    if not found.extra_bufts:
        pytest.skip(f"{found.library} has no memory for weights in other orders")
    return found


@pytest.fixture
def stream(device: Any) -> Any:
    with device.init_backend({"n_threads": 1}) as backend:
        yield backend


def weight(buft: Any, dtype: DType, *ne: int) -> Tensor:
    ctx = Context()
    w = ctx.new_tensor(dtype, ne)
    alloc_ctx_tensors(ctx, buft)
    w.set_array(np.random.default_rng(0).standard_normal(ne[::-1], np.float32))
    return w


def placed(device: Any, dtype: DType, *ne: int) -> Tensor:
    """A weight that is packed; skipped where this processor has no kernel for it."""
    buft = device.extra_bufts[-1]
    if not buft.suits(Context().new_tensor(dtype, ne)):
        pytest.skip(f"{buft.name} does not pack {dtype.name} here")
    return weight(buft, dtype, *ne)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("n", [1, 21])
def test_products_are_those_of_plain_memory(device: Any, stream: Any, dtype: DType, n: int) -> None:
    found = []
    for w in (placed(device, dtype, 512, 48), weight(device.buffer_type, dtype, 512, 48)):
        ctx = Context()
        x = ctx.new_tensor("f32", (512, n))
        y = ctx.mul_mat(w, x)
        assert device.declines(y) is None
        with alloc_ctx_tensors(ctx, stream):
            x.set_array(np.random.default_rng(1).standard_normal((n, 512), np.float32))
            stream.graph_compute(Graph().build_forward_expand(y))
            found.append(y.to_numpy().copy())
    assert ((found[0] - found[1]) ** 2).sum() < 1e-8 * (found[1] ** 2).sum()


def test_ggml_tells_the_log_how_it_packs(device: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "ggmlb.ggml"):
        placed(device, DType.Q4_0, 64, 16)
    assert any("q4_0" in line.lower() for line in caplog.messages)


@pytest.mark.parametrize("dtype", TYPES)
def test_any_bytes_are_written_and_read(device: Any, dtype: DType) -> None:
    w = placed(device, dtype, 256, 24)
    assert w.buffer is not None and w.buffer.packing(w)
    raw = random_blocks(dtype, 256 * 24).reshape(-1)
    w.set(raw)
    assert np.array_equal(w.get(), raw)
    assert not np.array_equal(w.buffer.allocations[0]._base[: raw.size], raw)  # type: ignore[attr-defined]
    raw[37:501] ^= 1
    w.set(raw[37:501], 37)
    assert np.array_equal(w.get(), raw)
    assert np.array_equal(w.get(100, 17), raw[100:117])


def test_only_products_of_whole_groups_read_it(device: Any) -> None:
    w = placed(device, DType.Q4_0, 64, 32)
    ctx, row = Context(), DType.Q4_0.row_size(64)
    x = ctx.new_tensor("f32", (64, 2))
    ids = ctx.new_tensor("i32", (2,))
    for node in (ctx.get_rows(w, ids), ctx.mul_mat(ctx.view_2d(w, 64, 16, row, 4 * row), x)):
        assert "CPU_REPACK" in str(device.declines(node))
    assert device.declines(ctx.mul_mat(ctx.view_2d(w, 64, 16, row, 8 * row), x)) is None


def test_an_order_that_loses_bits_cannot_be_read(device: Any, monkeypatch: Any) -> None:
    w = placed(device, DType.Q4_0, 96, 16)
    buft: Any = w.buffer and w.buffer.buft
    pack = type(buft).pack
    monkeypatch.setattr(type(buft), "pack", lambda *given: pack(*given) & 0xFE)
    with pytest.raises(BackendError, match="cannot read a q4_0 weight back"):
        w.get()
