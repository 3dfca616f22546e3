"""Executable: a graph compiled for a scheduler's backends, reused for equal graphs.

Decoding builds a new graph of new tensors for each token, equal to the previous one in all but identity. They
share one executable: a new graph's tensors get the same addresses, so that the plans stay valid.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import compress
from typing import TYPE_CHECKING

from ggmlb.core.enums import BufferUsage
from ggmlb.core.errors import GraphError
from ggmlb.core.graph import Graph
from ggmlb.core.placement import placement_clock
from ggmlb.core.tensor import Tensor
from ggmlb.interface import Buffer, GraphPlan
from ggmlb.interface.observe import observers
from ggmlb.runtime.compile.assign import UNKNOWN, Assignment, AssignRules, Cause, assign, reasons
from ggmlb.runtime.compile.copies import insert_copies, with_tensors
from ggmlb.runtime.compile.read import IndexedGraph, picker
from ggmlb.runtime.compile.split import Split, split_graph

if TYPE_CHECKING:
    from ggmlb.runtime.alloc import GraphAllocator


def compile_graph(
    graph: IndexedGraph, rules: AssignRules, requests: Mapping[int, int], n_copies: int
) -> Executable:
    """Assign a graph to backends, split it, and insert copies (`n_copies` of each) between devices.

    Args:
        graph: The graph.
        rules: The backends, and the scheduler's options.
        requests: Backend index of the tensors whose backend the user requested, by number.
        n_copies: Number of copies of tensors that one device sends to another.

    Raises:
        UnsupportedOpError: No backend runs a node, or (strict) the requested one does not.
    """
    graph.keep()
    found = assign(graph, rules, requests)
    splits, staged = split_graph(graph, found, rules, requests, n_copies)
    memories = [rules.last if b == UNKNOWN else b for b in found.ids]
    for i in staged:
        memories[i] = len(rules.backends)  # host memory
    copied = insert_copies(graph, memories, splits)
    return Executable(graph, rules, requests, found, splits, copied, memories, n_copies)


class Executable:
    """A compiled graph, bound to one graph of the user at a time.

    Attributes:
        graph: The graph, with the tensors of the graph that is bound.
        requests: Backend index of the tensors whose backend the user requested, by number.
        assignment: The backends of the tensors.
        splits: The splits, in the order of execution.
        copied: The graph with copies, which is allocated.
        memories: Index of the memory of each of its tensors, by number.
        buffers: Buffer of each tensor, by number, once allocated: the user's, then the copies.
        offsets: Offset of each tensor in its buffer.
        stamp: `GraphAllocator.n_reallocs` when it was allocated; -1 before.
        is_placed: Whether the bound tensors were given their places.
        n_nodes: Number of nodes.
    """

    def __init__(
        self,
        graph: IndexedGraph,
        rules: AssignRules,
        requests: Mapping[int, int],
        assignment: Assignment,
        splits: list[Split],
        copied: IndexedGraph,
        memories: list[int],
        n_copies: int,
    ) -> None:
        self.graph, self.requests, self._rules = graph, requests, rules
        self.assignment, self.splits = assignment, splits
        self.copied, self.memories = copied, memories
        self.buffers: list[Buffer | None] = []
        self.offsets: list[int] = []
        self.stamp = -1
        self.is_placed = False
        self.n_nodes = len(graph.n_sources)
        self._checked_at = -1
        self._edges: list[tuple[Tensor | None, ...]] = []
        outside = {*graph.outside}
        self._inner = picker([i for i in range(len(graph.tensors)) if i not in outside])
        self._owned: list[int] = []
        self._computed: list[Tensor] | None = copied.tensors  # by number, reading the first copies
        self._clones = self._clones_in(copied.tensors)
        self._graphs: list[list[Graph] | None] = [None] * n_copies
        self._stale: set[int] = set()

    # -- facts ---------------------------------------------------------------------------------

    def backend_id(self, tensor: Tensor) -> int | None:
        """Return the backend of a tensor of the bound graph; `None` for other tensors."""
        number = self.graph.numbers.get(tensor)
        if number is None or self.assignment.ids[number] == UNKNOWN:
            return None
        return self.assignment.ids[number]

    def cause(self, node: Tensor) -> Cause:
        """Return why a node of the bound graph is on its backend."""
        cause = self.assignment.causes[self.graph.numbers[node]]
        assert cause is not None
        return cause

    def reasons(self, node: Tensor) -> dict[str, str]:
        """Return the reason of each backend that cannot run a node of the bound graph, by name."""
        return reasons(self.graph, self._rules, self.graph.numbers[node])

    # -- binding -------------------------------------------------------------------------------

    def match(self, graph: Graph, user: Mapping[Tensor, int]) -> list[Tensor] | None:
        """Return the tensors of a graph by number; `None` unless it and its requests equal this one's."""
        tensors = self.graph.match(graph)
        return tensors if tensors is not None and requests_of(tensors, user) == self.requests else None

    def bind(self, tensors: list[Tensor]) -> None:
        """Bind this executable to the tensors of an equal graph, by number, without placing them."""
        self.is_placed = False
        if tensors != self.graph.tensors:
            self.graph.bind(tensors)
            self._forget_graphs()

    # -- places --------------------------------------------------------------------------------

    def allocate(self, allocator: GraphAllocator) -> None:
        """Choose buffer and offset of all tensors from the allocator, unless the last choice still holds.

        Raises:
            AllocationError: A device lacks room.
        """
        if self.stamp == allocator.n_reallocs and allocator.keeps_places():
            return
        buffers, offsets = allocator.alloc_indexed(self.copied, self.memories)
        self.stamp = allocator.n_reallocs
        self.is_placed = False
        if buffers == self.buffers and offsets == self.offsets:
            return
        self.buffers, self.offsets = buffers, offsets
        self.forget_plans()
        own = {b for b in {*buffers} if b is not None and b.usage is BufferUsage.COMPUTE}
        n = len(self.graph.tensors)
        self._owned = list(compress(range(n), map(own.__contains__, buffers)))

    def place(self, allocator: GraphAllocator) -> None:
        """Set the chosen buffer and offset of the bound tensors, their clones and the copies."""
        buffers, offsets, pick = self.buffers, self.offsets, self._inner
        tensors, n = self.graph.tensors, len(self.graph.tensors)
        mine = pick(tensors)
        for tensor, buffer, offset in zip(mine, pick(buffers), pick(offsets), strict=True):
            tensor.buffer = buffer
            tensor.offset = offset
        more = [*self._clones, *enumerate(self.copied.tensors[n:], n)]
        for i, tensor in more:
            tensor.buffer = buffers[i]
            tensor.offset = offsets[i]
        if not allocator.keeps_places():
            allocator.prepare([*mine, *[tensor for _, tensor in more]])
        self._edges = [t.src for t in tensors]
        placement_clock.tick()
        self._checked_at = placement_clock.now
        self.is_placed = True

    def release(self) -> None:
        """Unplace the bound tensors in compute memory, except those that the user has moved since."""
        tensors, buffers, offsets = self.graph.tensors, self.buffers, self.offsets
        for i in self._owned:
            tensor = tensors[i]
            if tensor.buffer is buffers[i] and tensor.offset == offsets[i]:
                tensor.buffer = None
        self.is_placed = False

    def check(self) -> None:
        """Check that no bound tensor was moved; discard plans if the user changed an op's parameters.

        Costs one comparison while no tensor is placed (`placement_clock`).

        Raises:
            GraphError: A tensor of the bound graph was moved, or reads other tensors.
            FreedError: A tensor of the user is in freed memory.
        """
        if self._checked_at == placement_clock.now:
            return
        graph, tensors = self.graph, self.graph.tensors
        if (
            [t.buffer for t in tensors] != self.buffers[: len(tensors)]
            or [t.offset for t in tensors] != self.offsets[: len(tensors)]
            or [t.src for t in tensors] != self._edges
        ):
            there = zip(tensors, self.buffers, self.offsets, self._edges, strict=False)
            moved = next(t for t, b, o, s in there if t.buffer is not b or t.offset != o or t.src != s)
            raise GraphError(
                f"{moved.describe()} was moved or changed since this scheduler allocated the graph; "
                "call alloc_graph again, and set the inputs again"
            )
        graph.check_freed()
        params = [t.params for t in tensors]
        if not graph.has_params(params):
            graph.set_params(params)
            self._forget_graphs()
            self.forget_plans()
        self._checked_at = placement_clock.now

    # -- plans ---------------------------------------------------------------------------------

    def plan(self, index: int, c: int) -> GraphPlan:
        """Return the plan of split `index` that reads the `c`-th copies of inputs, made on first use."""
        if observers and c in self._stale:
            self._show_bound(c)
        split = self.splits[index]
        plan = split.plans[c]
        if plan is None:
            plan = split.plans[c] = split.backend.graph_plan_create(self.graphs(c)[index])
        return plan

    def _show_bound(self, c: int) -> None:
        """Let plans name the tensors that are bound now, for observers."""
        self._stale.remove(c)
        for split, graph in zip(self.splits, self.graphs(c), strict=True):
            plan = split.plans[c]
            if plan is not None:
                plan.nodes = tuple(graph.nodes)

    def graphs(self, c: int) -> list[Graph]:
        """Return one graph for each split, which reads the `c`-th copies of the split's inputs."""
        graphs = self._graphs[c]
        if graphs is None:
            tensors = self._computed if c == 0 else None
            if tensors is None:
                tensors = with_tensors(self.copied, self.graph.tensors, self.splits, c)
                self._clones += self._clones_in(tensors)
            get = tensors.__getitem__
            whole = Graph(map(get, self.copied.nodes))
            graphs = self._graphs[c] = [Graph(map(get, split.order)) for split in self.splits]
            for graph, split in zip(graphs, self.splits, strict=True):
                graph.whole, graph.owner_checks = whole, True
                if tensors is self._computed:
                    graph.marks = split.marks
        return graphs

    def _clones_in(self, tensors: Sequence[Tensor]) -> list[tuple[int, Tensor]]:
        """Return the clones among tensors by number, with their numbers."""
        user = self.graph.tensors
        if len(tensors) == len(user):  # nothing is copied
            return []
        return [(i, tensor) for i, tensor in enumerate(tensors[: len(user)]) if tensor is not user[i]]

    def _forget_graphs(self) -> None:
        """Drop the graphs of the splits, because other tensors are bound or parameters have changed."""
        self._graphs = [None] * len(self._graphs)
        self._computed = None
        self._clones = []
        self._stale = {*range(len(self._graphs))}

    def forget_plans(self) -> None:
        """Drop all plans, because addresses or parameters have changed."""
        for split in self.splits:
            split.plans = [None] * len(split.plans)


def requests_of(tensors: Sequence[Tensor], user: Mapping[Tensor, int]) -> dict[int, int]:
    """Return the index of the requested backend, by index in `tensors`, for tensors that have a request."""
    return {i: user[t] for i, t in enumerate(tensors) if t in user} if user else {}
