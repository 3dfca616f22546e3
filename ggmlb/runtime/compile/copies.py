"""insert_copies: adds the copies that splits read to a graph, before it is allocated and computed.

The user's tensors keep their numbers; copies follow, and views that keep a tensor allocated until it is
copied. Nodes that read a copy, directly or indirectly, are replaced by clones, so that the user's graph is
never changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast

from ggmlb.core.enums import Op
from ggmlb.core.graph import Graph, alloc_dep
from ggmlb.core.tensor import Tensor
from ggmlb.interface import Backend
from ggmlb.runtime.compile.read import IndexedGraph
from ggmlb.runtime.compile.split import Split, SplitInput


def insert_copies(user: IndexedGraph, ids: list[int], splits: Sequence[Split]) -> IndexedGraph:
    """Return graph `user` plus copies that splits read; put split nodes in their backend's preferred order.

    Args:
        user: The user's graph.
        ids: Index of the memory of each tensor, by number; those of added tensors are appended.
        splits: The splits.
    """
    graph = _CopiedGraph(user, ids)
    for split in splits:
        graph.add(split)
    graph.finish()
    return graph


class _CopiedGraph(IndexedGraph):
    """The graph under construction: the nodes listed so far, and the edges of all tensors."""

    def __init__(self, user: IndexedGraph, ids: list[int]) -> None:
        self._user, self._ids = user, ids
        self.listed, self.n_leafs, self.nodes = user.listed, user.n_leafs, user.nodes
        self.unlisted, self.outside = user.unlisted, user.outside
        self.tensors, self.flags, self.bases = list(user.tensors), list(user.flags), list(user.bases)
        self.sources, self.n_sources = list(user.sources), user.n_sources
        self._leafs, self._nodes = list(user.listed[: user.n_leafs]), list[int]()

    def add(self, split: Split) -> None:
        """Append a split's copies and its nodes in order, and let its nodes read the copies."""
        nodes = self._nodes
        nodes += split.view_numbers
        self._clone(split.view_numbers)
        block = -1
        if split.block is not None:
            block = self._append(split.block, split.backend_id)
            nodes.append(block)
        for item in split.inputs:
            if not item.is_prefetched:
                self._add_copies(item, split.backend_id, block if item.copy.view_src is not None else -1)
        for item in split.next_weights:  # before this split's nodes: in memory that it does not use
            self._add_copies(item, split.backend_id)
        self._clone(split.numbers)
        split.ordered = self._ordered(split)
        nodes += split.ordered
        n, computes = len(self._user.tensors), self._user.computes
        split.ordered = [i for i in split.ordered if i < n]
        split.order = [i for i in split.ordered if computes[i]]

    def _add_copies(self, item: SplitInput, b: int, block: int = -1) -> None:
        """Append an input's copies (views of `block`, if given), and let its readers read them."""
        nodes, bases, (begins, ends), i = self._nodes, self.bases, self.spans, item.number
        copies = [self._append(copy, b, block, flags=copy.flags) for copy in item.copies]
        (nodes if len(copies) == 1 else self._leafs).extend(copies)
        for reader in item.readers:
            for edge in range(begins[reader], ends[reader]):
                if self.sources[edge] == i:
                    self.sources[edge] = copies[0]
        # A view without an op: it only keeps the source from being reused before it is copied.
        base = i if bases[i] < 0 else bases[i]
        nodes.append(self._append(alloc_dep(self.tensors[i]), self._ids[i], base, [i]))

    def finish(self) -> None:
        """Set the attributes of the whole graph."""
        user, nodes = self._user, self._nodes
        more = range(len(user.tensors), len(self.tensors))
        self.ops = user.ops + [Op.NONE] * len(more)
        self.views = user.views + [i for i in more if self.bases[i] >= 0]
        self.flagged = user.flagged + [i for i in more if self.flags[i]]
        if nodes != [*user.nodes]:
            edges = self._edges_of(nodes)  # by `spans`, which are those of the nodes listed so far
            self.listed, self.n_leafs, self.nodes = [*self._leafs, *nodes], len(self._leafs), nodes
            self.sources, self.n_sources = edges
            del self.spans
        del self._user, self._leafs, self._nodes, self._ids

    def _append(
        self, tensor: Tensor, b: int, base: int = -1, reads: Sequence[int] = (), flags: int = 0
    ) -> int:
        (begins, ends), number = self.spans, len(self.tensors)
        self.tensors.append(tensor)
        self.flags.append(flags)
        self.bases.append(base)
        self._ids.append(b)
        begins.append(len(self.sources))
        self.sources += reads
        ends.append(len(self.sources))
        return number

    def _clone(self, numbers: Iterable[int]) -> None:
        """Replace the nodes that read a copy or a clone by clones."""
        if len(self.tensors) > len(self._user.tensors):  # there are copies
            replace_readers(self, self.tensors, numbers)

    def _ordered(self, split: Split) -> list[int]:
        """Return a split's nodes in its backend's preferred order."""
        if type(split.backend).graph_optimize is Backend.graph_optimize:
            return split.numbers
        tensors = self.tensors
        before = [*self._leafs, *self._nodes]
        graph = Graph(map(tensors.__getitem__, split.numbers))
        split.backend.graph_optimize(graph)
        split.marks = graph.marks
        numbers = {tensors[i]: i for i in (*before, *split.numbers)}
        for node in graph.nodes:
            if node not in numbers:  # added by the backend
                reads = [numbers[cast("Tensor", s)] for s in node.src]
                base = numbers[cast("Tensor", node.view_src)]
                numbers[node] = self._append(node, split.backend_id, base, reads)
        return [numbers[node] for node in graph.nodes]

    def _edges_of(self, nodes: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return the concatenated sources of nodes, and the number of each node's."""
        begins, ends = self.spans
        sources: list[int] = []
        begin = end = 0
        for i in nodes:
            if begins[i] != end:  # else they follow those of the node before
                sources += self.sources[begin:end]
                begin = begins[i]
            end = ends[i]
        sources += self.sources[begin:end]
        return sources, [ends[i] - begins[i] for i in nodes]


def with_tensors(
    graph: IndexedGraph, user: Sequence[Tensor], splits: Sequence[Split], c: int
) -> list[Tensor]:
    """Return all tensors by number, for the `c`-th copies of inputs: readers of copies become clones."""
    tensors = [*user, *graph.tensors[len(user) :]]
    if len(tensors) > len(user):
        inputs = [item for split in splits for item in split.inputs if len(item.copies) > 1]
        others = {item.copy: item.copies[c] for item in inputs}
        tensors = [others.get(t, t) for t in tensors]
        replace_readers(graph, tensors, graph.nodes)
    return tensors


def replace_readers(graph: IndexedGraph, tensors: list[Tensor], numbers: Iterable[int]) -> None:
    """Clone those of the nodes `numbers` whose operands were replaced in `tensors`, to read the new ones.

    Args:
        graph: The graph.
        tensors: Its tensors by number, which are changed.
        numbers: The nodes to check, each after its sources.
    """
    known: list[Tensor | None] = [*tensors, None]  # an absent source has the number -1
    bases, sources, (begins, ends) = graph.bases, graph.sources, graph.spans
    for i in numbers:
        node = tensors[i]
        src, base = tuple([known[s] for s in sources[begins[i] : ends[i]]]), known[bases[i]]
        if src != node.src or base is not node.view_src:
            known[i] = tensors[i] = node.reading(src, base)
