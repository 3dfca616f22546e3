"""Products on the CPU: each way that a product is shared over threads gives the product."""

from __future__ import annotations

import numpy as np
import pytest

from ggmlb.backends.common.kinds import Kinds
from ggmlb.backends.cpu import backend_reg
from ggmlb.backends.cpu.lowering import NodeLowering
from ggmlb.core.context import Context
from ggmlb.core.dtypes import DType
from ggmlb.core.graph import Graph
from ggmlb.runtime.alloc import alloc_ctx_tensors

ROWS = [1, 7, 40, 300]  # a vector, few rows, some, and as many as are cut among threads


@pytest.fixture
def cpu(monkeypatch):
    monkeypatch.setattr(NodeLowering, "parallel_work", 0)
    monkeypatch.setattr(backend_reg().devices[0], "kinds", Kinds())
    with backend_reg().devices[0].init_backend({"n_threads": 3}) as backend:
        yield backend


def normal(seed, shape):
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def check_product(cpu, ctx, a, b):
    y = ctx.mul_mat(a, b)
    with alloc_ctx_tensors(ctx, cpu) as buffer:
        buffer.clear(0xFF)
        for i, t in enumerate((a, b)):
            root = t.view_src or t
            root.set_array(normal(i, root.shape))
        cpu.graph_compute(Graph().build_forward_expand(y))
        w, x = (t.to_numpy().astype(np.float32).reshape(t.ne[::-1]) for t in (a, b))
        w = np.repeat(np.repeat(w, b.ne[3] // a.ne[3], 0), b.ne[2] // a.ne[2], 1)
        expected = x @ w.swapaxes(-1, -2)
        error = np.abs(y.to_numpy().reshape(y.ne[::-1]) - expected).max()
        assert error <= 1e-5 * np.abs(expected).max()


F32, F16 = DType.F32, DType.F16
OPERANDS = {
    **{f"{t} weights": lambda c, n, t=t: (c.new_tensor(t, (256, 90)), c.new_tensor(F32, (256, n)))
       for t in (F32, F16, DType.BF16, DType.Q8_0, DType.Q4_K)},
    **{f"{t} matrices that repeat over a batch": lambda c, n, t=t: (
        c.new_tensor(t, (32, 20, 2, 3)), c.new_tensor(F32, (32, n, 6, 3)))
       for t in (F32, F16)},
    "permuted operands": lambda c, n: [
        c.permute(c.new_tensor(F32, (32, 4, m, 2)), 0, 2, 1, 3) for m in (20, n)
    ],
    "weights with gaps between elements": lambda c, n: (
        c.permute(c.new_tensor(F32, (4, 32, 20)), 2, 0, 1, 3), c.new_tensor(F32, (32, n, 4))),
    "activations that BLAS cannot take": lambda c, n: (
        c.new_tensor(F32, (32, 20, 3)), c.permute(c.new_tensor(F32, (3, 32, n)), 2, 0, 1, 3)),
    "half precision activations": lambda c, n: (c.new_tensor(F16, (64, 20)), c.new_tensor(F16, (64, n))),
}  # fmt: skip


@pytest.mark.parametrize("n", ROWS)
@pytest.mark.parametrize("operands", OPERANDS)
def test_products(cpu, operands, n):
    ctx = Context()
    check_product(cpu, ctx, *OPERANDS[operands](ctx, n))


def test_a_chain_of_products_and_functions_runs_by_tiles(cpu):
    ctx = Context()
    x = ctx.new_tensor(DType.F32, (256, 1920))
    up, down = ctx.new_tensor(DType.F32, (256, 512)), ctx.new_tensor(DType.F32, (512, 256))
    bias = ctx.new_tensor(DType.F32, (512,))
    h = ctx.silu(ctx.add(ctx.mul_mat(up, x), bias))
    y = ctx.rms_norm(ctx.add(ctx.mul_mat(down, h), x), 1e-6)
    graph = Graph().build_forward_expand(y)
    with alloc_ctx_tensors(ctx, cpu) as buffer:
        buffer.clear(0xFF)
        values = [normal(i, t.shape) for i, t in enumerate((x, up, down, bias))]
        for t, value in zip((x, up, down, bias), values, strict=True):
            t.set_array(value)
        plan = cpu.graph_plan_create(graph)
        assert len(plan.steps) == 1  # all six nodes, over the same rows
        cpu.graph_plan_compute(plan)
        a, wu, wd, b = (v.astype(np.float64) for v in values)
        z = a @ wu.T + b
        z = (z / (1 + np.exp(-z))) @ wd.T + a
        expected = z / np.sqrt((z * z).mean(-1, keepdims=True) + 1e-6)
        np.testing.assert_allclose(y.to_numpy(), expected, rtol=1e-4, atol=1e-5)
