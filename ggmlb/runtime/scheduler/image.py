"""Image: the graph of clones that is allocated, planned and computed instead of the user's graph.

Each unplaced tensor of the user has a clone, and nodes read copies where needed. The allocator only sees
numbers; clones are created when a backend needs them, to plan a split or to order its nodes. After
allocation, the user's tensors get the places of their clones; so do those of the next graph of the same
topology.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, cast

from ggmlb.core.enums import Op
from ggmlb.core.graph import Graph
from ggmlb.core.tensor import Tensor
from ggmlb.interface import Backend, Buffer
from ggmlb.runtime.indexed_graph import IndexedGraph

if TYPE_CHECKING:
    from ggmlb.runtime.scheduler.split import Split

_NONE = Op.NONE  # looked up once: it is asked of every tensor


class Image(IndexedGraph):
    """The image of a graph, with the user's numbers, followed by copies and markers of their time.

    Args:
        user: The user's graph.
        params: The ops' parameters, by number.
        ids: Index of the backend that owns each tensor's memory, by number; past the last for host memory.
        splits: The graph's splits, which get their order here unless they have one.

    Attributes:
        user, params, ids: As given, the last with copies.
        buffers: Buffer of each tensor, by number, once allocated.
        offsets: Offset of each in its buffer.
    """

    def __init__(
        self, user: IndexedGraph, params: list[dict[str, Any]], ids: list[int], splits: Sequence[Split]
    ) -> None:
        self.user = user
        self.params = params
        self.ids = ids
        self.listed, self.n_leafs, self.unlisted, self.outside = (
            user.listed, user.n_leafs, user.unlisted, user.outside
        )  # fmt: skip
        self.tensors, self.flags, self.bases = list(user.tensors), list(user.flags), list(user.bases)
        self.sources, self.n_sources = list(user.sources), user.n_sources
        self.buffers = []
        self.offsets: list[int] = []
        self._clones: dict[int, Tensor | None] = {-1: None}
        self._graph: Graph | None = None
        leafs, nodes = list(user.listed[: user.n_leafs]), list[int]()
        for split in splits:  # which know the image, but not the reverse: a cycle would outlive its time
            split.image = self
            self._list(split, leafs, nodes)
        more = range(len(user.tensors), len(self.tensors))
        self.ops = user.ops + [_NONE] * len(more)
        self.views = user.views + [i for i in more if self.bases[i] >= 0]
        self.flagged = user.flagged + [i for i in more if self.flags[i]]
        if nodes != [*user.nodes]:
            edges = self._edges_of(nodes)  # by `spans`, which are those of the nodes listed so far
            self.listed, self.n_leafs = [*leafs, *nodes], len(leafs)
            self.sources, self.n_sources = edges
            del self.spans

    # -- numbers -------------------------------------------------------------------------------

    def _list(self, split: Split, leafs: list[int], nodes: list[int]) -> None:
        """Append a split's copies and nodes in order, and let its nodes read the copies."""
        bases = self.bases
        nodes += split.view_numbers
        for item in split.inputs:
            item.image = self
            i = item.number
            copies = [self._add(copy, split.backend_id) for copy in item.copies]
            self._clones.update(zip(copies, item.copies, strict=True))
            (nodes if len(copies) == 1 else leafs).extend(copies)
            begins, ends = self.spans
            for reader in item.readers:
                for edge in range(begins[reader], ends[reader]):
                    if self.sources[edge] == i:
                        self.sources[edge] = copies[0]
            # A view without an op: it only keeps the source from being reused before it is copied.
            base = i if bases[i] < 0 else bases[i]
            nodes.append(self._add(self.tensors[i], self.ids[i], base, [i], flags=0))
        if split.ordered:
            nodes += split.ordered
            return
        ordered = self._ordered(split, [*leafs, *nodes])
        nodes += ordered
        computes, n = self.user.computes, len(self.user.tensors)
        split.ordered = [i for i in ordered if i < n]
        split.order = [i for i in split.ordered if computes[i]]

    def _add(
        self, tensor: Tensor, b: int, base: int = -1, reads: Sequence[int] = (), flags: int | None = None
    ) -> int:
        (begins, ends), number = self.spans, len(self.tensors)
        self.tensors.append(tensor)
        self.flags.append(tensor.flags if flags is None else flags)
        self.bases.append(base)
        self.ids.append(b)
        begins.append(len(self.sources))
        self.sources += reads
        ends.append(len(self.sources))
        return number

    def _ordered(self, split: Split, before: Sequence[int]) -> Sequence[int]:
        """Return a split's nodes in its backend's preferred order."""
        if type(split.backend).graph_optimize is Backend.graph_optimize:
            return split.numbers
        self._make((*before, *split.numbers))
        graph = Graph()
        graph.nodes = self._made(split.numbers)
        split.backend.graph_optimize(graph)
        split.marks = graph.marks
        numbers = self.numbers
        for node in graph.nodes:
            if node not in numbers:  # a mark of the backend's own
                reads = [numbers[s] for s in node.src]
                numbers[node] = i = self._add(node, split.backend_id, numbers[node.view_src], reads)
                self._clones[i] = node
        return [numbers[node] for node in graph.nodes]

    def _edges_of(self, nodes: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return the concatenated sources of nodes, and the number of each node's."""
        begins, ends = self.spans
        sources: list[int] = []
        begin = end = 0
        for i in nodes:
            if begins[i] != end:  # else its part follows that of the node before
                sources += self.sources[begin:end]
                begin = begins[i]
            end = ends[i]
        sources += self.sources[begin:end]
        return sources, [ends[i] - begins[i] for i in nodes]

    # -- tensors -------------------------------------------------------------------------------

    def clone(self, i: int) -> Tensor:
        """Return the clone of a tensor; a placed tensor of the user is its own."""
        self._make((i,))
        return self._made((i,))[0]

    def _make(self, numbers: Iterable[int]) -> None:
        """Create the missing clones of some tensors."""
        user, clones, bases, flags, params = self.user, self._clones, self.bases, self.flags, self.params
        sources, (begins, ends) = self.sources, self.spans
        tensors, ops, n = user.tensors, user.ops, len(user.tensors)
        buffers, offsets = self.buffers, self.offsets
        for i in numbers:
            if i in clones:
                continue
            base, begin = bases[i], begins[i]
            # For a view computed by another graph, its base is read.
            reads = sources[begin : ends[i]] if begin >= 0 else [base] if base >= 0 else []
            try:
                src, view_src = tuple([clones[s] for s in reads]), clones[base]
            except KeyError:
                self._make((*reads, base))
                src, view_src = tuple([clones[s] for s in reads]), clones[base]
            if i >= n:
                clone = _view_of(cast("Tensor", src[0]))
            elif base < 0 and ops[i] is _NONE and user.buffers[i] is not None:
                clones[i] = tensors[i]
                continue
            else:
                clone = tensors[i].reading(src, view_src)
                clone.params, clone.flags = params[i], flags[i]
            if buffers:
                clone.buffer, clone.offset = buffers[i], offsets[i]
            clones[i] = clone

    @property
    def graph(self) -> Graph:
        """All clones, in the order of execution."""
        if self._graph is None:
            self._make(self.listed)
            self._graph = Graph(self._made(self.nodes), self._made(self.listed[: self.n_leafs]))
        return self._graph

    def _made(self, numbers: Sequence[int]) -> list[Tensor]:
        return cast("list[Tensor]", list(map(self._clones.__getitem__, numbers)))

    @property
    def numbers(self) -> dict[Tensor | None, int]:
        """Number of each clone."""
        return {clone: i for i, clone in self._clones.items()}

    def graph_of(self, split: Split) -> Graph:
        """Return the graph that a split's backend computes."""
        whole = self.graph
        graph = Graph(self._made(split.order))
        graph.whole, graph.marks = whole, split.marks
        graph.owner_checks = True  # `Program.check` does; nobody else has the image's tensors
        return graph

    def variant(self, splits: Sequence[Split], c: int) -> list[Graph]:
        """Return the splits' graphs, with nodes that depend on inputs reading the c-th copies."""
        if c == 0:
            return [split.graph for split in splits]
        clones = {i.copy: i.copies[c] for split in splits for i in split.inputs if len(i.copies) > 1}
        whole = Graph()
        for node in self.graph.nodes:
            src = tuple([clones.get(s, s) if s is not None else None for s in node.src])
            base = node.view_src
            base = clones.get(base, base) if base is not None else None
            if src != node.src or base is not node.view_src:
                clones[node] = node.reading(src, base)
            whole.nodes.append(clones.get(node, node))
        graphs = [Graph([clones.get(n, n) for n in split.graph.nodes]) for split in splits]
        for graph in graphs:
            graph.whole, graph.owner_checks = whole, True
        return graphs

    # -- places --------------------------------------------------------------------------------

    def place(self, buffers: list[Buffer | None], offsets: list[int]) -> bool:
        """Place the clones; return whether anything changed."""
        if buffers == self.buffers and offsets == self.offsets:
            return False
        self.buffers, self.offsets = buffers, offsets
        for i, clone in self._clones.items():
            if clone is not None:
                clone.buffer, clone.offset = buffers[i], offsets[i]
        return True

    def set_params(self, params: list[dict[str, Any]]) -> None:
        """Give the clones changed parameters."""
        self.params = params
        for i, changed in enumerate(params):
            clone = self._clones.get(i)
            if clone is not None and clone.params != changed:
                clone.params = changed

    def clones(self) -> list[Tensor]:
        """Return all tensors created for the image, copies included."""
        self._make(self.listed)
        tensors, n = self.user.tensors, len(self.user.tensors)
        made = self._clones.items()
        return [t for i, t in made if t is not None and (i >= n or t is not tensors[i])]


def _view_of(tensor: Tensor) -> Tensor:
    name = f"{tensor.name} (copied)"
    return Tensor(tensor.dtype, tensor.ne, tensor.nb, src=(tensor,), view_src=tensor, name=name)
