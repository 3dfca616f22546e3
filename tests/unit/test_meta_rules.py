"""What a rule saves: the sums and gathers that a node costs, for each way to deal its operands out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import ggmlb
from ggmlb import Context, Graph, GraphAllocator, SplitState, Tensor
from ggmlb.parallel.meta import MIRRORED
from ggmlb.parallel.meta.reduce import MetaCommunicator
from ggmlb.testing.fake import FakeReg

CPU = ggmlb.device_by_name("CPU")

Program = tuple["Callable[..., Tensor]", dict[str, tuple[int, ...]]]

# A method of Context by its name and its operands after the leafs; the leafs' extents, by name.
PROGRAMS: dict[str, Program] = {
    "mul_mat": (Context.mul_mat, {"w": (8, 6, 1, 2), "x": (8, 4, 4, 2)}),
    "mul_mat_id": (Context.mul_mat_id, {"w": (8, 6, 3), "x": (8, 2, 4), "ids": (2, 4)}),
    "attention": (
        lambda c, q, k, v, m: c.flash_attn_ext(q, k, v, m, 0.5, 0.0, 0.0),
        {"q": (4, 3, 8, 2), "k": (4, 5, 4, 2), "v": (4, 5, 4, 2), "m": (5, 3)},
    ),
    "attention, masks of pairs": (
        lambda c, q, k, v, m: c.flash_attn_ext(q, k, v, m, 0.5, 0.0, 0.0),
        {"q": (4, 3, 8, 2), "k": (4, 5, 4, 2), "v": (4, 5, 4, 2), "m": (5, 3, 4)},
    ),
    "attention, masks of each": (
        lambda c, q, k, v, m: c.flash_attn_ext(q, k, v, m, 0.5, 0.0, 0.0),
        {"q": (4, 3, 8, 2), "k": (4, 5, 4, 2), "v": (4, 5, 4, 2), "m": (5, 3, 8, 2)},
    ),
    "alibi": (
        lambda c, q, k, v, m: c.flash_attn_ext(q, k, v, m, 0.5, 8.0, 0.0),
        {"q": (4, 3, 8, 2), "k": (4, 5, 4, 2), "v": (4, 5, 4, 2), "m": (5, 3)},
    ),
    "sum": (Context.sum_rows, {"x": (8, 6)}),
    "norm": (lambda c, x: c.rms_norm(x, 1e-5), {"x": (8, 6)}),
    "add": (Context.add, {"x": (8, 6), "y": (8, 1)}),
    "gated": (Context.swiglu_split, {"x": (8, 6, 4), "y": (8, 6, 4)}),
    "add repeated": (Context.add, {"x": (8, 6), "y": (4, 3)}),
    "step": (lambda c, x, g, p: c.opt_step_sgd(c.set_param(x), g, p), {"x": (8, 6), "g": (8, 6), "p": (2,)}),
}

# The program; the dimension along which each leaf is cut, mirrored if not named; sums and gathers.
CASES: list[tuple[str, dict[str, int], tuple[int, int]]] = [
    ("mul_mat", {"w": 1}, (0, 0)),
    ("mul_mat", {"w": 0}, (1, 0)),
    ("mul_mat", {"x": 0}, (1, 0)),
    ("mul_mat", {"w": 0, "x": 0}, (1, 0)),
    ("mul_mat", {"x": 1}, (0, 0)),
    ("mul_mat", {"x": 2}, (0, 0)),
    ("mul_mat", {"x": 3}, (0, 0)),
    ("mul_mat", {"w": 3}, (0, 0)),
    ("mul_mat", {"w": 3, "x": 3}, (0, 0)),
    ("mul_mat", {"w": 1, "x": 1}, (0, 1)),
    ("gated", {"x": 0}, (0, 0)),
    ("gated", {"x": 2}, (0, 0)),
    ("gated", {"x": 1, "y": 1}, (0, 0)),
    ("gated", {"x": 1}, (0, 1)),  # a slice of y would have gaps between planes, which GLU does not take
    ("mul_mat_id", {"w": 1}, (0, 0)),
    ("mul_mat_id", {"w": 0}, (1, 0)),
    ("mul_mat_id", {"w": 2}, (0, 1)),
    ("mul_mat_id", {"x": 2}, (0, 0)),
    ("mul_mat_id", {"x": 2, "ids": 1}, (0, 0)),
    ("mul_mat_id", {"x": 0}, (0, 1)),
    ("attention", {"q": 2}, (0, 0)),
    ("attention", {"k": 2, "v": 2}, (0, 0)),
    ("attention", {"q": 2, "k": 2, "v": 2}, (0, 0)),
    ("attention", {"q": 3}, (0, 0)),
    ("attention", {"k": 3}, (0, 0)),
    ("attention", {"q": 1}, (0, 1)),
    ("attention", {"m": 1}, (0, 1)),
    ("attention, masks of pairs", {"q": 2}, (0, 1)),
    ("attention, masks of each", {"q": 2}, (0, 0)),
    ("attention, masks of each", {"q": 3, "m": 3}, (0, 0)),
    ("alibi", {"q": 2}, (0, 1)),
    ("alibi", {"q": 3}, (0, 0)),
    ("sum", {"x": 0}, (0, 1)),
    ("sum", {"x": 1}, (0, 0)),
    ("norm", {"x": 1}, (0, 0)),
    ("norm", {"x": 0}, (0, 1)),
    ("add", {"x": 0}, (0, 0)),
    ("add", {"x": 1}, (0, 0)),
    ("add", {"y": 0}, (0, 0)),
    ("add", {"y": 1}, (0, 1)),
    ("add repeated", {"y": 0}, (0, 1)),
    ("add repeated", {"y": 1}, (0, 1)),
    ("add repeated", {"x": 0}, (0, 1)),
    ("step", {"x": 0, "g": 0}, (0, 0)),
    ("step", {"x": 1, "g": 1}, (0, 0)),
    ("step", {"x": 0}, (0, 1)),
    ("step", {"x": 0, "g": 1}, (0, 2)),
    ("step", {"x": 0, "g": 0, "p": 0}, (0, 3)),
]


def leafs_of(name: str) -> tuple[Context, list[Tensor], list[Any]]:
    ctx, rng = Context(), np.random.default_rng(0)
    leafs, values = [], []
    for leaf, ne in PROGRAMS[name][1].items():
        dtype = {"ids": "i32", "m": "f16"}.get(leaf, "f32")
        leafs.append(ctx.new_tensor(dtype, ne, leaf))
        values.append(rng.normal(size=ne[::-1]) if leaf != "ids" else rng.integers(0, 3, ne[::-1]))
    return ctx, leafs, values


def halves(tensor: Tensor, axis: int) -> SplitState:
    n = tensor.ne[axis]
    return SplitState(ggmlb.SplitAxis(axis), ((n // 2, n - n // 2),))


@pytest.mark.parametrize(("name", "cuts", "costs"), CASES, ids=[f"{n} {c}" for n, c, _ in CASES])
def test_what_a_node_costs(name: str, cuts: dict[str, int], costs: tuple[int, int]) -> None:
    build = PROGRAMS[name][0]
    device = ggmlb.meta_device([CPU] * 2, lambda t: halves(t, cuts[t.name]) if t.name in cuts else MIRRORED)
    ctx, leafs, values = leafs_of(name)
    _, plain, _ = leafs_of(name)
    inputs = dict(zip(plain, values, strict=True))
    expected = ggmlb.evaluate(build(Context(), *plain), inputs, devices="CPU")
    with device.init_backend() as meta, ggmlb.alloc_ctx_tensors(ctx, meta):
        for leaf, array in zip(leafs, values, strict=True):
            leaf.set_array(array)
        y = build(Context(), *leafs)
        graph = Graph().build_forward_expand(y)
        with GraphAllocator(device.buffer_type) as allocator:
            allocator.alloc_graph(graph)
            plan: Any = meta.graph_plan_create(graph)
            meta.graph_plan_compute(plan)
            np.testing.assert_allclose(y.to_numpy(), expected, rtol=1e-3, atol=1e-3)
            assert (plan.n_reductions, plan.n_gathers) == costs
            meta.graph_plan_free(plan)


@pytest.mark.parametrize("cuts", [{"y": 0}, {"y": 1}, {"x": 1, "y": 0}, {"x": 1, "y": 1}, {"x": 1}], ids=str)
def test_a_result_whose_place_is_given_is_dealt_out_as_that_is(cuts: dict[str, int]) -> None:
    device = ggmlb.meta_device([CPU] * 2, lambda t: halves(t, cuts[t.name]) if t.name in cuts else MIRRORED)
    ctx, (x,), (values,) = leafs_of("sum")
    y = ctx.set_name(ctx.sqr(x), "y")
    with device.init_backend() as meta, ggmlb.alloc_ctx_tensors(ctx, meta) as buffer:
        buffer.clear(0xFF)
        x.set_array(values)
        for _ in range(2):
            meta.graph_compute(Graph().build_forward_expand(y))
            np.testing.assert_allclose(y.to_numpy(), values.astype("f4") ** 2)
    assert device.state(Context().from_array(values)) == MIRRORED, "what lies elsewhere"


def test_a_freed_plan_frees_those_of_its_devices() -> None:
    device = ggmlb.meta_device([CPU] * 2, lambda t: halves(t, 0))
    ctx, (x,), _ = leafs_of("sum")
    with device.init_backend() as meta, ggmlb.alloc_ctx_tensors(ctx, meta):
        y = Context().sum_rows(x)
        with GraphAllocator(device.buffer_type) as allocator:
            graph = Graph().build_forward_expand(y)
            allocator.alloc_graph(graph)
            plan: Any = meta.graph_plan_create(graph)
            parts = [own for stage in plan.stages for own in stage.plans if own is not None]
            assert parts
            meta.graph_plan_free(plan)
            assert all(own.is_freed for own in parts)
            with pytest.raises(ggmlb.FreedError):
                meta.graph_plan_compute(plan)
    assert device.reg.devices == (device,)
    assert device.reg.name == "Meta"


def test_devices_of_two_kinds_do_not_sum_by_the_means_of_one() -> None:
    class Reg(FakeReg):
        def get_proc_address(self, name: str) -> Any:
            return pytest.fail

    with Reg(2).devices[0].init_backend() as fake, CPU.init_backend() as cpu:
        assert not MetaCommunicator([fake, cpu]).allreduce([])
        assert not MetaCommunicator([fake]).allreduce([])
