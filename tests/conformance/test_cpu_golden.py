"""The CPU backend computes what ggml computed, for every golden program."""

from __future__ import annotations

from pathlib import Path

import pytest

from ggmlb.alloc import GraphAllocator, alloc_ctx_tensors
from ggmlb.backends.cpu import backend_reg
from ggmlb.enums import VIEW_OPS, Status
from ggmlb.testing.programs import load_cases

CASES = load_cases(Path(__file__).parents[1] / "golden" / "programs")
POISON = 0xFF  # NaN in every float type, so that an element that is not written shows


@pytest.fixture(scope="module")
def cpu():
    with backend_reg().devices[0].init_backend() as backend:
        yield backend


def check(built):
    wrong = {name: verdict.reason for name, verdict in built.compare().items() if not verdict.ok}
    assert not wrong


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_every_tensor_in_memory_of_its_own(case, cpu):
    built = case.build()
    with alloc_ctx_tensors(built.ctx, cpu) as buffer:
        buffer.clear(POISON)
        built.upload()
        assert cpu.graph_compute(built.graph) is Status.SUCCESS
        check(built)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_results_in_the_memory_of_their_operands(case, cpu):
    built = case.build()
    allocator = GraphAllocator(cpu.default_buffer_type)
    allocator.alloc_graph(built.graph)
    for leaf in case.leafs:
        tensor = built.tensors[leaf.name]
        if tensor.buffer is not None:  # some give only their shape, and are in no graph
            tensor.set(leaf.data)
    assert cpu.graph_compute(built.graph) is Status.SUCCESS
    check(built)
    allocator.free()


def writes_into_operands(node):
    return node.view_src is not None and node.op not in VIEW_OPS


@pytest.mark.parametrize(
    "case", [c for c in CASES if c.family in ("programs", "mul_mat", "softmax", "rope")], ids=lambda c: c.id
)
def test_a_plan_computes_again(case, cpu):
    built = case.build()
    if any(writes_into_operands(node) for node in built.graph.nodes):
        pytest.skip("computing it again is meant to give something else")
    with alloc_ctx_tensors(built.ctx, cpu):
        built.upload()
        plan = cpu.graph_plan_create(built.graph)
        for _ in range(2):
            for node in built.graph.nodes:
                if node.view_src is None:
                    node.memset(POISON)
            assert cpu.graph_plan_compute(plan) is Status.SUCCESS
            check(built)
