"""The CPU backend computes what ggml computed, for every golden program."""

from __future__ import annotations

import pytest

from ggmlb.backends.common.kinds import Kinds
from ggmlb.backends.cpu import lowering
from ggmlb.backends.cpu.lowering import NodeLowering
from ggmlb.core.enums import Status
from ggmlb.runtime.alloc import GraphAllocator, alloc_ctx_tensors
from tests.support.golden import CASES, POISON


def check(built):
    wrong = {name: verdict.reason for name, verdict in built.compare().items() if not verdict.ok}
    assert not wrong


def writes_into_an_operand(case):
    return any(
        step.fn.startswith(("cpy", "set_rows", "opt_step")) or step.fn.endswith("inplace")
        for step in case.steps
    )


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_every_tensor_in_memory_of_its_own_and_a_plan_that_computes_again(case, cpu):
    built = case.build()
    with alloc_ctx_tensors(built.ctx, cpu) as buffer:
        buffer.clear(POISON)
        built.upload()
        plan = cpu.graph_plan_create(built.graph)
        for _ in range(1 if writes_into_an_operand(case) else 2):
            assert cpu.graph_plan_compute(plan) is Status.SUCCESS
            check(built)
            for node in built.graph.nodes:
                if node.view_src is None:
                    node.memset(POISON)


def place_sharing_memory(built, cpu):
    """Allocate as for use: results lie in the memory of operands that are needed no more."""
    allocator = GraphAllocator(cpu.default_buffer_type)
    allocator.alloc_graph(built.graph)
    for leaf in built.case.leafs:
        tensor = built.tensors[leaf.name]
        if tensor.buffer is not None:  # some give only their shape, and are in no graph
            tensor.set(leaf.data)
    return allocator


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_results_in_the_memory_of_their_operands(case, cpu):
    built = case.build()
    allocator = place_sharing_memory(built, cpu)
    assert cpu.graph_compute(built.graph) is Status.SUCCESS
    check(built)
    allocator.free()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_small_tiles_over_threads(case, cpu, monkeypatch):
    monkeypatch.setattr(NodeLowering, "tile", 50)
    monkeypatch.setattr(NodeLowering, "weight_tile", 700)
    monkeypatch.setattr(NodeLowering, "parallel_work", 0)
    monkeypatch.setattr(NodeLowering, "parallel_call", 0)
    monkeypatch.setattr(lowering, "LEAST_ITEMS", 0)
    monkeypatch.setattr(cpu.device, "kinds", Kinds())
    built = case.build()
    allocator = place_sharing_memory(built, cpu)
    assert cpu.graph_compute(built.graph) is Status.SUCCESS
    check(built)
    allocator.free()
