"""Graph copies, and the comparison of two backends node by node."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np
import pytest

from ggmlb import (
    AllocationError,
    ArgumentError,
    Backend,
    Context,
    DType,
    FreedError,
    Graph,
    GraphAllocator,
    NotAllocatedError,
    Op,
    Tensor,
    alloc_ctx_tensors,
    compare_graph_backend,
    cpu_buffer_type,
    graph_copy,
)
from ggmlb.testing.fake import FakeReg


@pytest.fixture
def program() -> Iterator[tuple[Graph, dict[str, Tensor]]]:
    """A graph with a view, an in-place op and a strided view, each tensor in memory of its own."""
    ctx = Context()
    with ExitStack() as stack:
        x = ctx.new_tensor(DType.F32, (4, 6))
        w = ctx.new_tensor(DType.F32, (4, 3))
        y = ctx.mul_mat(w, x)  # (3, 6)
        part = ctx.view_2d(y, 3, 2, y.nb[1] * 2, 0)
        z = ctx.add_inplace(ctx.sqr(part), part)
        t = ctx.cont(ctx.transpose(z))
        graph = Graph().build_forward_expand(t)
        stack.enter_context(alloc_ctx_tensors(ctx, cpu_buffer_type()))
        random = np.random.default_rng(0)
        x.set_array(random.standard_normal((6, 4), np.float32))
        w.set_array(random.standard_normal((3, 4), np.float32))
        yield graph, {"x": x, "w": w, "y": y, "z": z, "t": t}


Program = tuple[Graph, dict[str, Tensor]]


def test_a_copy_computes_the_same_in_memory_of_its_own(cpu: Backend, program: Program) -> None:
    graph, named = program
    cpu.graph_compute(graph)
    expected = named["t"].to_numpy()
    with FakeReg(1).devices[0].init_backend() as gpu, graph_copy(gpu, graph) as copy:
        assert [n.op for n in copy.graph.nodes] == [n.op for n in graph.nodes]
        assert [n.nb for n in copy.graph.nodes] == [n.nb for n in graph.nodes]
        np.testing.assert_array_equal(copy[named["x"]].to_numpy(), named["x"].to_numpy())
        np.testing.assert_array_equal(copy[named["t"]].to_numpy(), expected)  # results come along
        named["x"].memset(0)
        named["t"].memset(0)
        gpu.graph_compute(copy.graph)
        np.testing.assert_allclose(copy[named["t"]].to_numpy(), expected, rtol=1e-6)
        assert all(t.buffer is copy.buffer for t in copy.ctx)
    assert copy.buffer.is_freed
    with pytest.raises(FreedError):
        copy.free()


def test_a_copy_of_a_part_brings_what_it_reads(cpu: Backend, program: Program) -> None:
    graph, named = program
    cpu.graph_compute(graph)
    last = graph.view(len(graph) - 1, len(graph))
    with graph_copy(cpu, last) as copy:
        copy[named["t"]].memset(0)
        cpu.graph_compute(copy.graph)
        np.testing.assert_array_equal(copy[named["t"]].to_numpy(), named["t"].to_numpy())


def test_a_part_of_a_long_graph_is_copied_alone(cpu: Backend) -> None:
    ctx = Context()
    y = ctx.new_tensor(DType.F32, 4)
    for _ in range(3000):
        y = ctx.neg(y)
    graph = Graph().build_forward_expand(y)
    with alloc_ctx_tensors(ctx, cpu), graph_copy(cpu, graph.view(2990, 3000)) as copy:
        assert len(copy.ctx) == 11


def test_an_unplaced_graph_cannot_be_copied(cpu: Backend) -> None:
    ctx = Context()
    graph = Graph().build_forward_expand(ctx.sqr(ctx.new_tensor(DType.F32, (4,), "x")))
    with pytest.raises(NotAllocatedError, match="'x'"):
        graph_copy(cpu, graph)


def test_a_copy_that_does_not_fit_leaves_nothing(program: Program) -> None:
    device = FakeReg(1, capacity=64).devices[0]
    with device.init_backend() as gpu, pytest.raises(AllocationError):
        graph_copy(gpu, program[0])
    assert device.used == 0


# -- comparison ------------------------------------------------------------------------------------


def test_every_node_but_views_is_shown(cpu: Backend, program: Program) -> None:
    graph, _ = program
    seen = []

    def look(i: int, a: Tensor, b: Tensor) -> bool:
        assert graph.nodes[i] is a
        np.testing.assert_allclose(a.to_numpy(), b.to_numpy(), rtol=1e-6)
        seen.append(a.op)
        return True

    with FakeReg(1).devices[0].init_backend() as gpu:
        assert compare_graph_backend(cpu, gpu, graph, look)
    assert seen == [Op.MUL_MAT, Op.SQR, Op.ADD, Op.CONT]


def test_the_callback_ends_it(cpu: Backend, program: Program) -> None:
    seen: list[int] = []

    def look(i: int, a: Tensor, b: Tensor) -> bool:
        seen.append(i)
        return len(seen) < 2

    assert not compare_graph_backend(cpu, cpu, program[0], look)
    assert len(seen) == 2


def test_a_wrong_node_is_seen_at_itself_and_after(cpu: Backend, program: Program) -> None:
    """The copy must read its own results: an error is passed on, not healed by the original."""
    graph, _ = program
    wrong = []

    def look(i: int, a: Tensor, b: Tensor) -> bool:
        if a.op is Op.SQR:
            b.memset(0)
        wrong.append((str(a.op), not np.allclose(a.to_numpy(), b.to_numpy())))
        return True

    assert compare_graph_backend(cpu, cpu, graph, look)
    assert wrong == [("MUL_MAT", False), ("SQR", True), ("ADD", True), ("CONT", True)]


def test_chosen_nodes_of_a_graph_whose_memory_is_reused(cpu: Backend) -> None:
    ctx = Context()
    x = ctx.set_input(ctx.new_tensor(DType.F32, (64,)))
    y = x
    for _ in range(5):
        y = ctx.add(ctx.sqr(y), x)
    ctx.set_output(y)
    graph = Graph().build_forward_expand(y)
    seen = []

    def look(i: int, a: Tensor, b: Tensor) -> bool:
        seen.append(a)
        np.testing.assert_allclose(a.to_numpy(), b.to_numpy())
        return True

    with GraphAllocator(cpu_buffer_type()) as allocator:
        allocator.alloc_graph(graph)
        x.set_array(np.linspace(-0.5, 0.5, 64, dtype=np.float32))
        assert compare_graph_backend(cpu, cpu, graph, look, [y])
    assert seen == [y]


def test_a_test_node_must_be_in_the_graph(cpu: Backend, program: Program) -> None:
    stranger = Context().new_tensor(DType.F32, (4,), "stranger")
    with pytest.raises(ArgumentError, match=r"'stranger'.* is no node of the graph"):
        compare_graph_backend(cpu, cpu, program[0], lambda i, a, b: True, [stranger])
