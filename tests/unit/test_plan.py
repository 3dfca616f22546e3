"""How a plan knows that it is still right."""

from __future__ import annotations

import numpy as np
import pytest

from ggmlb.core.context import Context
from ggmlb.core.enums import BufferUsage
from ggmlb.core.graph import Graph
from ggmlb.core.placement import frozen
from ggmlb.interface.registry import init_by_name
from ggmlb.runtime.alloc import alloc_ctx_tensors


def test_a_new_buffer_with_the_id_of_a_dropped_one_is_noticed() -> None:
    ctx = Context()
    x = ctx.new_tensor("f32", 8)
    y = ctx.scale(x, 2.0)
    graph = Graph().build_forward_expand(y)
    with init_by_name("CPU") as cpu:
        for i in range(20):  # memory of objects is given out again at once
            with alloc_ctx_tensors(ctx, cpu):
                x.set_array(np.full(8, i))
                cpu.graph_compute(graph)
                assert y.to_numpy()[0] == 2 * i
            x.buffer = y.buffer = None


def test_a_plan_is_not_taken_for_another_graph_of_as_many_nodes() -> None:
    ctx = Context()
    x = ctx.new_tensor("f32", 8)
    y, z = ctx.sqr(x), ctx.scale(x, 3.0)
    with init_by_name("CPU") as cpu, alloc_ctx_tensors(ctx, cpu):
        x.set_array(np.arange(8))
        plan = cpu.graph_plan_create(Graph().build_forward_expand(y))
        again = Graph().build_forward_expand(y)
        assert cpu.graph_plan_update(plan, again) is plan, "another graph of the same nodes"
        cpu.graph_plan_compute(cpu.graph_plan_update(plan, Graph().build_forward_expand(z)))
        cpu.synchronize()
        assert z.to_numpy().tolist() == [3 * i for i in range(8)]


CHANGES = {
    "set": lambda p: p.__setitem__("scale", 3.0),
    "update": lambda p: p.update(scale=3.0),
    "or": lambda p: p.__ior__({"scale": 3.0}),
    "delete and set by default": lambda p: (p.__delitem__("scale"), p.setdefault("scale", 3.0)),
    "pop and set": lambda p: (p.pop("scale"), p.update(scale=3.0)),
    "clear and set": lambda p: (kept := dict(p), p.clear(), p.update(kept, scale=3.0)),
    "pop the last item and set": lambda p: (p.popitem(), p.update({"bias": 0.0, "scale": 3.0})),
}


@pytest.mark.parametrize("way", CHANGES)
def test_every_way_to_change_a_parameter_is_seen(way: str) -> None:
    ctx = Context()
    x = ctx.new_tensor("f32", 8)
    y = ctx.scale_bias(x, 2.0, 0.0)
    with init_by_name("CPU") as cpu, alloc_ctx_tensors(ctx, cpu):
        x.set_array(np.ones(8))
        plan = cpu.graph_plan_create(Graph().build_forward_expand(y))
        CHANGES[way](y.params)
        cpu.graph_plan_compute(plan)
        assert y.to_numpy()[0] == 3


def test_the_sign_of_a_zero_is_seen_and_an_array_in_a_functions_data() -> None:
    ctx = Context()
    x = ctx.new_tensor("f32", 2)
    y = ctx.fill(x, 0.0)
    z = ctx.map_custom1(x, lambda dst, a, ith, nth, data: np.copyto(dst, data), 1, np.ones(2))
    with init_by_name("CPU") as cpu, alloc_ctx_tensors(ctx, cpu):
        plan = cpu.graph_plan_create(Graph().build_forward_expand(y, z))
        y.params["value"], z.params["userdata"] = -0.0, np.full(2, 5)
        cpu.graph_plan_compute(plan)
        assert np.signbit(y.to_numpy()).all()
        assert z.to_numpy().tolist() == [5, 5]


@pytest.mark.parametrize("by", ["a flag", "its memory's usage"])
def test_a_result_that_is_kept_from_now_on_is_written_by_a_kept_plan(by: str) -> None:
    ctx = Context()
    x, w = ctx.new_tensor("f32", (64, 4)), ctx.new_tensor("f32", 64)
    h = ctx.rms_norm(x, 1e-6)
    graph = Graph().build_forward_expand(ctx.set_output(ctx.mul(h, w)))
    with init_by_name("LLVM") as llvm, alloc_ctx_tensors(ctx, llvm) as buffer:
        buffer.usage = BufferUsage.COMPUTE
        for leaf in graph.leafs:
            leaf.set_array(np.ones(leaf.shape))
        h.memset(0)
        plan = llvm.graph_plan_create(graph)
        llvm.graph_plan_compute(plan)
        assert not h.to_numpy().any(), "this test needs a kernel that leaves the norm out"
        if by == "a flag":
            ctx.set_output(h)
        else:
            buffer.usage = BufferUsage.ANY
        llvm.graph_plan_compute(plan)
        assert np.allclose(h.to_numpy(), 1)


def test_parameters_as_a_key_tell_equal_values_apart() -> None:
    values = [0.0, -0.0, 0, False, 1, 1.0, True, "1"]
    assert len({frozen({"a": value}) for value in values}) == len(values)
    assert frozen({"a": 1.0, "b": 2}) == frozen({"a": 1.0, "b": 2}) != frozen({"b": 2, "a": 1.0})
