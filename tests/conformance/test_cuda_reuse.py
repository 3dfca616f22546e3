"""What is made once and used again: activations in other forms, executable graphs, cuBLAS' handle."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest

from ggmlb import Context, DType, Graph, alloc_ctx_tensors
from ggmlb.backends.cuda import CudaReg
from ggmlb.backends.cuda.backend import CudaBackend
from ggmlb.backends.cuda.plan import MAX_IDLE
from ggmlb.core.enums import BufferUsage
from ggmlb.core.tensor import Tensor
from ggmlb.interface import tensor_alloc
from tests.support.gpus import CUDA, device_fixture

device = device_fixture(*CUDA)

K = 256


def shared_memory(stream: CudaBackend, tensors: list[Tensor], under: Tensor, over: Tensor) -> None:
    """Lay tensors one after another, and `over` where `under` lies."""
    size = sum(-(-t.nbytes // 256) * 256 for t in tensors)
    buffer, offset = stream.alloc_buffer(size), 0
    buffer.usage = BufferUsage.COMPUTE  # what nobody else reads may be left out
    for t in tensors:
        tensor_alloc(buffer, t, offset)
        offset += -(-t.nbytes // 256) * 256
    tensor_alloc(buffer, over, under.offset)


@pytest.mark.parametrize(("dtype", "n"), [(DType.Q4_0, 2), (DType.F16, 20)], ids=["q8", "cublas"])
@pytest.mark.parametrize("writer", ["node", "group", "split"])
def test_what_is_made_of_an_input_is_made_anew_once_it_changed(
    stream: CudaBackend, dtype: DType, n: int, writer: str
) -> None:
    """Two products read x, and between them something writes over it."""
    rng = np.random.default_rng(0)
    ctx, split_ctx = Context(), Context()
    leafs: list[Tensor] = []

    def leaf(dtype: DType, *ne: int) -> Tensor:
        leafs.append(ctx.new_tensor(dtype, ne))
        return leafs[-1]

    x, inner = leaf(DType.F32, K, n), []
    v, w = leaf(dtype, K, 24), leaf(dtype, K, 24)
    first = ctx.mul_mat(v, x)
    if writer == "node":
        over = ctx.scale(leaf(DType.F32, K, n), 3.0)
    elif writer == "group":
        inner = [ctx.rms_norm(leaf(DType.F32, K, n), 1e-5)]
        over = ctx.mul(inner[0], leaf(DType.F32, K))
    else:
        rows = split_ctx.new_tensor(DType.F32, (64, K))
        split = stream.device.reg.get_proc_address("split_buffer_type")
        assert split is not None
        alloc_ctx_tensors(split_ctx, split(0, (1.0,)))
        rows.set_array(rng.standard_normal((K, 64), np.float32))
        over = ctx.mul_mat(rows, leaf(DType.F32, 64, n))
    second = ctx.mul_mat(w, x)
    graph = Graph().build_forward_expand(first, over, second)
    shared_memory(stream, [*leafs, *inner, first, second], x, over)
    plan: Any = stream.graph_plan_create(graph)
    assert any(len(part.nodes) > 1 for part in plan.parts) == (writer == "group"), "fused"
    for _ in range(3):
        for t in leafs:
            t.set_array(rng.standard_normal(t.shape, np.float32))
        before = x.to_numpy()
        stream.graph_plan_compute(plan)
        stream.synchronize()
        after = x.to_numpy()
        for y, weights, data in ((first, v, before), (second, w, after)):
            want = data @ weights.to_numpy().T
            assert np.abs(y.to_numpy() - want).max() < 0.02 * np.abs(want).max(), weights is w
        assert np.abs(after - before).max() > 1, "it was written over"


@pytest.mark.parametrize(("dtype", "n"), [(DType.Q4_0, 2), (DType.F16, 20)], ids=["q8", "cublas"])
def test_what_is_made_of_a_moment_is_made_anew_after_the_step_that_changes_it(
    stream: CudaBackend, dtype: DType, n: int
) -> None:
    """An optimiser's step writes its moments besides its result."""
    ctx = Context()
    w, x, grad, second_moment = (ctx.new_tensor(DType.F32, (K, n)) for _ in range(4))
    numbers, v = ctx.new_tensor(DType.F32, (7,)), ctx.new_tensor(dtype, (K, 24))
    first = ctx.mul_mat(v, x)
    step = ctx.opt_step_adamw(ctx.set_param(w), grad, x, second_moment, numbers)
    second = ctx.mul_mat(v, x)
    graph = Graph().build_forward_expand(first, step, second)
    alloc_ctx_tensors(ctx, stream)
    rng = np.random.default_rng(0)
    for t in (w, x, grad, v):
        t.set_array(rng.standard_normal(t.shape, np.float32))
    second_moment.set_array(rng.random(second_moment.shape, np.float32))
    numbers.set(np.array([0.1, 0.2, 0.9, 1e-6, 0.1, 2.0, 3.0], np.float32))
    before = x.to_numpy()
    stream.graph_compute(graph)
    for y, data in ((first, before), (second, x.to_numpy())):
        want = data @ v.to_numpy().T
        assert np.abs(y.to_numpy() - want).max() < 0.02 * np.abs(want).max(), y is second


@pytest.mark.parametrize(("dtype", "n"), [(DType.Q4_0, 2), (DType.F16, 20)], ids=["q8", "cublas"])
def test_what_is_made_of_an_input_is_made_anew_after_a_split_product(
    stream: CudaBackend, dtype: DType, n: int
) -> None:
    """The plan of the split product, on the same stream, has its activations in the same scratch memory."""
    ctx, split_ctx = Context(), Context()
    v, w = ctx.new_tensor(dtype, (K, 24)), ctx.new_tensor(dtype, (K, 24))
    x, z = ctx.new_tensor(DType.F32, (K, n)), ctx.new_tensor(DType.F32, (K, n))
    rows = split_ctx.new_tensor(dtype, (K, 32))
    split = stream.device.reg.get_proc_address("split_buffer_type")
    assert split is not None
    alloc_ctx_tensors(split_ctx, split(0, (1.0,)))
    products = {ctx.mul_mat(v, x): (v, x), ctx.mul_mat(rows, z): (rows, z), ctx.mul_mat(w, x): (w, x)}
    graph = Graph().build_forward_expand(*products)
    alloc_ctx_tensors(ctx, stream)
    rng = np.random.default_rng(0)
    for t in (v, w, x, z, rows):
        t.set_array(rng.standard_normal(t.shape, np.float32))
    for _ in range(3):
        stream.graph_compute(graph)
        for i, (y, (weights, data)) in enumerate(products.items()):
            want = data.to_numpy() @ weights.to_numpy().T
            assert np.abs(y.to_numpy() - want).max() < 0.02 * np.abs(want).max(), i


@pytest.mark.parametrize("kind", ["launch", "gemm", "two", "split"])
def test_a_plan_holds_all_memory_that_its_steps_use(stream: CudaBackend, kind: str) -> None:
    """Each operand and the result in a buffer of its own: freed memory is noticed, used memory waited for."""
    weights = Context()
    w = weights.new_tensor(DType.F32, (64, 8))
    split = stream.device.reg.get_proc_address("split_buffer_type")
    assert split is not None
    alloc_ctx_tensors(weights, split(0, (1.0,)) if kind == "split" else stream)
    contexts = [Context(), Context()]
    x = contexts[0].new_tensor(DType.F32, (8, 3) if kind == "two" else (64, 20))
    z = contexts[1].new_tensor(DType.F32, (64, 3))
    alloc_ctx_tensors(contexts[0], stream)
    alloc_ctx_tensors(contexts[1], stream)
    c = Context()
    y = {
        "launch": lambda: c.neg(x),
        "gemm": lambda: c.mul_mat(w, x),
        "two": lambda: c.out_prod(z, x),
        "split": lambda: c.mul_mat(w, x),
    }[kind]()
    alloc_ctx_tensors(c, stream)
    plan = stream.graph_plan_create(Graph().build_forward_expand(y))
    used = {id(t.buffer) for t in (y, x, *([z] if kind == "two" else []), *([w] if kind == "gemm" else []))}
    assert used <= {id(buffer) for buffer in plan.buffers}  # type: ignore[attr-defined]
    assert all(stream.stream in buffer.streams for buffer in plan.buffers)  # type: ignore[attr-defined]


@pytest.mark.parametrize("what", ["macros", "shape"])
def test_an_executable_graph_is_offered_to_the_same_kernels_only(
    stream: CudaBackend, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver, offered = stream.device.driver, []
    update = driver.exec_update
    monkeypatch.setattr(driver, "exec_update", lambda *a: offered.append(a) or update(*a))

    def compute(i: int) -> None:
        ctx = Context()
        if what == "macros":
            a = ctx.new_tensor(DType.F32, (100,))
            y = ctx.sqr((ctx.neg, ctx.abs)[i](a))
        else:
            a = ctx.new_tensor(DType.F32, (64, 20 + i))
            y = ctx.sqr(ctx.mul_mat(ctx.new_tensor(DType.F32, (64, 8)), a))
        alloc_ctx_tensors(ctx, stream)
        for t in ctx.tensors:
            t.memset(0)
        graph = Graph().build_forward_expand(y)
        for _ in range(3):
            stream.graph_compute(graph)
            assert not y.to_numpy().any()
        stream._plans.clear()

    compute(0)
    gc.collect()
    compute(0)
    assert offered, "what a plan of the same kernels left behind"
    offered.clear()
    gc.collect()
    compute(1)
    assert not offered


def test_nothing_is_left_over() -> None:
    """Of many plans, failed updates, and plans that outlive their stream."""
    from tests.support.host_driver import HostDriver

    driver = HostDriver(n_devices=2)
    reg = CudaReg(driver)
    device = reg.devices[0]

    def captured(stream: Any, n: int) -> Any:
        ctx = Context()
        y = ctx.new_tensor(DType.F32, (10,))
        for _ in range(n):
            y = ctx.neg(y)
        alloc_ctx_tensors(ctx, stream)
        plan = stream.graph_plan_create(Graph().build_forward_expand(y))
        for _ in range(2):
            stream.graph_plan_compute(plan)
        assert plan.segments[0].is_captured
        return plan

    with device.init_backend() as stream:
        plans = [captured(stream, n) for n in range(2, MAX_IDLE + 6)]
        assert driver.cards.leftovers()["executables"] == len(plans)
        del plans
        gc.collect()
        last = captured(stream, 100)
        assert driver.cards.leftovers()["executables"] <= MAX_IDLE + 1, "the oldest are let go"
        driver.cards.fail.add("update")
        del last
        gc.collect()
        last = captured(stream, 100)
        assert driver.cards.leftovers()["executables"] <= MAX_IDLE + 1, (
            "nothing is kept that cannot be updated"
        )
        assert "graphs" not in driver.cards.leftovers(), "what was captured is released"
        ctx = Context()
        a, b = ctx.new_tensor(DType.F32, (64, 8)), ctx.new_tensor(DType.F32, (64, 20))
        y = ctx.mul_mat(a, b)
        alloc_ctx_tensors(ctx, stream)
        stream.graph_compute(Graph().build_forward_expand(y))
        assert driver.cards.leftovers()["cuBLAS handles"] == 1
        weights = Context()
        w = weights.new_tensor(DType.F32, (64, 256))
        alloc_ctx_tensors(weights, reg.get_proc_address("split_buffer_type")(0, (1.0, 1.0)))  # type: ignore[misc]
        y = ctx.mul_mat(w, b)
        tensor_alloc(stream.alloc_buffer(y.nbytes), y, 0)
        stream.graph_compute(Graph().build_forward_expand(y))
    del last
    gc.collect()
    device.memory_pool.sweep(wait=True)
    assert set(driver.cards.leftovers()) <= {"streams", "events"}
    assert driver.cards.leftovers().get("streams", 0) <= 2, "those of blocking transfers stay, one for a card"
