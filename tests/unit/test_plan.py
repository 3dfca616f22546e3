"""How a plan knows that it is still right."""

from __future__ import annotations

import numpy as np
import pytest

import ggmlb
from ggmlb.alloc import alloc_ctx_tensors
from ggmlb.context import Context
from ggmlb.graph import Graph
from ggmlb.registry import init_by_name


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


def test_a_plan_is_freed_once_and_by_its_own_stream() -> None:
    with init_by_name("CPU") as cpu, init_by_name("CPU") as other:
        plan = cpu.graph_plan_create(Graph())
        for call in (other.graph_plan_free, other.graph_plan_compute):
            with pytest.raises(ggmlb.GraphError, match="belongs to another backend"):
                call(plan)
        cpu.graph_plan_free(plan)
        for call in (cpu.graph_plan_free, cpu.graph_plan_compute):
            with pytest.raises(ggmlb.FreedError, match="the plan was freed"):
                call(plan)
