"""Program: a graph assigned, split, allocated and planned once, for all graphs of the same signature.

Decoding builds a new graph of new tensors for each token, equal to the previous graph except in identity.
Graphs with equal signatures are computed by the same `Program`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import compress, count
from math import copysign
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from ggmlb.core.enums import BufferUsage
from ggmlb.core.errors import GraphError
from ggmlb.core.graph import Graph
from ggmlb.core.placement import are_equal, placement_clock, zeros_of
from ggmlb.core.tensor import Tensor
from ggmlb.interface import Buffer, GraphPlan
from ggmlb.runtime.alloc import GraphAllocator
from ggmlb.runtime.indexed_graph import IndexedGraph
from ggmlb.runtime.scheduler.assign import UNKNOWN, Assignment
from ggmlb.runtime.scheduler.image import Image
from ggmlb.runtime.scheduler.split import Cut

if TYPE_CHECKING:
    from ggmlb.runtime.scheduler.assign import Cause, Rules
    from ggmlb.runtime.scheduler.split import Split

MAX_PROGRAMS = 8
"""Most cached programs: applications rarely alternate between more topologies."""

N_FIRST = 64
"""Nodes that are compared before the others: graphs of other sizes differ in them already."""


class Signature(IndexedGraph):
    """A graph with everything that its split, allocation and plans depend on.

    Reading a graph un-places its tensors in compute memory, which is reused for each graph.

    Attributes:
        layouts, view_offs, params: Of tensors, and of their ops, by number.
        offsets: Of the tensors that are `outside`.
        inner: Getter of the items of tensors that are not `outside`.
        requests: Backend index of tensors with a request, by number.
    """

    def __init__(self, graph: Graph, user: Mapping[Tensor, int]) -> None:
        super().__init__(graph, lambda b: b.usage is BufferUsage.COMPUTE)
        tensors = self.tensors
        if self.own:
            for tensor, buffer in zip(tensors, self.buffers, strict=True):
                if buffer is None:
                    tensor.buffer = None
            placement_clock.tick()
        self.layouts = [t.layout for t in tensors]
        self._first_layouts = [t.layout for t in graph.nodes[:N_FIRST]]
        self.view_offs = [t.view_offs for t in tensors]
        self.params: list[dict[str, Any]] = [t.params for t in tensors]
        is_inner = bytearray(b"\1") * len(tensors)
        for i in self.outside:
            is_inner[i] = 0
        self.inner = _picker(list(compress(count(), is_inner)))
        self._placed = _picker(self.outside)
        placed = self._placed(tensors)
        self.offsets = [t.offset for t in placed]
        self._there = placed, {b: b.usage for b in self.foreign}
        self.requests = _requests(tensors, user)

    def keep(self) -> None:
        """Copy the current parameters, which may change later."""
        self.params = [p.copy() if p else _NO_PARAMS for p in self.params]
        self._zeros = zeros_of(self.params)

    def match(self, graph: Graph, user: Mapping[Tensor, int]) -> list[Tensor] | None:
        """Return the tensors of a graph by number, if its split, allocation and plans are the same."""
        if [t.layout for t in graph.nodes[:N_FIRST]] != self._first_layouts:
            return None  # before anything else, as most often the sizes differ
        tensors = self.numbered(graph)
        is_same = (
            tensors is not None
            and [t.layout for t in tensors] == self.layouts
            and [t.op for t in tensors] == self.ops
            and [t.flags for t in tensors] == self.flags
            and [t.view_offs for t in tensors] == self.view_offs
            and self._are_there(tensors)
            and self.has_params([t.params for t in tensors])
            and _requests(tensors, user) == self.requests
        )
        return tensors if is_same else None

    def _are_there(self, tensors: list[Tensor]) -> bool:
        """Whether the same tensors of the user lie where they lay, and no others."""
        placed, usage = self._there
        buffers, bases = [t.buffer for t in tensors], self.bases
        return (
            self._placed(tensors) == placed
            and [t.offset for t in placed] == self.offsets
            and not any([b.is_freed or b.usage is not kind for b, kind in usage.items()])
            and (buffers == self.buffers or _roots_of(buffers, bases) == _roots_of(self.buffers, bases))
        )

    def has_params(self, params: Sequence[dict[str, Any]]) -> bool:
        """Whether all parameters equal the kept ones, including the signs of zeros."""
        same = are_equal(self.params, params)
        return same and all(
            [copysign(1.0, params[i][name]) == sign for i, name, sign in self._zeros]
        )


_NO_PARAMS: dict[str, Any] = {}


def _roots_of(buffers: Sequence[Buffer | None], bases: Sequence[int]) -> list[Buffer | None]:
    """Return the buffers of what is no view: a view may have been made before its source was placed."""
    return [buffer for buffer, base in zip(buffers, bases, strict=True) if base < 0]


def _picker(numbers: list[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """Return a function that returns the elements of these numbers."""
    if len(numbers) > 1:  # itemgetter returns a single element by itself
        return itemgetter(*numbers)
    return lambda items: tuple(items[i] for i in numbers)


def _requests(tensors: Sequence[Tensor], user: Mapping[Tensor, int]) -> dict[int, int]:
    return {i: user[t] for i, t in enumerate(tensors) if t in user} if user else {}


class Programs:
    """The programs of the last topologies, the latest first; `MAX_PROGRAMS` of them."""

    def __init__(self, rules: Rules, n_copies: int) -> None:
        self._rules = rules
        self._n_copies = n_copies
        self._kept: deque[Program] = deque(maxlen=MAX_PROGRAMS)

    def find(self, graph: Graph, user: Mapping[Tensor, int]) -> Program | None:
        """Return the cached program of an equal earlier graph, bound to this one."""
        for program in self._kept:
            tensors = program.signature.match(graph, user)
            if tensors is not None:
                program.bind(tensors)
                if program is not self._kept[0]:
                    self._kept.remove(program)
                    self._kept.appendleft(program)
                return program
        return None

    def make(self, signature: Signature) -> Program:
        """Assign and split a graph.

        Raises:
            UnsupportedOpError: No backend runs a node, or (strict) the wanted one does not.
        """
        program = Program(signature, self._rules, self._n_copies)
        self._kept.appendleft(program)
        return program

    def clear(self) -> None:
        """Discard all programs."""
        self._kept.clear()

    def __len__(self) -> int:
        return len(self._kept)


class Program:
    """The cached work of a scheduler for a topology, bound to one graph at a time.

    Its image (clones of the tensors) is allocated and planned. Binding another graph of the same
    signature only gives its tensors the places of their clones.

    Attributes:
        signature: The topology, with the tensors of the graph that is bound.
        image: The clones that are allocated and planned.
        parts: The image's splits, in the order of execution.
        buffers: Buffer of each tensor, by number, once allocated.
        offsets: Offset of each tensor in its buffer, by number.
        stamp: The allocator's count of allocations when it was placed; -1 if unplaced.
        n_nodes: Number of nodes.
    """

    def __init__(self, signature: Signature, rules: Rules, n_copies: int) -> None:
        self.signature = signature
        self._n_copies = n_copies
        self._owned: list[int] = []
        self.buffers: list[Buffer | None] = []
        self.offsets: list[int] = []
        self.stamp = -1
        self.n_nodes = len(signature.n_sources)
        self._checked_at = -1
        self._sources: list[tuple[Tensor | None, ...]] = []
        signature.keep()
        graph = signature
        self._assignment = found = Assignment(graph, rules, graph.requests)
        cut = Cut(graph, found, self._n_copies)
        ids = [len(found.backends) - 1 if b == UNKNOWN else b for b in found.ids]
        for i in cut.staged:
            ids[i] = len(found.backends)
        self.image = Image(graph, graph.params, ids, cut.splits)
        self.parts = cut.splits
        for split in self.parts:
            split.plans = [None] * self._n_copies
        self.forget_plans()

    # -- facts ---------------------------------------------------------------------------------

    @property
    def splits(self) -> list[Split]:
        """The splits of the graph, in the order of execution."""
        return self.parts

    def backend_id(self, tensor: Tensor) -> int | None:
        """Return the backend of a tensor of the bound graph; `None` for other tensors."""
        if tensor not in self.signature.numbers:
            return None
        b = self._assignment.ids[self.signature.numbers[tensor]]
        return None if b == UNKNOWN else b

    def cause(self, node: Tensor) -> Cause:
        """Return the cause of placement of a node of the bound graph."""
        cause = self._assignment.causes[self.signature.numbers[node]]
        assert cause is not None
        return cause

    def reasons(self, node: Tensor) -> dict[str, str]:
        """Return the reason of each backend that declines a node, by name."""
        return self._assignment.reasons(node)

    # -- binding -------------------------------------------------------------------------------

    def bind(self, tensors: list[Tensor]) -> None:
        """Bind another graph of the same signature, by the numbers of its tensors."""
        self.signature.bind(tensors)

    def allocate(self, allocator: GraphAllocator) -> None:
        """Place the image, unless it is still in place.

        Raises:
            AllocationError: A device lacks room.
        """
        image, signature = self.image, self.signature
        if self.stamp == allocator.n_reallocs and allocator.keeps_places():
            return
        buffers, offsets = allocator.alloc_indexed(image, image.ids)
        own = {b for b in {*buffers} if b is not None and b.usage is BufferUsage.COMPUTE}
        self.stamp = allocator.n_reallocs
        if image.place(buffers, offsets):
            self.forget_plans()
        n = len(signature.tensors)
        self.buffers, self.offsets = buffers[:n], offsets[:n]
        self._owned = list(compress(range(n), map(own.__contains__, self.buffers)))
        if not allocator.keeps_places():
            allocator.prepare(self.image.clones())

    def place(self) -> None:
        """Place the tensors of the bound graph at the places of their clones."""
        tensors, pick = self.signature.tensors, self.signature.inner
        for tensor, buffer, offset in zip(pick(tensors), pick(self.buffers), pick(self.offsets), strict=True):
            tensor.buffer = buffer
            tensor.offset = offset
        self._sources = [t.src for t in tensors]
        placement_clock.tick()
        self._checked_at = placement_clock.now

    def release(self) -> None:
        """Un-place the tensors of the bound graph, unless they were moved."""
        tensors, buffers, offsets = self.signature.tensors, self.buffers, self.offsets
        for i in self._owned:
            tensor = tensors[i]
            if tensor.buffer is buffers[i] and tensor.offset == offsets[i]:
                tensor.buffer = None

    def check(self) -> None:
        """After a change of the placement clock, check that no tensor of this graph moved; update parameters.

        Raises:
            GraphError: A tensor of the bound graph was moved, or reads other tensors.
            FreedError: A tensor of the user is in freed memory.
        """
        if self._checked_at == placement_clock.now:
            return
        signature = self.signature
        tensors = signature.tensors
        if (
            [t.buffer for t in tensors] != self.buffers
            or [t.offset for t in tensors] != self.offsets
            or [t.src for t in tensors] != self._sources
        ):
            there = zip(tensors, self.buffers, self.offsets, self._sources, strict=True)
            moved = next(t for t, b, o, s in there if t.buffer is not b or t.offset != o or t.src != s)
            raise GraphError(
                f"{moved.describe()} was moved or changed since this scheduler allocated the graph; "
                "call alloc_graph again, and set the inputs again"
            )
        signature.check_freed()
        params = [t.params for t in tensors]
        if not signature.has_params(params):
            signature.params = params
            signature.keep()
            self.image.set_params(signature.params)
            for split in self.parts:
                split.marks.clear()
            self.forget_plans()
        self._checked_at = placement_clock.now

    # -- plans ---------------------------------------------------------------------------------

    def plan(self, index: int, c: int) -> GraphPlan:
        """Return the plan of a split for the c-th copies, made on first use."""
        split = self.parts[index]
        plan = split.plans[c]
        if plan is None:
            plan = split.plans[c] = split.backend.graph_plan_create(self.variant(c)[index])
        return plan

    def variant(self, c: int) -> list[Graph]:
        """Return the graphs of the splits that read the c-th copies."""
        graphs = self._variants[c]
        if graphs is None:
            graphs = self.image.variant(self.parts, c)
            self._variants[c] = graphs
        return graphs

    def forget_plans(self) -> None:
        """Drop the plans, whose bound tensors have changed."""
        self._variants: list[list[Graph] | None] = [None] * self._n_copies
        for split in self.parts:
            split.plans[:] = [None] * self._n_copies
