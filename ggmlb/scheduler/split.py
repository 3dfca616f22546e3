"""Pass 5: cut the graph into splits, and find the tensors that must be copied between devices.

ggml rewrites the sources of the user's nodes to point at the copies. Here the user's graph stays as it
is: a node that reads a copy is cloned, and so is every node that reads a clone, so that each split is a
consistent graph of its own. After allocation the user's tensors share the memory of their clones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ggmlb.enums import NO_OPS, BufferUsage
from ggmlb.graph import Graph
from ggmlb.tensor import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ggmlb.interface import Backend, GraphPlan
    from ggmlb.scheduler.assign import Assignment

MAX_SPLIT_INPUTS = 30
"""A split with this many inputs is closed before the next node that needs another (as in ggml)."""


class SplitInput:
    """A tensor that is copied to a split's device before the split runs.

    Attributes:
        tensor: The user's tensor.
        src: Where its data lies: the tensor, or the clone that computes it.
        copy: The copy in the split's memory.
        backend: The backend that owns the tensor.
    """

    __slots__ = ("backend", "copy", "src", "tensor")

    def __init__(self, tensor: Tensor, src: Tensor, copy: Tensor, backend: Backend) -> None:
        self.tensor = tensor
        self.src = src
        self.copy = copy
        self.backend = backend

    @property
    def nbytes(self) -> int:
        """Bytes copied each time."""
        return self.copy.nbytes

    def __repr__(self) -> str:
        return f"<SplitInput {self.tensor.describe()} from {self.backend.name}, {self.nbytes:,} bytes>"


class Split:
    """A run of nodes that one backend computes.

    Attributes:
        backend: Where it runs.
        views: Views of tensors of other devices, that nodes here read through copies.
        nodes: The user's other nodes, views of its own tensors included.
        inputs: What is copied to it first.
        graph: What the backend computes: the nodes without the views, reading the copies.
        plan: The graph lowered; `None` until first computed.
        after: Backends that share memory with this one and must have finished what was queued before.
    """

    __slots__ = (
        "after",
        "backend",
        "backend_id",
        "graph",
        "inputs",
        "nodes",
        "originals",
        "plan",
        "views",
    )

    def __init__(self, backend: Backend, backend_id: int) -> None:
        self.backend = backend
        self.backend_id = backend_id
        self.views: list[Tensor] = []
        self.nodes: list[Tensor] = []
        self.inputs: list[SplitInput] = []
        self.graph = Graph()
        self.plan: GraphPlan | None = None
        self.after: list[Backend] = []
        self.originals: dict[Tensor, Tensor] = {}

    def __repr__(self) -> str:
        return f"<Split {self.backend.name}: {len(self.nodes)} nodes, {len(self.inputs)} inputs>"


class SplitGraph:
    """A graph cut into splits, with the internal graph that the allocator sees.

    Attributes:
        splits: In the order of execution.
        graph: Clones, copies and dependencies, in the order of execution.
        node_ids: Backend index of each of the internal graph's nodes.
        leaf_ids: Backend index of each of its leafs.
        clones: The clone of each user's node that has one.
    """

    def __init__(self, graph: Graph, assignment: Assignment) -> None:
        self.splits: list[Split] = []
        self.graph = Graph()
        self.node_ids: list[int] = []
        self.clones: dict[Tensor, Tensor] = {}
        self._assignment = assignment
        self._copies: list[dict[Tensor, Tensor]] = [{} for _ in assignment.backends]
        self._cut(graph.nodes)
        self._assemble()
        self.graph.leafs = graph.leafs
        ids = assignment.ids
        last = len(assignment.backends) - 1
        self.leaf_ids = [ids.get(leaf, last) for leaf in graph.leafs]
        self._order_shared_memory()

    # -- cutting -------------------------------------------------------------------------------

    def _cut(self, nodes: Sequence[Tensor]) -> None:
        ids = self._assignment.ids
        readable = self._assignment.readable
        backends = self._assignment.backends
        first = next((ids[n] for n in nodes if n.op not in NO_OPS), len(backends) - 1)
        split = Split(backends[first], first)
        self.splits.append(split)
        for node in nodes:
            if node.op in NO_OPS:
                (split.nodes if ids[node] == split.backend_id else split.views).append(node)
                continue
            b = ids[node]
            if b != split.backend_id or (split.inputs and self._wants_new_split(node, split)):
                split = Split(backends[b], b)
                self.splits.append(split)
            for src in node.src:
                if src is not None and ids[src] != b and src not in self._copies[b] and not readable(src, b):
                    self._add_input(split, src, backends[ids[src]])
            split.nodes.append(node)

    def _wants_new_split(self, node: Tensor, split: Split) -> bool:
        """Whether the node should open a new split on the same backend.

        With a new split the memory of weights copied before can be reused, and no split has more
        inputs than `MAX_SPLIT_INPUTS` (but a single node may).
        """
        ids = self._assignment.ids
        b = split.backend_id
        full = len(split.inputs) >= MAX_SPLIT_INPUTS
        for src in node.src:
            if src is None or ids[src] == b or self._assignment.readable(src, b):
                continue
            if src.buffer is not None and src.buffer.usage is BufferUsage.WEIGHTS:
                return True
            if full and src not in self._copies[b]:
                return True
        return False

    def _add_input(self, split: Split, src: Tensor, owner: Backend) -> None:
        copy = Tensor(src.dtype, src.ne, src.nb, name=f"{split.backend.name}#{src.name}")
        self._copies[split.backend_id][src] = copy
        split.inputs.append(SplitInput(src, src, copy, owner))

    # -- rewriting -----------------------------------------------------------------------------

    def _assemble(self) -> None:
        """Build each split's own graph, and the internal graph of all of them."""
        ids = self._assignment.ids
        clones = self.clones
        nodes, node_ids = self.graph.nodes, self.node_ids
        for split in self.splits:
            b = split.backend_id
            copies = self._copies[b]
            for view in split.views:
                nodes.append(self._rewrite(view, {}))
                node_ids.append(ids[view])
            for item in split.inputs:
                item.src = clones.get(item.tensor, item.tensor)
                nodes.append(item.copy)
                node_ids.append(b)
                # Keeps the source from being reused before it is copied.
                nodes.append(_view_of(item.src))
                node_ids.append(ids[item.tensor])
            inner = [self._rewrite(n, copies) for n in split.nodes] if copies or clones else split.nodes
            split.originals = {c: n for n, c in zip(split.nodes, inner, strict=True) if c is not n}
            whole = Graph()
            whole.nodes = list(inner)
            split.backend.graph_optimize(whole)
            nodes += whole.nodes
            node_ids += [ids[split.originals.get(n, n)] for n in whole.nodes]
            split.graph.nodes = [n for n in whole.nodes if n.op not in NO_OPS]
            split.graph.whole = self.graph

    def _rewrite(self, node: Tensor, copies: dict[Tensor, Tensor]) -> Tensor:
        """Return the node, or a clone if it reads a copy or a clone, or is a view of a clone."""
        clones = self.clones
        src: tuple[Tensor | None, ...] = node.src
        base = node.view_src
        if base is not None:
            base = clones.get(base, base)
        # A view belongs to the memory of its source, wherever it is read: never to a copy.
        if copies and node.op not in NO_OPS:
            src = tuple([copies.get(s) or clones.get(s, s) if s is not None else None for s in src])
        elif clones:
            src = tuple([clones.get(s, s) if s is not None else None for s in src])
        if src == node.src and base is node.view_src:
            return node
        clone = clones[node] = node.reading(src, base)
        return clone

    # -- order ---------------------------------------------------------------------------------

    def _order_shared_memory(self) -> None:
        """Note which backends a split must wait for because they work in the same memory.

        A copy is ordered on both sides. But a backend that reads or writes another's memory in place
        may still do so when the allocator has given that memory to a later split.
        """
        assignment = self._assignment
        n = len(assignment.backends)
        shared = [
            [
                a != b
                and (
                    assignment.supports_buft(a, assignment.bufts[b])
                    or assignment.supports_buft(b, assignment.bufts[a])
                )
                for a in range(n)
            ]
            for b in range(n)
        ]
        ran: set[int] = {s.backend_id for s in self.splits}  # a graph is computed again and again
        for split in self.splits:
            split.after = [assignment.backends[a] for a in sorted(ran) if shared[split.backend_id][a]]


def _view_of(tensor: Tensor) -> Tensor:
    """A view without an op: it only marks that the tensor is read here."""
    return Tensor(
        tensor.dtype, tensor.ne, tensor.nb, src=(tensor,), view_src=tensor, name=f"{tensor.name} (copied)"
    )
