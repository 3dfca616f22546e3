"""GraphAllocator when memory runs out at any point: nothing leaks, and it can be used on."""

from __future__ import annotations

import pytest

from ggmlb.core.context import Context
from ggmlb.core.errors import AllocationError
from ggmlb.core.graph import Graph
from ggmlb.runtime.alloc import GraphAllocator
from ggmlb.testing.memory import TestBuffer, TestMemory
from tests.support.alloc_support import N, f32, graph_of, memory, model


def wide(n: int) -> tuple[Graph, list[int]]:
    """A graph of many tensors alive at once, and a buffer id for each node, three in turn."""
    ctx = Context()
    leafs = [f32(ctx) for _ in range(n)]
    nodes = [ctx.cont(x) for x in leafs]
    total = nodes[0]
    for t in nodes[1:]:
        total = ctx.add(total, t)
    graph = graph_of(total)
    return graph, [i % 3 for i in range(len(graph.nodes))]


def kinds() -> list[TestMemory]:
    return [memory(max_size=2 * N) for _ in range(3)]


def n_allocations(graph: Graph, ids: list[int]) -> int:
    memories = kinds()
    with GraphAllocator(memories) as allocator:
        allocator.reserve_n(graph, ids, None)
        return sum(kind.n_calls for kind in memories)


N_CALLS = n_allocations(*wide(9))
assert N_CALLS >= 6


class Countdown:
    """Makes the k-th allocation of several kinds of memory fail."""

    def __init__(self, memories: list[TestMemory], k: int, error: type[BaseException]) -> None:
        self.left = k
        self.error = error
        for kind in memories:
            self._wrap(kind)

    def _wrap(self, kind: TestMemory) -> None:
        allocate = kind._alloc_buffer

        def alloc_buffer(nbytes: int) -> TestBuffer:
            self.left -= 1
            if self.left == -1:
                if self.error is not AllocationError:
                    raise self.error
                kind.fail_at = kind.n_calls
            buffer = allocate(nbytes)
            assert isinstance(buffer, TestBuffer)
            return buffer

        kind._alloc_buffer = alloc_buffer  # type: ignore[method-assign]


@pytest.mark.parametrize("grown", [False, True], ids=["first", "grown"])
@pytest.mark.parametrize("k", range(N_CALLS))
@pytest.mark.parametrize("error", [AllocationError, KeyboardInterrupt])
def test_when_the_kth_allocation_fails_all_is_freed_and_the_allocator_works_on(
    k: int, grown: bool, error: type[BaseException]
) -> None:
    memories = kinds()
    graph, ids = wide(9)
    small, small_ids = wide(2)
    with GraphAllocator(memories) as allocator:
        if grown:
            allocator.alloc_graph_n(small, small_ids, None)
            k = min(k, N_CALLS - sum(kind.n_calls for kind in memories) - 1)
        Countdown(memories, k, error)
        with pytest.raises(error):
            allocator.alloc_graph_n(graph, ids, None)
        assert [kind.used for kind in memories] == [0, 0, 0]
        assert [allocator.get_buffer_size(i) for i in range(3)] == [0, 0, 0]
        assert all(t.buffer is None for t in graph)

        allocator.alloc_graph_n(small, small_ids, None)
        for t in small:
            t.memset(1)
        allocator.alloc_graph_n(graph, ids, None)
        assert all(t.buffer is not None and not t.buffer.is_freed for t in graph)
    assert [kind.n_buffers for kind in memories] == [0, 0, 0]


def test_the_old_memory_goes_before_the_new_comes() -> None:
    """A device with room for the larger graph, but not for both."""
    kind = memory(capacity=10 * N)
    with GraphAllocator(kind) as allocator:
        allocator.alloc_graph(model(3 * 16)[0])
        assert kind.used == 6 * N
        allocator.alloc_graph(model(5 * 16)[0])
        assert kind.used == 10 * N
        graph, x, _ = model(6 * 16)
        with pytest.raises(AllocationError) as caught:
            allocator.alloc_graph(graph)
        assert (caught.value.asked, caught.value.free, caught.value.total) == (12 * N, 10 * N, 10 * N)
        assert x.buffer is None
        allocator.alloc_graph(model(4 * 16)[0])


def test_what_a_failed_hook_was_preparing_is_not_placed(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, x, y = model()
    graph.build_forward_expand(view := Context().view_1d(x, 4))

    def prepare(buffer: TestBuffer, tensor: object) -> None:
        if tensor is y:
            raise KeyboardInterrupt

    monkeypatch.setattr(TestBuffer, "_init_tensor", prepare)
    with GraphAllocator(memory()) as allocator:
        with pytest.raises(KeyboardInterrupt):
            allocator.alloc_graph(graph)
        assert all(t.buffer is None for t in graph)
        assert view in graph.nodes
        monkeypatch.undo()
        allocator.alloc_graph(graph)
        x.get()


def test_a_graph_that_is_refused_keeps_the_place_it_has() -> None:
    graph, x, _ = model()
    with GraphAllocator(memory(max_size=8 * N)) as allocator:
        allocator.alloc_graph(graph)
        x.memset(7)
        graph.nodes.append(Context().cont(f32(Context(), 1000)))
        with pytest.raises(AllocationError, match="exceeds a buffer's 512 bytes"):
            allocator.alloc_graph(graph)
        assert (x.get() == 7).all()
