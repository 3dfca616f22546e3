"""Random graphs: tensors alive at the same time share no byte, and results are those without reuse."""

from __future__ import annotations

import sys

from hypothesis import given
from hypothesis import strategies as st

from ggmlb.interface.registry import init_by_name
from ggmlb.runtime.alloc import GraphAllocator, TensorAllocator
from ggmlb.testing.memory import TestMemory
from tests.support.alloc_programs import (
    Program,
    check_places,
    overlap,
    place_without_reuse,
    programs,
    results,
    set_leafs,
)

N_BUFTS = 3


@st.composite
def memories(draw: st.DrawFn) -> list[TestMemory]:
    """Draw kinds of memory; the last may be the first again."""
    kinds = [
        TestMemory(
            f"M{i}",
            alignment=draw(st.sampled_from([4, 32, 128])),
            # Larger than any tensor here.
            max_size=draw(st.sampled_from([sys.maxsize, 2048, 1024])),
        )
        for i in range(N_BUFTS)
    ]
    if draw(st.booleans()):
        kinds[2] = kinds[0]
    return kinds


def place_weights(program: Program) -> None:
    allocator = TensorAllocator(TestMemory().alloc_buffer(4096))
    for t in program.weights:
        allocator.alloc(t)


@given(program=programs(N_BUFTS), kinds=memories())
def test_nothing_alive_is_overwritten(program: Program, kinds: list[TestMemory]) -> None:
    place_weights(program)
    with GraphAllocator(kinds) as allocator:
        sizes = allocator.reserve_n_size(program.graph, program.node_ids, program.leaf_ids)
        assert not any(kind.n_calls for kind in kinds)
        allocator.alloc_graph_n(program.graph, program.node_ids, program.leaf_ids)
        assert sizes == [allocator.get_buffer_size(i) for i in range(N_BUFTS)]
        check_places(program)
        where = [(t.buffer, t.offset) for t in program.graph]
        n_calls = [kind.n_calls for kind in kinds]
        allocator.alloc_graph(program.graph)
        assert where == [(t.buffer, t.offset) for t in program.graph]
        assert n_calls == [kind.n_calls for kind in kinds]
        assert allocator.n_plans == 2  # to measure, and to allocate
    assert not any(kind.n_buffers for kind in kinds)


@given(several=st.lists(programs(1, max_nodes=8), min_size=2, max_size=5), kinds=memories())
def test_one_allocator_serves_graph_after_graph(several: list[Program], kinds: list[TestMemory]) -> None:
    """Each finds memory that earlier graphs used and plans that they left, and none disturbs another."""
    for program in several:
        place_weights(program)
    with GraphAllocator(kinds[0]) as allocator:
        for program in several * 2:
            allocator.alloc_graph(program.graph)
            check_places(program)
        size = allocator.get_buffer_size()
    assert size <= max_size_of_all(several, kinds[0])


def max_size_of_all(several: list[Program], kind: TestMemory) -> int:
    """A bound on what the graphs need: every tensor at once, chunk after chunk."""
    return sum(
        -(-t.nbytes // kind.alignment) * kind.alignment
        + (0 if kind.max_size == sys.maxsize else kind.max_size)
        for program in several
        for t in program.graph
    )


@given(program=programs(1), kinds=memories())
def test_inputs_survive_on_request(program: Program, kinds: list[TestMemory]) -> None:
    place_weights(program)
    inputs = [t for t in program.graph.leafs if t.flags]
    with GraphAllocator(kinds[0], keep_inputs=True) as allocator:
        allocator.alloc_graph(program.graph)
        check_places(program)
        others = [t for t in program.graph if t.view_src is None]
        assert not any(overlap(x, t) for x in inputs for t in others if t is not x)


@given(program=programs(1, splits=False))
def test_the_cpu_computes_the_same_with_reuse_as_without(program: Program) -> None:
    with init_by_name("CPU") as cpu:
        graph = program.graph

        def compute() -> list[bytes]:
            set_leafs(program)
            cpu.graph_compute(graph)
            return [t.get().tobytes() for t in results(graph)]

        place_without_reuse(program, cpu.default_buffer_type)
        expected = compute()
        for t in program.graph:
            t.buffer = None
        place_weights(program)
        with GraphAllocator(cpu.default_buffer_type) as allocator:
            allocator.alloc_graph(graph)
            assert compute() == expected
