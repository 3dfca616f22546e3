"""GraphAllocator: who lies where."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ggmlb.core.context import Context
from ggmlb.core.dtypes import DType
from ggmlb.core.enums import Op
from ggmlb.core.errors import AllocationError
from ggmlb.core.graph import Graph
from ggmlb.core.ops import SPECS
from ggmlb.core.tensor import Tensor
from ggmlb.runtime.alloc import GraphAllocator
from ggmlb.testing.memory import TestMemory
from tests.support.alloc_support import N, f32, graph_of, memory, place

# -- who lies where --------------------------------------------------------------------------------


def test_memory_of_dead_tensors_is_reused() -> None:
    ctx = Context()
    x = f32(ctx)
    chain = [x]
    for _ in range(6):
        chain.append(ctx.cont(chain[-1]))  # never in place
    with GraphAllocator(memory()) as allocator:
        allocator.alloc_graph(graph_of(chain[-1]))
        assert [t.offset for t in chain] == [0, N, 0, N, 0, N, 0]
        assert allocator.get_buffer_size() == 2 * N


@pytest.mark.parametrize(
    ("build", "shares"),
    [
        (lambda c, a, b: c.scale(a, 2.0), "a"),
        (lambda c, a, b: c.add(a, b), "a"),
        (lambda c, a, b: c.sqr(a), "a"),
        (lambda c, a, b: c.relu(a), "a"),
        (lambda c, a, b: c.rms_norm(a, 1e-5), "a"),
        (lambda c, a, b: c.soft_max(a), "a"),
        (lambda c, a, b: c.cont(a), ""),
        (lambda c, a, b: c.norm(a, 1e-5), ""),
        (lambda c, a, b: c.mul(a, a), ""),
        (lambda c, a, b: c.mul(a, c.reshape_2d(a, 16, 1)), ""),
        (lambda c, a, b: c.add(c.view_1d(b, 16), a), "a"),  # b's view has its layout, but is a view
        (lambda c, a, b: c.relu(c.view_1d(a, 8)), ""),
        (lambda c, a, b: c.soft_max_ext(b, a, 1.0, 0.0), "b"),
    ],
)
def test_an_op_takes_the_place_of_an_operand_that_nothing_else_needs(
    build: Callable[[Context, Tensor, Tensor], Tensor], shares: str
) -> None:
    ctx = Context()
    a, b = ctx.cont(f32(ctx)), ctx.cont(f32(ctx))
    node = build(ctx, a, b)
    with GraphAllocator(memory()) as allocator:
        allocator.alloc_graph(graph_of(a, b, node))
        assert [name for name, t in (("a", a), ("b", b)) if node.offset == t.offset] == list(shares)


def test_a_mask_never_lends_its_place() -> None:
    ctx = Context()
    a, mask = ctx.cont(f32(ctx)), ctx.cont(f32(ctx))
    node = ctx.soft_max_ext(a, mask, 1.0, 0.0)
    with GraphAllocator(memory()) as allocator:
        allocator.alloc_graph(graph_of(ctx.cont(ctx.add(node, a))))
        assert node.offset not in (a.offset, mask.offset)


def test_the_ops_that_work_in_place_are_those_of_ggml() -> None:
    expected = """
        FILL SCALE DIAG_MASK_ZERO DIAG_MASK_INF ADD ADD_ID ADD1 SUB MUL DIV SQR SQRT LOG UNARY ROPE ROPE_BACK
        SILU_BACK RMS_NORM RMS_NORM_BACK SOFT_MAX SOFT_MAX_BACK
    """
    assert {op.value for op, spec in SPECS.items() if spec.inplace} == set(expected.split())


def test_of_two_operands_the_one_that_dies_lends_its_place() -> None:
    ctx = Context()
    a, b = ctx.cont(f32(ctx)), ctx.cont(f32(ctx))
    first = ctx.sub(a, b)
    second = ctx.cont(ctx.add(first, a))  # a is needed after the subtraction
    with GraphAllocator(memory()) as allocator:
        allocator.alloc_graph(graph_of(second))
        assert first.offset == b.offset != a.offset


@pytest.mark.parametrize("flag", ["output", "used later", "viewed later", "elsewhere", "other memory"])
def test_an_operand_that_is_needed_lends_nothing(flag: str) -> None:
    ctx = Context()
    a = ctx.cont(f32(ctx))
    view = ctx.view_1d(a, 8)
    node = ctx.scale(a, 2.0)
    results = [node]
    ids = None
    first, second = memory(), memory()
    if flag == "output":
        ctx.set_output(a)
    elif flag == "used later":
        results.append(ctx.cont(a))
    elif flag == "viewed later":
        results += [view, ctx.cont(view)]
    elif flag == "elsewhere":
        place(a)
    graph = graph_of(*results)
    if flag == "other memory":
        ids = [0 if t is a else 1 for t in graph.nodes]
    with GraphAllocator([first, second]) as allocator:
        allocator.alloc_graph_n(graph, ids, None)
        assert (node.buffer, node.offset) != (a.buffer, a.offset)


def test_views_lie_in_their_source_and_keep_it() -> None:
    ctx = Context()
    x = f32(ctx)
    a = ctx.cont(x)
    view = ctx.view_1d(ctx.reshape_2d(a, 4, 4), 4, 16)
    b = ctx.cont(x)
    c = ctx.cont(b)
    last = ctx.cont(view)
    graph = Graph([a, view.src[0], view, b, c, last], [x])  # type: ignore[list-item]
    with GraphAllocator(memory()) as allocator:
        allocator.alloc_graph(graph)
        assert (view.buffer, view.offset) == (a.buffer, a.offset + 16)
        assert len({a.offset, b.offset, c.offset}) == 3


def test_a_result_that_is_a_view_keeps_its_source() -> None:
    ctx = Context()
    x = f32(ctx)
    a = ctx.cont(x)
    view = ctx.view_1d(a, 4)
    others = [ctx.cont(x)]
    for _ in range(3):
        others.append(ctx.cont(others[-1]))
    with GraphAllocator(memory()) as allocator:
        allocator.alloc_graph(graph_of(view, others[-1]))
        assert a.offset not in {t.offset for t in others}


def test_inputs_lie_side_by_side_and_may_be_overwritten_after_their_last_use() -> None:
    ctx = Context()
    x, y, unused = (ctx.set_input(f32(ctx)) for _ in range(3))
    a = ctx.cont(x)
    late = ctx.add(ctx.cont(a), y)
    graph = graph_of(late)
    graph.leafs.append(unused)
    with GraphAllocator(memory()) as allocator:
        allocator.alloc_graph(graph)
        assert sorted(t.offset for t in (x, y, unused)) == [0, N, 2 * N]
        assert late.src[0] is not None and late.src[0].offset == x.offset


def test_inputs_are_kept_on_request() -> None:
    ctx = Context()
    x = ctx.set_input(f32(ctx))
    nodes = [ctx.scale(x, 2.0)]
    for _ in range(4):
        nodes.append(ctx.cont(nodes[-1]))
    graph = graph_of(nodes[-1])
    with GraphAllocator(memory(), keep_inputs=True) as allocator:
        allocator.alloc_graph(graph)
        assert x.offset not in {t.offset for t in nodes}
    assert GraphAllocator(memory()).reserve_n_size(graph) == [2 * N]


def test_an_input_that_is_a_node_is_placed_before_all_nodes() -> None:
    ctx = Context()
    nodes = [ctx.cont(f32(ctx))]
    for _ in range(3):
        nodes.append(ctx.cont(nodes[-1]))
    late = ctx.set_input(ctx.arange(0.0, 16.0, 1.0))
    with GraphAllocator(memory()) as allocator:
        allocator.alloc_graph(graph_of(ctx.cont(ctx.add(nodes[-1], late))))
        assert late.offset not in {t.offset for t in nodes}


@pytest.mark.parametrize("as_view", [False, True])
def test_outputs_are_never_overwritten(as_view: bool) -> None:
    ctx = Context()
    a = ctx.cont(f32(ctx))
    ctx.set_output(ctx.view_1d(a, 4) if as_view else a)
    reader = ctx.tensors[-1]
    nodes = [ctx.cont(reader)]
    for _ in range(4):
        nodes.append(ctx.scale(ctx.cont(nodes[-1]), 2.0))
    with GraphAllocator(memory()) as allocator:
        allocator.alloc_graph(graph_of(nodes[-1]))
        assert all(t.offset != a.offset for t in ctx if t.op in (Op.CONT, Op.SCALE) and t is not a)


def test_tensors_in_other_buffers_are_left_alone() -> None:
    ctx = Context()
    w, cache, x = f32(ctx, name="w"), f32(ctx, name="cache"), f32(ctx)
    place(w, cache)
    where = {t: (t.buffer, t.offset) for t in (w, cache)}
    stored = ctx.cpy(ctx.view_1d(x, 8), ctx.view_1d(cache, 8, 32))
    node = ctx.add(ctx.cont(x), w)
    with GraphAllocator(memory()) as allocator:
        allocator.alloc_graph(graph_of(stored, node))
        assert where == {t: (t.buffer, t.offset) for t in (w, cache)}
        assert (stored.buffer, stored.offset) == (cache.buffer, cache.offset + 32)
        assert allocator.get_buffer_size() == 2 * N


def test_a_view_made_before_its_source_was_placed_follows_it() -> None:
    ctx = Context()
    w = f32(ctx)
    view = ctx.view_1d(w, 4, 16)
    place(w)
    with GraphAllocator(memory()) as allocator:
        allocator.alloc_graph(graph_of(ctx.cont(view)))
        assert (view.buffer, view.offset) == (w.buffer, w.offset + 16)


def test_tensors_without_bytes_have_a_place_and_take_nothing() -> None:
    ctx = Context()
    empty = ctx.cont(ctx.new_tensor(DType.F32, (0, 4)))
    with GraphAllocator(memory()) as allocator:
        allocator.alloc_graph(graph_of(empty))
        assert empty.buffer is not None and empty.get().size == 0
        assert allocator.get_buffer_size() == 0
        allocator.alloc_graph(Graph())


# -- limits, alignment, sizes ----------------------------------------------------------------------


def test_chunks_when_a_buffer_has_a_largest_size() -> None:
    ctx = Context()
    leafs = [f32(ctx) for _ in range(5)]
    total = leafs[0]
    for t in leafs[1:]:
        total = ctx.add(total, t)
    kind = memory(max_size=2 * N)
    with GraphAllocator(kind) as allocator:
        allocator.alloc_graph(graph_of(total))
        assert len({t.buffer for t in leafs}) == 3
        assert len({(t.buffer, t.offset) for t in leafs}) == 5
        assert allocator.get_buffer_size() == 5 * N
        assert kind.n_buffers == 3
    assert kind.n_buffers == 0


def test_a_tensor_larger_than_the_largest_buffer_is_named() -> None:
    ctx = Context()
    big = ctx.set_name(ctx.cont(f32(ctx, 40)), "big")
    kind = memory(max_size=2 * N)
    with GraphAllocator(kind) as allocator:
        for call in (allocator.reserve, allocator.alloc_graph, allocator.reserve_n_size):
            with pytest.raises(AllocationError, match=r"exceeds a buffer's 128 bytes"):
                call(graph_of(ctx.cont(big)))
    assert kind.n_calls == 0


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
