"""Pass 5: cut the graph into splits, and find the tensors that must be copied between devices.

ggml rewrites the sources of the user's nodes to point at the copies. Here the user's graph stays as it
is: the scheduler works on an image of it, in which each tensor without a place of its own has a twin, and
nodes read copies where they must. After allocation the user's tensors share the memory of their twins;
so do those of the next graph of the same topology.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ggmlb.enums import NO_OPS, BufferUsage, Op, TensorFlag
from ggmlb.graph import Graph
from ggmlb.tensor import Tensor

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ggmlb.interface import Backend, GraphPlan
    from ggmlb.scheduler.assign import Assignment
    from ggmlb.scheduler.signature import Signature

_NONE = Op.NONE  # looked up once: it is asked of every tensor

MAX_SPLIT_INPUTS = 30
"""A split with this many inputs is closed before the next node that needs another (as in ggml)."""


class SplitInput:
    """A tensor that is copied to a split's device before the split runs.

    Attributes:
        tensor: The user's tensor.
        number: Its number in the signature.
        src: Where its data lies: its image.
        copies: The copies in the split's memory: several if the next computation may write one while this
            one still reads another.
        backend: The backend that owns the tensor.
        experts: If it holds the weights of experts, of which only some are read: the one node that reads
            them, in the image.
        is_constant: Whether it is a weight that the graph does not write.
    """

    __slots__ = ("backend", "copies", "experts", "is_constant", "number", "src", "tensor")

    def __init__(self, tensor: Tensor, number: int, copies: tuple[Tensor, ...], backend: Backend) -> None:
        self.tensor = tensor
        self.number = number
        self.src = tensor
        self.copies = copies
        self.backend = backend
        self.experts: Tensor | None = None
        self.is_constant = False

    @property
    def copy(self) -> Tensor:
        """The first of the copies."""
        return self.copies[0]

    @property
    def nbytes(self) -> int:
        """Bytes copied each time; at most, where only the experts in use are copied."""
        return self.copies[0].nbytes

    def __repr__(self) -> str:
        return f"<SplitInput {self.tensor.describe()} from {self.backend.name}, {self.nbytes:,} bytes>"


class Split:
    """A run of nodes that one backend computes.

    Attributes:
        backend: Where it runs.
        backend_id: Its index among the scheduler's.
        views: Views of tensors of other devices, that nodes here read through copies.
        nodes: The user's other nodes, views of its own tensors included.
        inputs: What is copied to it first.
        images: The nodes' twins, reading the copies.
        graph: What the backend computes: the images in the order that it wants, without views.
        plans: The graph lowered, for each of the copies; `None` until first computed.
        after: Indices of backends that work in memory that this one works in, and must have finished what
            they were given before.
        reads_user_input: Whether it reads an input of the graph where the user wrote it.
    """

    __slots__ = (
        "after",
        "backend",
        "backend_id",
        "graph",
        "images",
        "inputs",
        "nodes",
        "plans",
        "reads_user_input",
        "views",
    )

    def __init__(self, backend: Backend, backend_id: int) -> None:
        self.backend = backend
        self.backend_id = backend_id
        self.views: list[Tensor] = []
        self.nodes: list[Tensor] = []
        self.inputs: list[SplitInput] = []
        self.graph = Graph()
        self.images: list[Tensor] = []
        self.plans: list[GraphPlan | None] = [None]
        self.after: tuple[int, ...] = ()
        self.reads_user_input = False

    @property
    def plan(self) -> GraphPlan | None:
        """The graph lowered to read the first copies."""
        return self.plans[0]

    @property
    def originals(self) -> dict[Tensor, Tensor]:
        """The user's node of each image."""
        return dict(zip(self.images, self.nodes, strict=True))

    def __repr__(self) -> str:
        return f"<Split {self.backend.name}: {len(self.nodes)} nodes, {len(self.inputs)} inputs>"


class SplitGraph:
    """A graph cut into splits, with the image that the allocator sees.

    Attributes:
        splits: In the order of execution.
        graph: Images, copies and dependencies, in the order of execution.
        node_ids: Backend index of each of the image's nodes.
        leaf_ids: Backend index of each of its leafs.
        images: The image of each of the user's tensors; a tensor that has a place is its own.
    """

    def __init__(self, signature: Signature, assignment: Assignment, n_copies: int = 1) -> None:
        self.splits: list[Split] = []
        self.graph = Graph()
        self.node_ids: list[int] = []
        self.leaf_ids: list[int] = []
        self.images: dict[Tensor | None, Tensor | None] = {None: None}
        # What each backend reads in place of a tensor's image: a copy.
        self._read_instead: list[dict[Tensor | None, Tensor]] = [{} for _ in assignment.backends]
        self._signature = signature
        self._assignment = assignment
        self._n_copies = n_copies
        self._copies: list[dict[Tensor, tuple[Tensor, ...]]] = [{} for _ in assignment.backends]
        self._readers: list[dict[Tensor, list[Tensor]]] = [{} for _ in assignment.backends]
        n = signature.n_leafs
        nodes = signature.tensors[n : n + signature.n_nodes]
        self._written = {t.view_src for t in nodes if t.view_src is not None and t.op not in NO_OPS}
        is_input = TensorFlag.INPUT
        self._inputs = {t for t in signature.tensors if (t.view_src or t).flags & is_input}
        self._cut(nodes)
        self._assemble()
        self._order_shared_memory()

    # -- cutting -------------------------------------------------------------------------------

    def _cut(self, nodes: Sequence[Tensor]) -> None:
        ids = self._assignment.ids
        readable = self._assignment.readable
        backends = self._assignment.backends
        first = next((ids[n] for n in nodes if n.op not in NO_OPS), len(backends) - 1)
        split = Split(backends[first], first)
        self.splits.append(split)
        if len(set(ids.values())) < 2:  # nothing needs to move
            split.nodes = list(nodes)
            split.reads_user_input = bool(self._inputs)
            return
        for node in nodes:
            if node.op in NO_OPS:
                (split.nodes if ids[node] == split.backend_id else split.views).append(node)
                continue
            b = ids[node]
            if b != split.backend_id or (split.inputs and self._wants_new_split(node, split)):
                split = Split(backends[b], b)
                self.splits.append(split)
            for src in node.src:
                if src is None:
                    continue
                if ids[src] != b and not readable(src, b):
                    if src not in self._copies[b]:
                        self._add_input(split, src, ids[src])
                    self._readers[b].setdefault(src, []).append(node)
                elif src in self._inputs:
                    split.reads_user_input = True
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

    def _add_input(self, split: Split, src: Tensor, owner: int) -> None:
        name = f"{split.backend.name}#{src.name}"
        n = self._n_copies if self._is_sent(src, owner, split.backend_id) else 1
        copies = tuple([Tensor(src.dtype, src.ne, src.nb, name=name) for _ in range(n)])
        if n > 1:  # another computation may write them at any time: they share memory with nothing
            for copy in copies:
                copy.flags = TensorFlag.INPUT | TensorFlag.OUTPUT
        self._copies[split.backend_id][src] = copies
        number = self._signature.numbers[src]
        item = SplitInput(src, number, copies, self._assignment.backends[owner])
        root = src.view_src or src
        buffer = root.buffer
        is_weight = buffer is not None and buffer.usage is BufferUsage.WEIGHTS and root.op is Op.NONE
        item.is_constant = is_weight and root not in self._written
        split.inputs.append(item)

    def _is_sent(self, src: Tensor, owner: int, b: int) -> bool:
        """Whether a device sends the tensor to another, perhaps before that has finished its earlier work.

        What comes from the host, or from the user, is queued on the device that reads it.
        """
        root = src.view_src or src
        if root.buffer is not None or root.flags & TensorFlag.INPUT:
            return False
        both = (self._assignment.backends[owner], self._assignment.backends[b])
        return not self._assignment.bufts[owner].is_host and all(x.device.caps.events for x in both)

    # -- the image -----------------------------------------------------------------------------

    def _assemble(self) -> None:
        """Build each split's own graph, and the image of all of them."""
        ids = self._assignment.ids
        nodes, node_ids = self.graph.nodes, self.node_ids
        self._image_leafs()
        for split in self.splits:
            b = split.backend_id
            copies = self._read_instead[b]
            for view in split.views:
                nodes.append(self._image(view))
                node_ids.append(ids[view])
            for item in split.inputs:
                item.src = self.images.get(item.tensor) or self._image(item.tensor)
                copies[item.tensor] = item.copy
                if len(item.copies) == 1:
                    nodes.append(item.copy)
                    node_ids.append(b)
                # Keeps the source from being reused before it is copied.
                nodes.append(_view_of(item.src))
                node_ids.append(ids[item.tensor])
            # A view belongs to the memory of its source, wherever it is read: never to a copy.
            split.images = [self._image(n, None if n.op in NO_OPS else copies) for n in split.nodes]
            self._find_experts(split)
            whole = Graph()
            whole.nodes = list(split.images)
            split.backend.graph_optimize(whole)
            nodes += whole.nodes
            node_ids += [b] * len(whole.nodes)
            split.graph.nodes = [n for n in whole.nodes if n.op not in NO_OPS]
            split.graph.whole = self.graph

    def _image_leafs(self) -> None:
        signature, ids = self._signature, self._assignment.ids
        last = len(self._assignment.backends) - 1
        for leaf in signature.tensors[: signature.n_leafs]:
            self.graph.leafs.append(self.images.get(leaf) or self._image(leaf))
            self.leaf_ids.append(ids.get(leaf, last))
        for split in self.splits:
            for item in split.inputs:
                if len(item.copies) > 1:
                    self.graph.leafs += item.copies
                    self.leaf_ids += [split.backend_id] * len(item.copies)

    def _image(self, tensor: Tensor, copies: Mapping[Tensor | None, Tensor] | None = None) -> Tensor:
        """Make the twin of a tensor, which reads the images of its sources, or copies of them."""
        images = self.images
        base = tensor.view_src
        if tensor.buffer is not None and base is None and tensor.op is _NONE:
            image = tensor
        else:
            try:
                src = tuple(map(images.__getitem__, tensor.src))
                base = images[base]
            except KeyError:  # the graph does not list it, or not before
                for needed in (base, *tensor.src):
                    if needed is not None and needed not in images:
                        self._image(needed)
                return self._image(tensor, copies)
            if copies and not copies.keys().isdisjoint(tensor.src):
                src = tuple([copies.get(s, image) for s, image in zip(tensor.src, src, strict=True)])
            image = tensor.reading(src, base)
        images[tensor] = image
        return image

    def _find_experts(self, split: Split) -> None:
        """Note which inputs are weights of experts that one node reads by its ids."""
        for item in split.inputs:
            readers = self._readers[split.backend_id][item.tensor]
            if (
                item.is_constant
                and len(readers) == 1
                and readers[0].op is Op.MUL_MAT_ID
                and readers[0].src[0] is item.tensor
                and item.tensor not in readers[0].src[1:]
                and item.src.buffer is not None
                and item.src.buffer.is_host
            ):
                item.experts = split.images[split.nodes.index(readers[0])]

    # -- order ---------------------------------------------------------------------------------

    def _order_shared_memory(self) -> None:
        """Note which backends a split must wait for because they work in the same memory.

        A copy is ordered on both sides. But a backend that reads or writes another's memory in place
        may still do so when the allocator has given that memory to a later split.
        """
        assignment = self._assignment
        n = len(assignment.backends)
        shared = [[a != b and assignment.shares(a, b) for a in range(n)] for b in range(n)]
        if assignment.separate:
            self._add_written(shared)
        ran: set[int] = {s.backend_id for s in self.splits}  # a graph is computed again and again
        for split in self.splits:
            split.after = tuple(a for a in sorted(ran) if shared[split.backend_id][a])

    def _add_written(self, shared: list[list[bool]]) -> None:
        """Add the backends that keep apart, but touch memory of the user's that one of them writes."""
        touched: dict[Tensor, set[int]] = {}
        written: set[Tensor] = set()
        for split in self.splits:
            for node in split.nodes:
                if node.op in NO_OPS:
                    continue
                for tensor in (node, *node.src):
                    root = None if tensor is None else tensor.view_src or tensor
                    if root is not None and root.buffer is not None:
                        touched.setdefault(root, set()).add(split.backend_id)
                        if tensor is node:
                            written.add(root)
        for root in written:
            for a in touched[root]:
                for b in touched[root] - {a}:
                    shared[a][b] = True


def variant(image: Graph, splits: Sequence[Split], c: int) -> list[Graph]:
    """Return the splits' graphs with the nodes that read, near or far, the c-th copies of the inputs."""
    twins = {i.copy: i.copies[c] for split in splits for i in split.inputs if len(i.copies) > 1}
    whole = Graph()
    for node in image.nodes:
        src = tuple([twins.get(s, s) if s is not None else None for s in node.src])
        base = node.view_src
        base = twins.get(base, base) if base is not None else None
        if src != node.src or base is not node.view_src:
            twins[node] = node.reading(src, base)
        whole.nodes.append(twins.get(node, node))
    graphs = [Graph([twins.get(n, n) for n in split.graph.nodes]) for split in splits]
    for graph in graphs:
        graph.whole = whole
    return graphs


def _view_of(tensor: Tensor) -> Tensor:
    """A view without an op: it only marks that the tensor is read here."""
    return Tensor(
        tensor.dtype, tensor.ne, tensor.nb, src=(tensor,), view_src=tensor, name=f"{tensor.name} (copied)"
    )
