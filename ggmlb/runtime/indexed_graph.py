"""IndexedGraph: a graph as lists of numbers, which the allocator and the scheduler work on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any

from ggmlb.core.enums import NO_OPS, TensorFlag
from ggmlb.core.errors import FreedError
from ggmlb.core.graph import Graph
from ggmlb.core.tensor import Tensor
from ggmlb.interface import Buffer

PLACE_FLAGS = TensorFlag.INPUT | TensorFlag.OUTPUT | TensorFlag.PARAM
"""The flags that matter to where a tensor lies."""

GraphKey = tuple[Any, ...]


class IndexedGraph:
    """A graph whose tensors are numbers: leafs first, then nodes, then what they need unlisted.

    Nothing of the graph is changed.

    Args:
        graph: What is read.
        is_own: Whether a buffer is the reader's own memory, given out anew: what lies there has no place.

    Attributes:
        tensors: By number.
        numbers: Number of each tensor; -1 for `None`, an absent one.
        listed: Numbers of the graph's leafs, then of its nodes in the order in which they are computed; a
            tensor may be listed twice.
        n_leafs: How many of `listed` are leafs.
        unlisted: Numbers of the tensors that are needed, as a source or as the base of a view, but not
            listed. They hold data from outside, like leafs.
        users: For each of `unlisted`, the number of a listed tensor that needs it.
        sources: For all nodes, one after another, the numbers of their sources; -1 for an absent one.
        n_sources: How many of `sources` belong to each node.
        bases: Number of the tensor in whose memory each view lies; -1 for what is no view.
        ops: By number.
        flags: By number.
        buffers: Buffer in which each tensor lies, by number; `None` for what has no place.
        own, foreign: The reader's own buffers in which tensors lie, and the user's.
        outside: Numbers of the tensors, no views, that lie in a buffer of the user's: weights, caches.

    Raises:
        FreedError: A tensor lies in a freed buffer of the user's.
    """

    def __init__(self, graph: Graph, is_own: Callable[[Buffer], bool] = lambda _: False) -> None:
        nodes = graph.nodes
        self.n_leafs = len(graph.leafs)
        self.tensors = [*graph.leafs, *nodes]
        self.listed: Sequence[int] = range(len(self.tensors))
        numbers: dict[Tensor | None, int] = dict(zip(self.tensors, self.listed, strict=True))
        if len(numbers) < len(self.tensors):
            listed = self.tensors
            self.tensors = list(dict.fromkeys(listed))
            numbers = {t: i for i, t in enumerate(self.tensors)}
            self.listed = [numbers[t] for t in listed]
        n_distinct = len(numbers)
        numbers[None] = -1
        self.numbers = numbers
        self.users: list[int] = []
        try:
            self.sources = [numbers[s] for t in nodes for s in t.src]
            self.bases = [numbers[t.view_src] for t in self.tensors]
        except KeyError:
            self._add_unlisted(nodes)
            self.sources = [numbers[s] for t in nodes for s in t.src]
            self.bases = [numbers[t.view_src] for t in self.tensors]
        tensors = self.tensors
        self.unlisted = range(n_distinct, len(tensors))
        self.n_sources = [len(t.src) for t in nodes]
        self.ops = [t.op for t in tensors]
        self.flags = [t.flags for t in tensors]
        self.buffers: list[Buffer | None] = [t.buffer for t in tensors]
        self.outside: list[int] = []
        there = {b for b in {*self.buffers} if b is not None}
        self.own = {b for b in there if is_own(b)}
        self.foreign = there - self.own
        if self.own:
            self.buffers = [None if b in self.own else b for b in self.buffers]
        if self.foreign:
            bases = self.bases  # a view is where its base is, or will be
            self.outside = [i for i, b in enumerate(self.buffers) if b is not None and bases[i] < 0]
        if any(b.is_freed for b in self.foreign):
            self.check_freed()

    def _add_unlisted(self, nodes: Sequence[Tensor]) -> None:
        numbers, users, tensors = self.numbers, self.users, self.tensors
        n_distinct = len(tensors)
        for node in nodes:
            for source in node.src:
                if source is not None and source not in numbers:
                    numbers[source] = len(tensors)
                    tensors.append(source)
                    users.append(numbers[node])
        for number, tensor in enumerate(tensors):  # which grows
            base = tensor.view_src
            if base is not None and base not in numbers:
                numbers[base] = len(tensors)
                tensors.append(base)
                users.append(number if number < n_distinct else users[number - n_distinct])

    @property
    def key(self) -> GraphKey:
        """The topology: graphs with equal keys can be allocated alike, sizes apart."""
        return (
            self.n_leafs,
            self.listed,
            self.sources,
            self.n_sources,
            self.bases,
            self.ops,
            self.flags,
            self.outside,
        )

    @property
    def nodes(self) -> Sequence[int]:
        """Numbers of the graph's nodes, in order."""
        return self.listed[self.n_leafs :]

    @cached_property
    def views(self) -> list[int]:
        """Numbers of the views."""
        return [i for i, base in enumerate(self.bases) if base >= 0]

    @cached_property
    def roots(self) -> list[int]:
        """Number of the tensor in whose memory each tensor lies, by number: its own, if it is no view."""
        roots = list(range(len(self.tensors)))
        for i in self.views:
            roots[i] = self.bases[i]
        return roots

    @cached_property
    def flagged(self) -> list[int]:
        """Numbers of the tensors with any of `PLACE_FLAGS`."""
        matter = {flags for flags in {*self.flags} if flags & PLACE_FLAGS}
        return [i for i, flags in enumerate(self.flags) if flags in matter]

    @cached_property
    def computes(self) -> list[bool]:
        """Whether an op computes each tensor, by number: neither a leaf nor a view of what is there."""
        return [op not in NO_OPS for op in self.ops]

    @cached_property
    def work(self) -> list[int]:
        """Numbers of the nodes that compute something, in order."""
        computes = self.computes
        return [i for i in self.nodes if computes[i]]

    @cached_property
    def spans(self) -> tuple[list[int], list[int]]:
        """Where each node's part of `sources` begins, and where it ends, by number; -1 for no node."""
        begins, ends = [-1] * len(self.tensors), [-1] * len(self.tensors)
        for node, n, end in zip(self.nodes, self.n_sources, accumulate(self.n_sources), strict=True):
            begins[node] = end - n
            ends[node] = end
        return begins, ends

    def reads(self, node: int) -> Sequence[int]:
        """Return the numbers of a node's sources; -1 for an absent one."""
        begins, ends = self.spans
        return self.sources[begins[node] : ends[node]]

    def placeable(self) -> list[int]:
        """The tensors that need a place: those that are no views, and do not lie elsewhere."""
        outside = set(self.outside)
        return [i for i, base in enumerate(self.bases) if base < 0 and i not in outside]

    def check_freed(self) -> None:
        """Raise a FreedError if a tensor of the user's lies in memory that was freed."""
        for tensor in map(self.tensors.__getitem__, self.outside):
            buffer = tensor.buffer
            if buffer is not None and buffer.is_freed:
                raise FreedError(
                    f"{tensor.describe()} lies in a {buffer.name} buffer of {buffer.size:,} bytes that was "
                    "freed; place it anew before the graph is allocated or computed"
                )
