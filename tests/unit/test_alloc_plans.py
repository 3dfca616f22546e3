"""GraphAllocator: plans that are kept, memory that grows, and its end."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest

from ggmlb.core.context import Context
from ggmlb.core.dtypes import DType
from ggmlb.core.enums import Op, TensorFlag
from ggmlb.core.errors import FreedError, GraphError
from ggmlb.core.graph import Graph
from ggmlb.core.placement import placement_clock
from ggmlb.core.tensor import Tensor, layout_of
from ggmlb.runtime.alloc import GraphAllocator
from ggmlb.testing.memory import TestBuffer
from tests.support.alloc_support import f32, graph_of, memory, model, place

# -- plans that are kept ---------------------------------------------------------------------------


def test_the_same_topology_is_planned_once_and_what_did_not_move_is_not_touched() -> None:
    with GraphAllocator(memory()) as allocator:
        graph, _, y = model()
        allocator.alloc_graph(graph)
        now, where = placement_clock.now, (y.buffer, y.offset)
        allocator.alloc_graph(graph)
        assert placement_clock.now == now
        again, _, y2 = model()
        allocator.alloc_graph(again)
        assert placement_clock.now == now + 1
        assert (y2.buffer, y2.offset) == where
        assert (allocator.n_plans, allocator.n_reallocs) == (1, 1)


def test_after_reserve_smaller_graphs_allocate_and_plan_nothing() -> None:
    kind = memory()
    with GraphAllocator(kind) as allocator:
        allocator.reserve(model(1000)[0])
        for n in (1, 999, 16, 1000):
            graph, _, y = model(n)
            allocator.alloc_graph(graph)
            assert y.nbytes == 4 * n and y.buffer is not None
        assert (allocator.n_plans, allocator.n_reallocs, kind.n_calls) == (1, 1, 1)


def test_a_larger_plan_is_found_behind_a_smaller_one_and_sizes_take_turns() -> None:
    def product(n: int, m: int) -> Graph:
        ctx = Context()
        a, b = (ctx.sqr(ctx.new_tensor(DType.F32, (k, 8))) for k in (n, m))
        return graph_of(ctx.out_prod(a, b))

    with GraphAllocator(memory()) as allocator:
        for n in (64, 4):
            allocator.reserve(product(n, n))
        for sizes in ((64, 64), (99, 2), (2, 99), (99, 2), (2, 99)):
            allocator.alloc_graph(product(*sizes))
        assert allocator.n_plans == 4


def test_growing_replaces_the_memory_only_where_it_must() -> None:
    first, second = memory(), memory()
    with GraphAllocator([first, second]) as allocator:
        for n, calls in ((16, 1), (8, 1), (100, 2), (50, 2), (200, 3)):
            graph, _, _ = model(n)
            # All nodes in the first memory, the leaf, always as large, in the second.
            small = f32(Context())
            graph.leafs.append(small)
            ids = [0] * len(graph.nodes)
            allocator.alloc_graph_n(graph, ids, [0, 1])
            assert (first.n_calls, second.n_calls) == (calls, 1)
            assert first.n_buffers == second.n_buffers == 1


def test_alternating_topologies_are_planned_once_each() -> None:
    with GraphAllocator(memory()) as allocator:
        for _ in range(3):
            for extra in (False, True):
                allocator.alloc_graph(model(extra=extra)[0])
        assert allocator.n_plans == 2


def _flag(graph: Graph, flag: int) -> None:
    graph.nodes[0].flags |= flag


@pytest.mark.parametrize(
    "change",
    [
        lambda g: _flag(g, TensorFlag.OUTPUT),
        lambda g: _flag(g, TensorFlag.INPUT),
        lambda g: setattr(g.nodes[-1], "src", (g.nodes[1], g.nodes[0])),
        lambda g: setattr(g.nodes[-1], "src", (g.nodes[1],)),
        lambda g: setattr(g.nodes[1], "op", Op.SQRT),
        lambda g: place(g.nodes[1]),
        lambda g: setattr(g.nodes[2], "view_src", g.nodes[1]),
        lambda g: g.nodes.pop(),
    ],
    ids=["output", "input", "other edge", "fewer edges", "op", "placed elsewhere", "view", "fewer nodes"],
)
def test_what_a_plan_depends_on_makes_another_plan(change: Callable[[Graph], object]) -> None:
    """The same number and sizes of tensors do not make the same topology."""
    with GraphAllocator(memory()) as allocator:
        allocator.alloc_graph(model()[0])
        changed = model()[0]
        change(changed)
        allocator.alloc_graph(changed)
        assert allocator.n_plans == 2
        allocator.alloc_graph(model()[0])
        assert allocator.n_plans == 2


def test_a_plan_in_place_is_not_used_for_another_layout() -> None:
    def build(transposed: bool) -> tuple[Graph, Tensor, Tensor]:
        ctx = Context()
        a = ctx.cont(ctx.new_tensor(DType.F32, (4, 4)))
        b = ctx.scale(a, 2.0)
        if transposed:  # as a backend's own layout might be
            b.nb = (16, 4, 64, 64)
            b.layout = layout_of(b.dtype, b.ne, b.nb)
        return graph_of(b), a, b

    with GraphAllocator(memory()) as allocator:
        graph, a, b = build(False)
        allocator.alloc_graph(graph)
        assert a.offset == b.offset
        graph, a, b = build(True)
        allocator.alloc_graph(graph)
        assert a.offset != b.offset
        assert allocator.n_plans == 2


def test_other_buffer_ids_make_another_plan() -> None:
    with GraphAllocator([memory(), memory()]) as allocator:
        graph, x, _ = model()
        ids = [0] * len(graph.nodes)
        allocator.alloc_graph_n(graph, ids, [0])
        here = x.buffer
        allocator.alloc_graph_n(graph, ids, [1])
        assert x.buffer is not here
        assert allocator.n_plans == 2
        allocator.alloc_graph(graph)  # the last ids hold
        assert x.buffer is not here
        assert allocator.n_plans == 2


def test_several_memories_need_ids_once_per_topology() -> None:
    with GraphAllocator([memory(), memory()]) as allocator:
        graph, x, _ = model()
        with pytest.raises(GraphError, match="call reserve_n first"):
            allocator.alloc_graph(graph)
        assert x.buffer is None
        allocator.reserve_n(graph, None, [1])
        allocator.alloc_graph(model(8)[0])
        larger, x, _ = model(400)
        allocator.alloc_graph(larger)  # ggml cannot do this
        assert x.buffer is not None and x.buffer.buft is allocator.bufts[1]
    one = memory()
    with GraphAllocator([one, one]) as allocator:
        allocator.alloc_graph(model()[0])  # one memory, all the same


def test_plans_keep_no_tensors_alive() -> None:
    with GraphAllocator(memory()) as allocator:
        graph, x, y = model()
        allocator.alloc_graph(graph)
        alive = [weakref.ref(t) for t in (x, y)]
        del graph, x, y
        gc.collect()
        assert [ref() for ref in alive] == [None, None]


# -- end of life -----------------------------------------------------------------------------------


def test_a_freed_allocator_is_refused_and_another_places_its_tensors_anew() -> None:
    kind = memory()
    graph, x, _ = model()
    with GraphAllocator(kind) as allocator:
        allocator.alloc_graph(graph)
        assert repr(allocator) == f"<GraphAllocator Test {kind.used} bytes>"
    assert kind.n_buffers == 0
    assert repr(allocator) == "<GraphAllocator (freed)>"
    for call in (
        allocator.free,
        lambda: allocator.alloc_graph(graph),
        lambda: allocator.alloc_graph_n(graph, None, None),
        lambda: allocator.reserve(graph),
        lambda: allocator.reserve_n_size(graph),
    ):
        with pytest.raises(FreedError, match="GraphAllocator was freed"):
            call()
    with pytest.raises(FreedError):
        x.get()
    with GraphAllocator(kind) as another:
        another.alloc_graph(graph)
        x.get()


def test_a_weight_in_a_freed_buffer_is_an_error() -> None:
    ctx = Context()
    w = f32(ctx, name="w")
    place(w)
    node = ctx.cont(w)
    assert w.buffer is not None
    w.buffer.free()
    with GraphAllocator(memory()) as allocator, pytest.raises(FreedError, match=r"'w'.* in a freed .*; pla"):
        allocator.alloc_graph(graph_of(node))
    assert node.buffer is None


# -- hooks -----------------------------------------------------------------------------------------


def test_hooks_see_every_tensor_once_from_a_clean_state(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(TestBuffer, "_init_tensor", lambda buffer, tensor: seen.append(tensor.name))
    monkeypatch.setattr(TestBuffer, "_reset", lambda buffer: seen.append("reset"))
    ctx = Context()
    w, x = f32(ctx, name="w"), f32(ctx, name="x")
    place(w)
    seen.clear()
    view_w = ctx.set_name(ctx.view_1d(w, 8), "view of w")
    view_w.buffer = None
    view_x = ctx.set_name(ctx.view_1d(x, 8), "view of x")
    y = ctx.set_name(ctx.add(view_x, view_w), "y")
    with GraphAllocator(memory()) as allocator:
        allocator.alloc_graph(graph_of(y))
        assert seen[0] == "reset"
        assert sorted(seen[1:]) == ["view of w", "view of x", "x", "y"]
        seen.clear()
        allocator.alloc_graph(graph_of(y))
        assert seen == []
        y.buffer = None  # one that moves resets the memory of all
        allocator.alloc_graph(graph_of(y))
        assert (seen[0], sorted(seen[1:])) == ("reset", ["view of x", "x", "y"])
