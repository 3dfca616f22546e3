"""Image: the tensors that are allocated, planned and computed in place of the user's.

Each tensor of the user's that has no place of its own has a clone, and nodes read copies where they must. To
the allocator all of them are numbers; tensors are made of them when a backend looks at them: to plan a
split, or to say in which order it wants its nodes. After allocation the user's tensors lie where their clones
do; so do those of the next graph of the same topology.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

from ggmlb.core.enums import Op
from ggmlb.core.graph import Graph
from ggmlb.core.tensor import Tensor
from ggmlb.interface import Backend, Buffer
from ggmlb.runtime.alloc.topology import Topology
from ggmlb.runtime.scheduler.assign import UNKNOWN

if TYPE_CHECKING:
    from ggmlb.runtime.scheduler.assign import Assignment
    from ggmlb.runtime.scheduler.signature import Signature
    from ggmlb.runtime.scheduler.split import Cut, Split

_NONE = Op.NONE  # looked up once: it is asked of every tensor


class Image:
    """A graph's image, by the numbers of its signature; copies, and marks of when they are made, follow.

    Attributes:
        signature: The graph; its tensors are another's of the same signature, once that is bound.
        topology: What the allocator sees.
        ids: Index by number, of a backend, whose memory it lies in; behind the last, of the host's.
        buffers: Where each tensor lies, by number, once allocated.
        offsets: Offset of each in its buffer.
    """

    def __init__(self, signature: Signature, assignment: Assignment, cut: Cut) -> None:
        self.signature = signature
        last = len(assignment.backends) - 1
        self.ids = list(assignment.ids)
        if UNKNOWN in self.ids:
            self.ids = [last if b < 0 else b for b in self.ids]
        for i in cut.staged:
            self.ids[i] = last + 1
        self.buffers: list[Buffer | None] = []
        self.offsets: list[int] = []
        self._tensors = list(signature.tensors)
        self._flags = list(signature.flags)
        self._bases = list(signature.bases)
        self._clones: dict[int, Tensor | None] = {-1: None}
        self._graph: Graph | None = None
        self._leafs = list(signature.listed[: signature.n_leafs])
        self._nodes: list[int] = []
        for split in cut.splits:  # which know the image, but not the reverse: a cycle would outlive its time
            split.image = self
            self._list(split)
        self.topology = self._topology()

    # -- numbers -------------------------------------------------------------------------------

    def _list(self, split: Split) -> None:
        """List what a split copies and computes, in order; let its nodes read the copies."""
        bases, nodes = self._bases, self._nodes
        nodes += split.view_numbers
        for item in split.inputs:
            item.image = self
            i = item.number
            copies = [self._add(copy, split.backend_id) for copy in item.copies]
            self._clones.update(zip(copies, item.copies, strict=True))
            if len(copies) == 1:
                nodes += copies
            else:
                self._leafs += copies
            for reader in item.readers:
                for edge in range(self._begins[reader], self._ends[reader]):
                    if self._sources[edge] == i:
                        self._sources[edge] = copies[0]
            # A view without an op: it only keeps the source from being reused before it is copied.
            nodes.append(
                self._add(self._tensors[i], self.ids[i], i if bases[i] < 0 else bases[i], [i], flags=0)
            )
        ordered = self._ordered(split)
        nodes += ordered
        computes, n = self.signature.computes, len(self.signature.tensors)
        split.ordered = [i for i in ordered if i < n]
        split.order = [i for i in split.ordered if computes[i]]

    def _add(
        self, tensor: Tensor, b: int, base: int = -1, reads: Sequence[int] = (), flags: int | None = None
    ) -> int:
        number = len(self._tensors)
        self._tensors.append(tensor)
        self._flags.append(tensor.flags if flags is None else flags)
        self._bases.append(base)
        self.ids.append(b)
        self._begins.append(len(self._sources))
        self._sources += reads
        self._ends.append(len(self._sources))
        return number

    @cached_property
    def _sources(self) -> list[int]:
        """The numbers of all sources; what a node reads is a part of them."""
        return list(self.signature.sources)

    @cached_property
    def _begins(self) -> list[int]:
        """Where each node's part begins, by number; -1 for what is a leaf, its op notwithstanding."""
        return list(self.signature.spans[0])

    @cached_property
    def _ends(self) -> list[int]:
        """Where each node's part ends, by number."""
        return list(self.signature.spans[1])

    def _reads(self, i: int) -> Sequence[int]:
        """Return what a tensor reads: its base, if another graph computes it."""
        begin = self._begins[i]
        if begin >= 0:
            return self._sources[begin : self._ends[i]]
        return [self._bases[i]] if self._bases[i] >= 0 else []

    def _ordered(self, split: Split) -> Sequence[int]:
        """Return a split's nodes in the order that its backend wants."""
        if type(split.backend).graph_optimize is Backend.graph_optimize:
            return split.numbers
        graph = Graph()
        graph.nodes = [self.clone(i) for i in split.numbers]
        split.backend.graph_optimize(graph)
        numbers = {clone: i for i, clone in self._clones.items()}
        for node in graph.nodes:
            if node not in numbers:  # a mark of the backend's own
                reads = [numbers[s] for s in node.src]
                numbers[node] = i = self._add(node, split.backend_id, numbers[node.view_src], reads)
                self._clones[i] = node
        return [numbers[node] for node in graph.nodes]

    def _topology(self) -> Topology:
        signature, nodes = self.signature, self._nodes
        sources, n_sources = signature.sources, signature.n_sources
        if nodes != [*signature.nodes]:
            sources, n_sources = self._edges_of(nodes)
        extra = range(len(signature.tensors), len(self._tensors))
        return Topology(
            tensors=self._tensors,
            listed=[*self._leafs, *nodes],
            n_leafs=len(self._leafs),
            unlisted=signature.unlisted,
            sources=sources,
            n_sources=n_sources,
            bases=self._bases,
            views=[*signature.views, *[i for i in extra if self._bases[i] >= 0]],
            ops=signature.ops + [_NONE] * len(extra),
            flags=self._flags,
            flagged=[*signature.flagged, *[i for i in extra if self._flags[i]]],
            outside=signature.outside,
        )

    def _edges_of(self, nodes: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return the sources of nodes, one node after another, and how many each has."""
        begins, ends = self._begins, self._ends
        sources: list[int] = []
        begin = end = 0
        for i in nodes:
            if begins[i] != end:  # else its part follows that of the node before
                sources += self._sources[begin:end]
                begin = begins[i]
            end = ends[i]
        sources += self._sources[begin:end]
        return sources, [ends[i] - begins[i] for i in nodes]

    # -- tensors -------------------------------------------------------------------------------

    def clone(self, i: int) -> Tensor:
        """Return the clone of a tensor; a tensor of the user's that has a place is its own."""
        found = self._clones.get(i)
        return self._make(i) if found is None else found

    def _clone_of(self, i: int) -> Tensor | None:
        return None if i < 0 else self.clone(i)

    def _make(self, i: int) -> Tensor:
        signature, clones = self.signature, self._clones
        base = self._bases[i]
        if i >= len(signature.tensors):
            clone = _view_of(self.clone(self._reads(i)[0]))
        elif base < 0 and signature.ops[i] is _NONE and signature.buffers[i] is not None:
            clone = signature.tensors[i]
        else:
            reads = self._reads(i)
            try:
                src, view_src = tuple([clones[s] for s in reads]), clones[base]
            except KeyError:
                src, view_src = tuple([self._clone_of(s) for s in reads]), self._clone_of(base)
            clone = signature.tensors[i].reading(src, view_src)
            clone.params = signature.params[i]
            clone.flags = self._flags[i]
            if self.buffers:
                clone.buffer, clone.offset = self.buffers[i], self.offsets[i]
        clones[i] = clone
        return clone

    def _make_all(self, numbers: Sequence[int]) -> None:
        """Make what is not made yet, as `_make` does; nodes, which are many, without its calls."""
        signature, clones, bases, flags = self.signature, self._clones, self._bases, self._flags
        begins, ends, sources = self._begins, self._ends, self._sources
        tensors, params, n = signature.tensors, signature.params, len(signature.tensors)
        buffers, offsets = self.buffers, self.offsets
        for i in numbers:
            if i in clones:
                continue
            begin = begins[i]
            if begin < 0 or i >= n or not buffers:
                self._make(i)
                continue
            try:
                src, view_src = tuple([clones[s] for s in sources[begin : ends[i]]]), clones[bases[i]]
            except KeyError:
                self._make(i)
                continue
            clone = clones[i] = tensors[i].reading(src, view_src)
            clone.params, clone.flags = params[i], flags[i]
            clone.buffer, clone.offset = buffers[i], offsets[i]

    @property
    def graph(self) -> Graph:
        """All clones, in the order of execution."""
        if self._graph is None:
            self._make_all((*self._leafs, *self._nodes))
            self._graph = Graph(self._made(self._nodes), self._made(self._leafs))
        return self._graph

    def _made(self, numbers: Sequence[int]) -> list[Tensor]:
        return cast("list[Tensor]", list(map(self._clones.__getitem__, numbers)))

    def graph_of(self, split: Split) -> Graph:
        """Return the graph that a split's backend computes."""
        whole = self.graph
        graph = Graph(self._made(split.order))
        graph.whole = whole
        graph.owner_checks = True  # `Program.check` does; nobody else has the image's tensors
        return graph

    def variant(self, splits: Sequence[Split], c: int) -> list[Graph]:
        """Return the splits' graphs with the nodes that read, near or far, the c-th copies of the inputs."""
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
        """Place the clones; return whether that changed anything."""
        if buffers == self.buffers and offsets == self.offsets:
            return False
        self.buffers, self.offsets = buffers, offsets
        for i, clone in self._clones.items():
            if clone is not None:
                clone.buffer, clone.offset = buffers[i], offsets[i]
        return True

    def set_params(self, params: list[dict[str, Any]]) -> None:
        """Give the clones changed parameters."""
        for i, changed in enumerate(params):
            clone = self._clones.get(i)
            if clone is not None and clone.params != changed:
                clone.params = changed

    def clones(self) -> list[Tensor]:
        """Return all tensors that were made for the image, copies included."""
        self.graph  # noqa: B018
        return [t for i, t in self._clones.items() if t is not None and t is not self._tensors[i]]


def _view_of(tensor: Tensor) -> Tensor:
    name = f"{tensor.name} (copied)"
    return Tensor(tensor.dtype, tensor.ne, tensor.nb, src=(tensor,), view_src=tensor, name=name)
