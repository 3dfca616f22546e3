"""LLVM's memory for repacked weights: the same products, and the same bytes when read back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("llvmlite")

from collections.abc import Iterator

from ggmlb import Context, DType, Graph, GraphAllocator, alloc_ctx_tensors
from ggmlb.backends.llvm import backend_reg
from ggmlb.backends.llvm.backend import LlvmBackend
from ggmlb.backends.llvm.codegen import host
from ggmlb.backends.llvm.codegen.simd import SIZES
from ggmlb.backends.llvm.kernels.blocks import SCALES
from ggmlb.core.tensor import Tensor

DEVICE = backend_reg().devices[0]
REPACKED = backend_reg().get_proc_address("dev_get_extra_bufts")(DEVICE)[0]
TYPES = [DType[name.upper()] for name in (*SIZES, *SCALES)]
LEVELS = [level.name for level in host.levels_here()]
K, M = 512, 48


FEW_TYPES = (DType.Q8_0, DType.Q5_0, DType.Q4_K, DType.MXFP4, DType.F16)
"""For narrower vectors than the host's: half a strip in one, bits, minimums, levels, floats."""


@pytest.fixture(scope="module", params=LEVELS)
def stream(request: pytest.FixtureRequest) -> Iterator[LlvmBackend]:
    with DEVICE.init_backend({"n_threads": 2, "simd": request.param}) as backend:
        yield backend


@pytest.fixture(scope="module")
def widest() -> Iterator[LlvmBackend]:
    with DEVICE.init_backend({"n_threads": 2}) as backend:
        yield backend


def weight(dtype: DType, *ne: int, repacked: bool = True) -> Tensor:
    ctx = Context()
    w = ctx.new_tensor(dtype, ne)
    alloc_ctx_tensors(ctx, REPACKED if repacked else DEVICE.buffer_type)
    w.set_array(np.random.default_rng(0).standard_normal(ne[::-1], np.float32))
    return w


@pytest.mark.parametrize("dtype", FEW_TYPES)
@pytest.mark.parametrize("n", [3, 21])
def test_products_on_each_instruction_set(stream: LlvmBackend, dtype: DType, n: int) -> None:
    same_products(stream, dtype, n)


@pytest.mark.parametrize("dtype", [t for t in TYPES if t not in FEW_TYPES])
@pytest.mark.parametrize("n", [1, 7, 21])
def test_products_of_each_type(widest: LlvmBackend, dtype: DType, n: int) -> None:
    same_products(widest, dtype, n)


@pytest.mark.skipif("avx2" not in LEVELS, reason="sums of 16 bits are of x86 without VNNI")
@pytest.mark.parametrize("dtype", [DType[name.upper()] for name in SCALES])
def test_sums_of_16_bits_hold_the_greatest_products(dtype: DType) -> None:
    signs = np.random.default_rng(2).choice(np.float32([-1, 1]), (M, K))
    signs[:4] = np.float32([1, 1, -1, -1])[:, None]
    x = np.ones((1, K), np.float32)
    found = []
    with DEVICE.init_backend({"n_threads": 1, "simd": "avx2"}) as avx2:
        for repacked in (True, False):
            w = weight(dtype, K, M, repacked=repacked)
            w.set_array(signs)
            found.append(product(avx2, w, np.concatenate([x, -x])))
    assert abs(found[0] - found[1]).max() < 1e-5 * K


def product(stream: LlvmBackend, w: Tensor, values: Any) -> Any:
    ctx = Context()
    x = ctx.new_tensor(DType.F32, values.shape[::-1])
    y = ctx.mul_mat(w, x)
    with alloc_ctx_tensors(ctx, stream):
        x.set_array(values)
        stream.graph_compute(Graph().build_forward_expand(y))
        return y.to_numpy().copy()


def same_products(stream: LlvmBackend, dtype: DType, n: int) -> None:
    """Compare products with those of plain memory."""
    found: list[Any] = []
    for repacked in (True, False):
        w = weight(dtype, K, M, 2, repacked=repacked)
        assert bool(w.buffer and w.buffer.packing(w)) is repacked
        values = np.random.default_rng(1).standard_normal((4, n, K), np.float32)
        values[:, ::2, 40:200:37] *= 50  # they stand out from some of the blocks
        found.append(product(stream, w, values))
    assert ((found[0] - found[1]) ** 2).sum() < 1e-11 * (found[1] ** 2).sum()


@pytest.mark.parametrize("dtype", [DType.F32, DType.F16])
@pytest.mark.parametrize("k", [19, 64])
def test_floats_of_16_rows_lie_side_by_side(dtype: DType, k: int) -> None:
    w = weight(dtype, k, M)
    assert w.buffer is not None
    found = w.buffer.base[w.offset : w.offset + w.nbytes].view(dtype.numpy).reshape(-1, k, 16)
    np.testing.assert_array_equal(found.transpose(0, 2, 1).reshape(M, k), w.to_numpy())


def test_rows_that_are_no_whole_strips_lie_as_elsewhere(widest: LlvmBackend) -> None:
    w = weight(DType.Q4_0, 64, 20)
    assert w.buffer is not None
    assert not w.buffer.packing(w)
    ctx = Context()
    y = ctx.mul_mat(w, x := ctx.new_tensor(DType.F32, (64, 2)))
    with alloc_ctx_tensors(ctx, widest):
        x.set_array(np.ones((2, 64), np.float32))
        widest.graph_compute(Graph().build_forward_expand(y))
        np.testing.assert_allclose(y.to_numpy()[0], w.to_numpy().sum(1), atol=0.3)


def test_only_products_of_whole_weights_read_it() -> None:
    w = weight(DType.F32, 64, 32)
    ctx = Context()
    x = ctx.new_tensor(DType.F32, (64, 2))
    for node in (ctx.add(w, w), ctx.mul_mat(x, w), ctx.mul_mat(ctx.view_2d(w, 64, 16, 256, 0), x)):
        assert "LLVM_Repacked" in str(DEVICE.declines(node))
    assert DEVICE.declines(ctx.mul_mat(ctx.reshape_2d(w, 64, 32), x)) is None


@pytest.mark.parametrize("dtype", [DType.Q4_0, DType.F16])
@pytest.mark.parametrize(
    ("repacked", "unit", "limits"),
    [
        (True, "geglu_split", ()),
        (False, "geglu_split", ()),
        (True, "swiglu_clamp", (0.5,)),
        (False, "swiglu_oai", (1.7, 0.5)),
    ],
)
def test_what_follows_products_is_fused(
    widest: LlvmBackend,
    dtype: DType,
    repacked: bool,
    unit: str,
    limits: tuple[float, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    w, v = (weight(dtype, K, M, repacked=repacked) for _ in range(2))
    a, b = weight(DType.F32, M, repacked=False), weight(DType.F32, M, 3, repacked=False)
    results = []
    for fused in ("0", "1"):
        monkeypatch.setenv("GGMLB_FUSE", fused)
        ctx = Context()
        x = ctx.set_input(ctx.new_tensor(DType.F32, (K, 3)))
        gate, up = ctx.add(ctx.mul_mat(w, x), a), ctx.add(ctx.mul_mat(v, x), b)
        y = getattr(ctx, unit)(gate, up, *limits)
        z = ctx.set_output(ctx.silu(ctx.add(ctx.mul_mat(v, x), y)))
        graph = Graph().build_forward_expand(z)
        widest.graph_optimize(graph)
        with GraphAllocator(widest.default_buffer_type) as allocator:
            allocator.alloc_graph(graph)
            x.set_array(np.random.default_rng(0).standard_normal((3, K), np.float32))
            plan = widest.graph_plan_create(graph)
            widest.graph_plan_compute(plan)
            results.append((z.to_numpy().copy(), plan.n_steps))
    (plain, n_plain), (fused_, n_fused) = results
    assert n_plain - n_fused == 6
    assert (plain == fused_).all()


@pytest.mark.parametrize("dtype", [DType.Q4_0, DType.F16])
@pytest.mark.parametrize("repacked", [(True, False), (False, True)])
def test_weights_of_unlike_memory_are_not_taken_for_alike(
    widest: LlvmBackend, dtype: DType, repacked: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    w, v = (weight(dtype, K, M, repacked=r) for r in repacked)
    results = []
    for fused in ("0", "1"):
        monkeypatch.setenv("GGMLB_FUSE", fused)
        ctx = Context()
        x = ctx.set_input(ctx.new_tensor(DType.F32, (K, 1)))
        y = ctx.set_output(ctx.swiglu_split(ctx.mul_mat(w, x), ctx.mul_mat(v, x)))
        graph = Graph().build_forward_expand(y)
        widest.graph_optimize(graph)
        with GraphAllocator(widest.default_buffer_type) as allocator:
            allocator.alloc_graph(graph)
            x.set_array(np.random.default_rng(0).standard_normal((1, K), np.float32))
            widest.graph_compute(graph)
            results.append(y.to_numpy().copy())
    np.testing.assert_array_equal(*results)


@pytest.mark.parametrize("repacked", [True, False])
@pytest.mark.parametrize(
    ("dtype", "n"), [(DType.Q8_0, 3), (DType.Q8_0, 21), (DType.Q8_0, 1024), (DType.F32, 21)]
)
def test_a_bias_and_a_function_are_done_with_the_product(
    stream: LlvmBackend, dtype: DType, n: int, repacked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    w = weight(dtype, 256, 40 if not repacked else M, repacked=repacked)
    m = w.ne[1]
    bias, rows = weight(DType.F32, m, repacked=False), weight(DType.F32, m, n, repacked=False)
    results = []
    for fused in ("0", "1"):
        monkeypatch.setenv("GGMLB_FUSE", fused)
        ctx = Context()
        x = ctx.set_input(ctx.new_tensor(DType.F32, (256, n)))
        found = [
            ctx.gelu(ctx.add(ctx.mul_mat(w, x), bias)),
            ctx.relu(ctx.mul_mat(w, x)),
            ctx.add(rows, ctx.mul_mat(w, x)),
        ]
        graph = Graph()
        for y in found:
            graph.build_forward_expand(ctx.set_output(y))
        stream.graph_optimize(graph)
        with GraphAllocator(stream.default_buffer_type) as allocator:
            allocator.alloc_graph(graph)
            x.set_array(data := np.random.default_rng(0).standard_normal((n, 256), np.float32))
            plan = stream.graph_plan_create(graph)
            stream.graph_plan_compute(plan)
            results.append(([y.to_numpy().copy() for y in found], plan.n_steps))
    (plain, n_plain), (fused_, n_fused) = results
    assert n_plain - n_fused == 4
    right = data @ w.to_numpy().T + rows.to_numpy()
    assert np.linalg.norm(plain[2] - right) < 0.01 * np.linalg.norm(right)
    for a, b in zip(plain, fused_, strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-6, atol=1e-6)
