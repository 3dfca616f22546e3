"""GraphAllocator: graphs as a scheduler hands them over, with kinds of memory for each tensor."""

from __future__ import annotations

import pytest

from ggmlb.core.context import Context
from ggmlb.core.enums import BufferUsage
from ggmlb.core.errors import ArgumentError, GraphError
from ggmlb.core.graph import Graph
from ggmlb.core.tensor import Tensor
from ggmlb.runtime.alloc import GraphAllocator
from ggmlb.runtime.compile.allocate import CHUNK_BITS, DynamicAllocator
from ggmlb.testing.memory import TestMemory
from tests.support.alloc_support import N, f32, graph_of, memory


def test_a_view_without_an_op_keeps_what_is_copied_until_then_and_no_longer() -> None:
    ctx = Context()
    a = ctx.cont(f32(ctx))
    others = [ctx.cont(ctx.cont(a.src[0]))]  # type: ignore[arg-type]
    needs_a = Tensor(a.dtype, a.ne, a.nb, src=(a,), view_src=a)
    late = [ctx.cont(others[0]), ctx.cont(others[0])]
    graph = Graph([a, others[0].src[0], *others, needs_a, *late], [a.src[0]])  # type: ignore[list-item]
    with GraphAllocator(memory()) as allocator:
        allocator.alloc_graph(graph)
        assert a.offset not in {t.offset for t in others}
        assert a.offset in {t.offset for t in late}


def test_a_tensor_may_be_leaf_and_node() -> None:
    """As the copies of pipelined inputs are: leafs, so that they come first, and at each split."""
    ctx = Context()
    copy, x = f32(ctx), f32(ctx)
    a = ctx.cont(ctx.cont(x))
    b = ctx.add(a, copy)
    graph = Graph([a.src[0], a, copy, b, copy], [copy, x])  # type: ignore[list-item]
    with GraphAllocator([memory(), memory()]) as allocator:
        allocator.alloc_graph_n(graph, [0, 0, 0, 1, 0], [1, 0])
        assert b.buffer is copy.buffer is not x.buffer
        size = allocator.get_buffer_size(1)
        allocator.alloc_graph(graph)
        assert (allocator.n_plans, allocator.n_reallocs) == (1, 1)
        assert size == N


def test_sources_that_are_not_listed_are_placed_like_leafs() -> None:
    ctx = Context()
    x, base = f32(ctx), f32(ctx)
    view = ctx.view_tensor(base)  # a leaf; its base is in no list
    a = ctx.cont(ctx.cont(x))
    b = ctx.add(a, view)
    graph = Graph([a.src[0], a, b], [view])  # type: ignore[list-item]
    with GraphAllocator([memory(), memory()]) as allocator:
        allocator.alloc_graph_n(graph, [0, 0, 0], [1])
        assert x.buffer is a.buffer
        assert x.offset != base.offset or x.buffer is not base.buffer
        assert (view.buffer, view.offset) == (base.buffer, base.offset)
        assert base.buffer is not x.buffer


def test_nodes_out_of_order_are_refused() -> None:
    ctx = Context()
    a = ctx.cont(f32(ctx))
    b = ctx.cont(a)
    with GraphAllocator(memory()) as allocator, pytest.raises(GraphError, match=r"lists CONT .* before CONT"):
        allocator.alloc_graph(Graph([b, a], [a.src[0]]))  # type: ignore[list-item]
    assert a.buffer is b.buffer is None


def test_the_chunk_that_grows_least_is_taken() -> None:
    arena = DynamicAllocator(64)
    a, b, c = arena.alloc(64), arena.alloc(32), arena.alloc(64)
    assert (a, b, c) == (0, 1 << CHUNK_BITS, 2 << CHUNK_BITS)
    arena.free(a, 64)
    arena.free(b, 32)
    assert [arena.alloc(32), arena.alloc(64)] == [b, a]
    assert arena.peaks == [64, 32, 64]


def test_the_kind_of_memory_is_chosen_per_tensor() -> None:
    ctx = Context()
    x, y = f32(ctx), f32(ctx)
    a = ctx.cont(x)
    view = ctx.view_1d(a, 8)
    b = ctx.add(view, ctx.view_1d(y, 8))
    graph = graph_of(b)
    first, second = memory(), memory()
    nodes = {a: 1, b: 0}
    with GraphAllocator([first, second, first]) as allocator:
        ids = [nodes.get(t, -1) for t in graph.nodes]  # views: it does not matter
        leaf_ids = [2 if t is x else 1 for t in graph.leafs]
        assert allocator.reserve_n_size(graph, ids, leaf_ids) == [N, 2 * N, 0]  # `b` where `x` was
        assert first.n_calls == second.n_calls == 0
        allocator.reserve_n(graph, ids, leaf_ids)
        assert [t.buffer for t in (x, y, a, b)] == [None] * 4
        allocator.alloc_graph(graph)
        kinds = [t.buffer.buft for t in (x, y, a, view, b) if t.buffer is not None]
        assert kinds == [first, second, second, second, first]
        assert [allocator.get_buffer_size(i) for i in range(3)] == [N, 2 * N, 0]
        assert all(t.buffer is not None and t.buffer.usage is BufferUsage.COMPUTE for t in (x, y, a, b))


@pytest.mark.parametrize(
    ("node_ids", "leaf_ids", "match"),
    [
        ([0], [0], "1 node buffer ids for 2 nodes"),
        ([0, 0], [0, 0], "2 leaf buffer ids for 1 leafs"),
        ([0, 2], None, "out of range"),
        (None, [-1], "out of range"),
    ],
)
def test_buffer_ids_that_do_not_fit_are_refused(
    node_ids: list[int] | None, leaf_ids: list[int] | None, match: str
) -> None:
    ctx = Context()
    graph = graph_of(ctx.cont(ctx.cont(f32(ctx))))
    with GraphAllocator([memory(), memory()]) as allocator:
        for call in (allocator.reserve_n, allocator.reserve_n_size, allocator.alloc_graph_n):
            with pytest.raises(ArgumentError, match=match):
                call(graph, node_ids, leaf_ids)
        with pytest.raises(ArgumentError, match="there are 2 buffer types"):
            allocator.get_buffer_size(2)
    with pytest.raises(ArgumentError, match="at least one"):
        GraphAllocator([])


def test_buffer_types_say_what_a_tensor_takes() -> None:
    class Padded(TestMemory):
        def alloc_size(self, tensor: Tensor) -> int:
            return tensor.nbytes + 1

    ctx = Context()
    a = ctx.cont(f32(ctx))
    b = ctx.cont(a)
    kind = Padded(alignment=N)
    with GraphAllocator([kind, memory()]) as allocator:
        allocator.alloc_graph_n(graph_of(b), [0, 1], None)
        assert allocator.get_buffer_size(0) == 4 * N
        assert a.offset == 2 * N
        allocator.alloc_graph(graph_of(b))
        assert allocator.n_plans == 1
