"""split_graph: pass 5, which divides an assigned graph into splits, and finds the tensors to be copied.

A split is a run of consecutive nodes on one backend, views included. The user's graph and the numbers of its
tensors do not change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ggmlb.core.dtypes import DType
from ggmlb.core.enums import BufferUsage, DeviceType, Op, TensorFlag
from ggmlb.core.tensor import Tensor
from ggmlb.interface import Backend, GraphPlan
from ggmlb.runtime.compile.assign import UNKNOWN, readable

if TYPE_CHECKING:
    from ggmlb.runtime.compile.assign import Assignment, AssignRules
    from ggmlb.runtime.compile.read import IndexedGraph

MAX_JOINED = 64 << 10
"""Largest input that is uploaded together with others [bytes]; larger ones take an upload each."""


class SplitInput:
    """A tensor that is copied to a split's device before the split runs.

    Attributes:
        number: The tensor's number in the graph.
        copies: The copies in the split's memory; several for pipelining.
        backend: The backend that owns the tensor.
        is_staged: Whether it is an input of the graph, assigned to a device but kept in host memory.
        is_constant: Whether it is a weight that the graph does not write.
        has_experts: Whether it holds experts' weights, of which its only reader selects some.
        is_prefetched: Whether it is uploaded while an earlier split computes (`Split.next_weights`).
        readers: Numbers of the nodes on the split's device that read it.
    """

    __slots__ = (
        "_graph",
        "backend",
        "copies",
        "has_experts",
        "is_constant",
        "is_prefetched",
        "is_staged",
        "number",
        "readers",
    )

    def __init__(
        self, graph: IndexedGraph, number: int, copies: tuple[Tensor, ...], backend: Backend
    ) -> None:
        self._graph = graph
        self.number = number
        self.copies = copies
        self.backend = backend
        self.is_staged = False
        self.is_constant = False
        self.has_experts = False
        self.is_prefetched = False
        self.readers: list[int] = []

    @property
    def tensor(self) -> Tensor:
        """The tensor of the user's graph that is copied."""
        return self._graph.tensors[self.number]

    @property
    def origin(self) -> str:
        """Where the tensor is copied from, for messages: `host memory`, or a backend's name."""
        return "host memory" if self.is_staged else self.backend.name

    @property
    def copy(self) -> Tensor:
        """The first of the tensor's copies in the split's memory (several only for pipelining)."""
        return self.copies[0]

    @property
    def nbytes(self) -> int:
        """Bytes copied each time (an upper bound if only used experts are copied)."""
        return self.copies[0].nbytes

    def __repr__(self) -> str:
        return f"<SplitInput {self.tensor.describe()} from {self.origin}, {self.nbytes:,} bytes>"


class Split:
    """A run of consecutive nodes computed by one backend.

    Attributes:
        backend: The backend that computes it.
        backend_id: Index of the backend in the scheduler.
        view_numbers: Numbers of views of other devices' tensors, which nodes here read through copies.
        numbers: Numbers of the other nodes, views of tensors that it can use in place included.
        ordered: The same in the backend's preferred order.
        order: The computed ones, in that order.
        inputs: The tensors copied to it first.
        joined: Those of them that are in host memory and small: their copies are views of `block`, side by
            side, so that one upload writes them all.
        block: Their memory on the split's device; `None` if fewer than two inputs are joined.
        marks: The backend's annotations of the nodes (`Graph.marks`).
        next_weights: Inputs of the next split on the backend that are uploaded while this one computes.
        plans: The plan for each of the copies; `None` until first computed.
        after: Indices of backends with shared memory whose earlier work must be finished first.
        reads_user_input: Whether it reads an input of the graph in place.
    """

    __slots__ = (
        "_graph",
        "after",
        "backend",
        "backend_id",
        "block",
        "inputs",
        "joined",
        "marks",
        "next_weights",
        "numbers",
        "order",
        "ordered",
        "plans",
        "reads_user_input",
        "view_numbers",
    )

    def __init__(self, graph: IndexedGraph, backend: Backend, backend_id: int) -> None:
        self._graph = graph
        self.backend = backend
        self.backend_id = backend_id
        self.view_numbers: list[int] = []
        self.numbers: list[int] = []
        self.ordered: list[int] = []
        self.order: list[int] = []
        self.inputs: list[SplitInput] = []
        self.joined: list[SplitInput] = []
        self.block: Tensor | None = None
        self.marks: dict[Tensor, object] = {}
        self.next_weights: list[SplitInput] = []
        self.plans: list[GraphPlan | None] = [None]
        self.after: tuple[int, ...] = ()
        self.reads_user_input = False

    @property
    def nodes(self) -> list[Tensor]:
        """The user's nodes that this split computes, with views of tensors that it uses without a copy."""
        return [self._graph.tensors[i] for i in self.numbers]

    @property
    def views(self) -> list[Tensor]:
        """The user's views of other devices' tensors, which nodes here read through copies."""
        return [self._graph.tensors[i] for i in self.view_numbers]

    @property
    def plan(self) -> GraphPlan | None:
        """The plan that reads the first copies of this split's inputs; `None` until it is made."""
        return self.plans[0]

    def __repr__(self) -> str:
        return f"<Split {self.backend.name}: {len(self.numbers)} nodes, {len(self.inputs)} inputs>"


def split_graph(
    graph: IndexedGraph, found: Assignment, rules: AssignRules, requests: Mapping[int, int], n_copies: int
) -> tuple[list[Split], set[int]]:
    """Divide a graph, with backends `found` by `assign`, into splits (runs of nodes on one backend).

    Args:
        graph: The graph.
        found: The backends of its tensors.
        rules: The backends, and the scheduler's options.
        requests: Backend index of the tensors whose backend the user requested, by number.
        n_copies: Number of copies of tensors that one device sends to another.

    Returns:
        The splits in the order of execution, and the numbers of the staged inputs: those kept in host memory,
        though a device owns and copies them.
    """
    splitter = _Splitter(graph, found, rules, requests, n_copies)
    if len({*found.ids} - {UNKNOWN}) > 1 or found.foreign or splitter.staged:
        splitter.divide()
    else:  # nothing needs to move
        splitter.take_all()
    splitter.order_shared_memory()
    for split in splitter.splits:
        split.plans *= n_copies
    return splitter.splits, splitter.staged


class _Splitter:
    """Divides one graph into splits."""

    def __init__(
        self,
        graph: IndexedGraph,
        found: Assignment,
        rules: AssignRules,
        requests: Mapping[int, int],
        n_copies: int,
    ) -> None:
        self.splits: list[Split] = []
        self._graph = graph
        self._found = found
        self._rules = rules
        self._n_copies = n_copies
        # Tensors that each backend has a valid copy of, by number.
        self._copied: list[dict[int, SplitInput]] = [{} for _ in rules.backends]
        self._writers: dict[int, int] = {}  # the backend that wrote memory last, by the number of its owner
        flagged = [i for i in graph.flagged if graph.flags[i] & TensorFlag.INPUT]
        self._inputs = {i for i in flagged if graph.bases[i] < 0}
        self.staged = self._find_staged(requests)

    def _find_staged(self, requests: Mapping[int, int]) -> set[int]:
        """Return the inputs assigned to an asynchronous device that can stay in host memory.

        The user may overwrite an input once a computation is queued. An input in device memory would need
        a wait; one in host memory is queued as a snapshot. Inputs that the user placed on or requested
        for a device, or that nodes write, are read in place.
        """
        graph, rules, last = self._graph, self._rules, self._rules.last
        if rules.bufts[last].is_host or not rules.backends[last].device.caps.async_:
            return set()
        ids, ops, buffers = self._found.ids, graph.ops, graph.buffers
        unplaced = {i for i in self._inputs if ids[i] == last and ops[i] is Op.NONE and buffers[i] is None}
        return unplaced - requests.keys() - graph.written

    def _begin(self, b: int) -> Split:
        """Append a split on a backend."""
        split = Split(self._graph, self._rules.backends[b], b)
        self.splits.append(split)
        return split

    def take_all(self) -> None:
        """Make one split of all nodes."""
        split = self._begin(next((self._found.ids[i] for i in self._graph.work), self._rules.last))
        split.numbers = list(self._graph.nodes)
        split.reads_user_input = bool(self._inputs)

    def divide(self) -> None:
        """Begin a split wherever the backend changes; copy what a node cannot read in place."""
        graph, ids = self._graph, self._found.ids
        computes, bases, edges = graph.computes, graph.bases, graph.sources
        begins, ends = graph.spans
        writes, roots = graph.writes, graph.roots
        inputs = self._inputs.union([i for i in graph.views if bases[i] in self._inputs])
        # The backend in whose memory each tensor is; unknown for inputs and for memory of other devices.
        places = list(ids)
        for i in inputs | self._found.foreign:
            places[i] = UNKNOWN
        split = self._begin(next((ids[i] for i in graph.work), self._rules.last))
        for node in graph.nodes:
            b = ids[node]
            if not computes[node]:
                here = b == split.backend_id or self._readable(node, split.backend_id)
                (split.numbers if here else split.view_numbers).append(node)
                continue
            sources = edges[begins[node] : ends[node]]
            for src in sources:
                if places[src] != b:
                    sources = [s for s in sources if places[s] != b]
                    break
            else:
                sources = []
            copied = self._copied[b]
            if b != split.backend_id or (sources and self._wants_new_split(sources, split)):
                split = self._begin(b)
            for src in sources:
                if src in copied or self._needs_copy(src, b):
                    if src not in copied:
                        self._add_input(split, src, ids[src])
                    copied[src].readers.append(node)
                elif src in inputs:
                    split.reads_user_input = True
            split.numbers.append(node)
            if node in writes:  # copies of overwritten tensors are out of date
                self._writers.update(dict.fromkeys(writes[node], b))
                for copied in self._copied:
                    for i in [i for i in copied if roots[i] in writes[node]]:
                        del copied[i]
        for split in self.splits:
            for item in split.inputs:
                root = roots[item.number]
                if self._is_weight(root):
                    item.is_constant = graph.ops[root] is Op.NONE and root not in graph.written
                    item.has_experts = item.is_constant and self._has_experts(item, split)
            self._join(split)
        self._prefetch()

    def _prefetch(self) -> None:
        """Let weights in host memory be uploaded while the split before computes.

        The device must have pinned memory, from which copies run beside its work, and events to order them.
        """
        before: dict[int, Split] = {}
        for split in self.splits:
            caps, earlier = split.backend.device.caps, before.get(split.backend_id)
            if earlier is not None and caps.host_buffer and caps.async_ and caps.events:
                for item in split.inputs:
                    buffer = self._graph.buffers[item.number]
                    if item.is_constant and not item.has_experts and buffer is not None and buffer.is_host:
                        item.is_prefetched = True
                        earlier.next_weights.append(item)
            before[split.backend_id] = split

    def _join(self, split: Split) -> None:
        """Place the copies of a split's small inputs from host memory in one block, for one upload."""
        buft, device = self._rules.bufts[split.backend_id], split.backend.device
        if not device.caps.async_ or buft.is_host or device.type is DeviceType.META:  # it shards each copy
            return
        joined = [item for item in split.inputs if item.nbytes <= MAX_JOINED and self._is_uploaded(item)]
        if len(joined) < 2:
            return
        size, starts = 0, []
        for item in joined:
            starts.append(size)
            size += -(-buft.alloc_size(item.copy) // buft.alignment) * buft.alignment
        split.joined, split.block = joined, Tensor(DType.I8, (size, 1, 1, 1), name="inputs")
        for item, start in zip(joined, starts, strict=True):
            item.copy.view_src, item.copy.view_offs = split.block, start

    def _is_uploaded(self, item: SplitInput) -> bool:
        """Whether an input that is no constant is copied from host memory."""
        if item.is_constant or len(item.copies) > 1:
            return False
        buffer, owner = self._graph.buffers[item.number], self._found.ids[item.number]
        buft = self._rules.bufts[owner] if buffer is None else buffer.buft
        return item.is_staged or buft.is_host

    def _wants_new_split(self, sources: Sequence[int], split: Split) -> bool:
        """Whether a node with these sources should begin a new split on the same backend.

        A new split allows reuse of the memory of earlier copied weights.
        """
        b = split.backend_id
        copied = self._copied[b]
        return bool(split.inputs) and any(
            self._is_weight(src) and (src in copied or self._needs_copy(src, b)) for src in sources
        )

    def _needs_copy(self, src: int, b: int) -> bool:
        """Whether a backend cannot read a source in place."""
        if src < 0:
            return False
        return self._graph.roots[src] in self.staged or not self._readable(src, b)

    def _readable(self, i: int, b: int) -> bool:
        """Whether a backend can use a tensor without a copy."""
        return readable(self._graph, self._rules, self._found.ids, i, b)

    def _add_input(self, split: Split, src: int, owner: int) -> None:
        tensor = self._graph.tensors[src]
        name = f"{split.backend.name}#{tensor.name}"
        n = self._n_copies if self._is_sent(src, owner, split.backend_id) else 1
        copies = tuple([Tensor(tensor.dtype, tensor.ne, tensor.nb, name=name) for _ in range(n)])
        if n > 1:  # the next computation may already write them: they must not share memory
            for copy in copies:
                copy.flags = TensorFlag.INPUT | TensorFlag.OUTPUT
        root = self._graph.roots[src]
        item = SplitInput(self._graph, src, copies, self._rules.backends[self._writers.get(root, owner)])
        item.is_staged = root in self.staged
        self._copied[split.backend_id][src] = item
        split.inputs.append(item)

    def _is_weight(self, i: int) -> bool:
        buffer = self._graph.buffers[i]
        return buffer is not None and buffer.usage is BufferUsage.WEIGHTS

    def _is_sent(self, src: int, owner: int, b: int) -> bool:
        """Whether a device sends the tensor to another device, which may still be busy.

        Copies from host memory or the user's buffers are queued on the reading device.
        """
        rules, root = self._rules, self._graph.roots[src]
        if self._graph.buffers[root] is not None or root in self._inputs:
            return False
        both = (rules.backends[owner], rules.backends[b])
        return not rules.bufts[owner].is_host and all(x.device.caps.events for x in both)

    def _has_experts(self, item: SplitInput, split: Split) -> bool:
        """Whether an input is an expert weight in host memory, read by one node through its ids.

        The ids are read by the host before the split runs, once for all weights: they must not change later.
        """
        buffer = self._graph.buffers[item.number]
        if len(item.readers) > 1 or buffer is None or not buffer.is_host:
            return False
        (reader,) = item.readers
        sources = self._graph.reads(reader)
        is_first = sources[0] == item.number and item.number not in sources[1:]
        if not is_first or self._graph.ops[reader] is not Op.MUL_MAT_ID:
            return False
        ids = self._graph.roots[sources[2]]
        return ids not in self._graph.written and ids not in split.numbers

    # -- order ---------------------------------------------------------------------------------

    def order_shared_memory(self) -> None:
        """Set the backends that a split must wait for because they share memory.

        Copies are ordered on both sides. But a backend may still read or write another's memory in place
        when the allocator has reused that memory for a later split.
        """
        rules, ran = self._rules, sorted({s.backend_id for s in self.splits})
        if len(ran) < 2:
            return
        n = len(rules.backends)
        shared = [[a != b and rules.shares(a, b) for a in range(n)] for b in range(n)]
        self._add_written(shared, ran)
        for split in self.splits:  # also for later splits, as the graph is computed repeatedly
            split.after = tuple([a for a in ran if shared[split.backend_id][a]])

    def _add_written(self, shared: list[list[bool]], ran: Sequence[int]) -> None:
        """Add backends that use the same tensor in place, which one of them writes."""
        graph = self._graph
        roots, buffers = graph.roots, graph.buffers
        written = graph.written.union([i for i in graph.work if buffers[i] is not None and roots[i] == i])
        able = {i: [b for b in ran if self._readable(i, b)] for i in written}
        users: dict[int, set[int]] = {i: set() for i in written if len(able[i]) > 1}
        for split in self.splits if users else ():
            for node in split.numbers:
                if graph.computes[node]:
                    touched = [roots[i] for i in (node, *graph.reads(node)) if i >= 0]
                    for i in users.keys() & touched:
                        users[i].add(split.backend_id)
        for i, backends in users.items():
            found = backends.intersection(able[i])
            for a in found:
                for b in found:
                    shared[a][b] |= a != b
