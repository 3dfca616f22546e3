"""GraphAllocator: places the tensors of graphs in buffers that grow as needed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from operator import le

from ggmlb.core.enums import BufferUsage, TensorFlag
from ggmlb.core.errors import ArgumentError, GraphError
from ggmlb.core.graph import Graph
from ggmlb.core.lifetime import Freeable
from ggmlb.core.placement import placement_clock
from ggmlb.core.tensor import Tensor
from ggmlb.interface import Buffer, BufferType
from ggmlb.runtime.alloc.context import padded
from ggmlb.runtime.compile.allocate import CHUNK_BITS, OFFSET_MASK, BufferIds, Plan, make_plan
from ggmlb.runtime.compile.read import IndexedGraph

MAX_PLANS = 8
"""Most cached plans: programs rarely alternate between more topologies."""


class GraphAllocator(Freeable):
    """Places the tensors of graphs so that those with overlapping lifetimes share no byte (ggml_gallocr).

    - Leafs, and nodes flagged as inputs, are placed first, without overlap. Like any tensor they may be
      overwritten after the last node that reads them: set them before each computation, or flag them as
      outputs, too.
    - Outputs, and results that no node reads, are never overwritten.
    - Element-wise and row-wise ops reuse the place of an operand without later readers.
    - Views share the memory of their source, and keep it.
    - A tensor in another buffer (a weight) is skipped. Tensors placed by this allocator are placed again:
      allocating a graph reuses the memory of the previous graph.

    Plans are cached by topology: the same ops, edges, views, flags and outside tensors. Graphs of that
    topology reuse a plan as long as their tensors are no larger, so that no memory is allocated after
    `reserve` of the largest graph: new plans for smaller tensors could need more, as they leave other gaps.
    A context manager: leaving it frees the memory.

    Args:
        bufts: A buffer type, or several; the same type twice is one memory.
        keep_inputs: Never overwrite inputs, so that a graph can be computed again without setting them
            again; ggml does overwrite them.
        separate: Give each of `bufts` its own memory, even if listed twice.
        before_free: Called before buffers are replaced by larger ones, as queued work may use them.

    Attributes:
        bufts: The buffer types, by index.
        n_plans: Number of plans made.
        n_reallocs: Number of allocations; constant after `reserve`.

    Raises:
        ArgumentError: No buffer type was given.
    """

    def __init__(
        self,
        bufts: BufferType | Sequence[BufferType],
        *,
        keep_inputs: bool = False,
        separate: bool = False,
        before_free: Callable[[], object] = lambda: None,
    ) -> None:
        self.bufts = (bufts,) if isinstance(bufts, BufferType) else tuple(bufts)
        if not self.bufts:
            raise ArgumentError("a GraphAllocator needs at least one buffer type")
        self._memories = Memories(self.bufts, separate)
        self._plans: deque[Plan] = deque(maxlen=MAX_PLANS)
        self._before_free = before_free
        self._stays = TensorFlag.OUTPUT | (TensorFlag.INPUT if keep_inputs else 0)
        self.n_plans = 0
        self.n_reallocs = 0

    # -- reserving -----------------------------------------------------------------------------

    def reserve(self, graph: Graph) -> None:
        """Allocate a graph's memory, all in the allocator's first buffer type, without placing its tensors.

        Raises:
            AllocationError: A device lacks room. All memory of the allocator was freed; it stays usable.
            GraphError: A node comes before one that it reads.
            FreedError: A tensor is in a freed buffer, or the allocator was freed.

        Source: ggml_gallocr_reserve.
        """
        self.reserve_n(graph, None, None)

    def reserve_n(
        self, graph: Graph, node_buffer_ids: Sequence[int] | None, leaf_buffer_ids: Sequence[int] | None
    ) -> None:
        """Allocate a graph's memory, without placing its tensors; ids choose each tensor's buffer type.

        Args:
            graph: The largest expected graph of its topology.
            node_buffer_ids: For each node, an index in `bufts`; `None` for zeros. Ignored for views and
                placed tensors.
            leaf_buffer_ids: For each leaf, likewise.

        Raises:
            ArgumentError: There are more or fewer ids than tensors, or one is out of range.
            AllocationError, GraphError, FreedError: As `reserve`.

        Source: ggml_gallocr_reserve_n.
        """
        self.reserve_indexed(*self._read(graph, node_buffer_ids, leaf_buffer_ids))

    def reserve_n_size(
        self,
        graph: Graph,
        node_buffer_ids: Sequence[int] | None = None,
        leaf_buffer_ids: Sequence[int] | None = None,
    ) -> list[int]:
        """Return the bytes a graph needs in each buffer type, allocating nothing; ids as in `reserve_n`.

        A repeated buffer type is counted at its first index.

        Raises:
            ArgumentError, GraphError, FreedError: As `reserve_n`.
            AllocationError: A tensor is larger than the largest buffer.

        Source: ggml_gallocr_reserve_n_size.
        """
        return self.indexed_size(*self._read(graph, node_buffer_ids, leaf_buffer_ids))

    def get_buffer_size(self, buffer_id: int = 0) -> int:
        """Return the bytes allocated in the buffer type with index `buffer_id`.

        A repeated buffer type is counted at its first index.

        Raises:
            ArgumentError: `buffer_id` is not an index of `bufts`.

        Source: ggml_gallocr_get_buffer_size.
        """
        if not 0 <= buffer_id < len(self.bufts):
            raise ArgumentError(
                f"get_buffer_size({buffer_id}): there are {len(self.bufts)} buffer types; count from 0"
            )
        sizes = [sum(buffer.size for buffer in chunks) for chunks in self._memories.chunks]
        return self._memories.by_buffer_id(sizes)[buffer_id]

    @property
    def buffers(self) -> list[Buffer]:
        """The buffers that this allocator has allocated, of all buffer types."""
        return [buffer for chunks in self._memories.chunks for buffer in chunks]

    # -- placing -------------------------------------------------------------------------------

    def alloc_graph(self, graph: Graph) -> None:
        """Place the tensors of a graph, allocating memory if needed.

        With several buffer types, the buffer ids are those of the last graph of its topology.

        Raises:
            GraphError: There are several buffer types, and no graph of this topology was reserved; or a
                node comes before one that it reads.
            AllocationError: A device lacks room. None of the graph's tensors is placed, all memory of the
                allocator was freed; it stays usable.
            FreedError: A tensor is in a freed buffer, or the allocator was freed.

        Source: ggml_gallocr_alloc_graph; that one fails where several buffers would be reserved anew.
        """
        indexed, ids = self._read(graph, None, None)
        self._alloc(indexed, ids if len(self._memories.bufts) == 1 else None)

    def alloc_graph_n(
        self, graph: Graph, node_buffer_ids: Sequence[int] | None, leaf_buffer_ids: Sequence[int] | None
    ) -> None:
        """Place a graph's tensors in the buffer types that the ids choose, allocating memory if needed.

        Arguments as `reserve_n`, errors as `reserve_n` and `alloc_graph`.
        """
        self._alloc(*self._read(graph, node_buffer_ids, leaf_buffer_ids))

    def _read(
        self, graph: Graph, node_ids: Sequence[int] | None, leaf_ids: Sequence[int] | None
    ) -> tuple[IndexedGraph, BufferIds]:
        chunks = self._memories.in_use()
        # Tensors in freed compute memory are placed again, too.
        indexed = IndexedGraph(
            graph, lambda b: b in chunks or (b.is_freed and b._usage is BufferUsage.COMPUTE)
        )
        if node_ids is None and leaf_ids is None:
            return indexed, [0] * len(indexed.tensors)
        ids = _ids_by_number(graph, indexed, node_ids, leaf_ids)
        n_bufts = len(self.bufts)
        for i in indexed.placeable():
            if not 0 <= ids[i] < n_bufts:
                raise ArgumentError(
                    f"the buffer id of {indexed.tensors[i].describe()} is {ids[i]}, which is out of range; "
                    f"there are {n_bufts} buffer types"
                )
        return indexed, [i if 0 <= i < n_bufts else 0 for i in ids]

    def _alloc(self, indexed: IndexedGraph, ids: BufferIds | None) -> None:
        plan = self._find(indexed, ids)
        try:
            self._adopt(plan)
            self._lay(indexed.tensors, plan, *self._places(indexed, plan))
        except BaseException:
            placeable = set(indexed.placeable())
            for i, (tensor, base) in enumerate(zip(indexed.tensors, indexed.bases, strict=True)):
                if i in placeable or base in placeable:
                    tensor.buffer = None
            placement_clock.tick()
            raise

    def _lay(
        self,
        tensors: Sequence[Tensor],
        plan: Plan,
        buffers: Sequence[Buffer | None],
        offsets: Sequence[int],
    ) -> None:
        """Place the tensors, unless all are in place."""
        planned = (*plan.addresses, *plan.views)
        moved = [i for i in planned if tensors[i].buffer is not buffers[i] or tensors[i].offset != offsets[i]]
        if not moved:
            return
        for i in moved:
            tensors[i].buffer = buffers[i]
            tensors[i].offset = offsets[i]
        placement_clock.tick()
        new = set(moved)
        own = self._memories.in_use()
        self.prepare(tensors[i] for i in planned if i in new or buffers[i] in own)

    def prepare(self, tensors: Iterable[Tensor]) -> None:
        """Reset the allocator's buffers; call `init_tensor` for placed tensors whose buffer requires it."""
        for chunk in self._memories.in_use():
            chunk.reset()
        for tensor in tensors:
            buffer = tensor.buffer
            if buffer is not None and buffer.prepares_tensors:
                buffer.init_tensor(tensor)

    # -- by number, for the scheduler ----------------------------------------------------------

    def reserve_indexed(self, indexed: IndexedGraph, ids: BufferIds) -> None:
        """Allocate memory for an `IndexedGraph` without placing tensors; `ids` choose their buffer types."""
        self._adopt(self._plan(indexed, ids))

    def indexed_size(self, indexed: IndexedGraph, ids: BufferIds) -> list[int]:
        """Return an `IndexedGraph`'s bytes in each buffer type; `ids` choose the types of its tensors."""
        return self._memories.by_buffer_id([sum(peaks) for peaks in self._plan(indexed, ids).peaks])

    def alloc_indexed(self, indexed: IndexedGraph, ids: BufferIds) -> tuple[list[Buffer | None], list[int]]:
        """Allocate memory for an `IndexedGraph`; return each tensor's buffer and offset, without placing it.

        No tensor is changed.
        """
        plan = self._find(indexed, ids)
        self._adopt(plan)
        return self._places(indexed, plan)

    def _places(self, indexed: IndexedGraph, plan: Plan) -> tuple[list[Buffer | None], list[int]]:
        tensors, bases, chunks = indexed.tensors, indexed.bases, self._memories.chunks
        buffers: list[Buffer | None] = [None] * len(tensors)
        offsets = [0] * len(tensors)
        for i in indexed.outside:
            buffers[i] = tensors[i].buffer
            offsets[i] = tensors[i].offset
        memories = plan.memories
        for i, address in plan.addresses.items():
            buffers[i] = chunks[memories[i]][address >> CHUNK_BITS]
            offsets[i] = address & OFFSET_MASK
        for i in plan.views:
            base = bases[i]
            buffers[i] = buffers[base]
            offsets[i] = offsets[base] + tensors[i].view_offs
        return buffers, offsets

    # -- plans ---------------------------------------------------------------------------------

    def _find(self, indexed: IndexedGraph, ids: BufferIds | None) -> Plan:
        """Return a cached plan that fits the graph, or a new one; it replaces plans that are nowhere larger.

        `ids` are by default those of a cached plan.
        """
        key, outgrown = indexed.key, list[Plan]()
        for plan in self._plans:
            if plan.key == key and (ids is None or plan.buffer_ids == ids):
                ids = plan.buffer_ids
                if plan.fits(indexed.tensors, self._memories.sizes(indexed.tensors, plan.memories)):
                    return plan
                outgrown.append(plan)
        if ids is None:
            raise GraphError(
                f"alloc_graph: no graph of this topology ({len(indexed.n_sources)} nodes) was reserved, so "
                f"the choice of {len(self._memories.bufts)} buffer types is unknown; call reserve_n first, "
                "or alloc_graph_n"
            )
        made = self._plan(indexed, ids)
        for plan in outgrown:
            if all(map(le, plan.sizes, made.sizes)):
                self._plans.remove(plan)
        return made

    def _plan(self, indexed: IndexedGraph, ids: BufferIds) -> Plan:
        memories = self._memories
        where = memories.of_ids(ids)
        sizes = memories.sizes(indexed.tensors, where)
        plan = make_plan(indexed, ids, where, sizes, memories.limits, self._stays)
        self.n_plans += 1
        self._check_limits(indexed.tensors, plan)
        return plan

    def _adopt(self, plan: Plan) -> None:
        """Allocate the plan's memory, and move it to the front of the cache."""
        if self._memories.grow(plan.peaks, self._before_free):
            self.n_reallocs += 1
        if plan in self._plans:
            self._plans.remove(plan)
        self._plans.appendleft(plan)

    def _check_limits(self, tensors: Sequence[Tensor], plan: Plan) -> None:
        for m, limit in enumerate(self._memories.limits):
            if max(plan.peaks[m], default=0) <= limit:
                continue
            for i in plan.addresses:
                if plan.memories[i] == m and plan.sizes[i] > limit:
                    raise self._memories.bufts[m].out_of_memory(
                        plan.sizes[i], f"{tensors[i].describe()} alone exceeds a buffer's {limit:,} bytes"
                    )

    def keeps_places(self) -> bool:
        """Whether several graphs can take turns in this memory without placing their tensors again.

        False if a buffer needs `init_tensor`.
        """
        return not self._memories.needs_init()

    def free(self) -> None:
        """Free all buffers of this allocator (ggml_gallocr_free).

        Raises:
            FreedError: It was freed before.
        """
        self.is_freed = True
        self._plans.clear()
        self._memories.free()

    # -- Python --------------------------------------------------------------------------------

    def __repr__(self) -> str:
        named = zip(self._memories.bufts, self._memories.chunks, strict=True)
        sizes = (f"{buft.name} {sum(b.size for b in chunks):,} bytes" for buft, chunks in named)
        return f"<GraphAllocator {', '.join(sizes)}>"


def _ids_by_number(
    graph: Graph, indexed: IndexedGraph, node_ids: Sequence[int] | None, leaf_ids: Sequence[int] | None
) -> list[int]:
    """Return the caller's buffer ids by number; an unlisted tensor gets the id of one that needs it.

    Raises:
        ArgumentError: There are more or fewer ids than tensors.
    """
    listed: list[int] = []
    for what, tensors, given in (("leaf", graph.leafs, leaf_ids), ("node", graph.nodes, node_ids)):
        ids = [0] * len(tensors) if given is None else given
        if len(ids) != len(tensors):
            raise ArgumentError(f"{len(ids)} {what} buffer ids for {len(tensors)} {what}s; give one for each")
        listed += ids
    by_number = listed[: indexed.unlisted.start]
    if len(listed) > len(by_number):  # of a tensor listed twice, the first id counts
        for number, i in zip(reversed(indexed.listed), reversed(listed), strict=True):
            by_number[number] = i
    return by_number + [by_number[user] for user in indexed.users]


class Memories:
    """The distinct buffer types of an allocator, each with its buffers (`struct vbuffer`).

    Args:
        bufts: The buffer types.
        separate: Count each of them as distinct.

    Attributes:
        bufts: The distinct buffer types.
        limits: Largest buffer of each [bytes].
        chunks: The buffers of each that are in use.
    """

    __slots__ = ("_alignments", "_index", "_plain", "bufts", "chunks", "limits")

    def __init__(self, bufts: Sequence[BufferType], separate: bool = False) -> None:
        self.bufts = list(bufts) if separate else list(dict.fromkeys(bufts))
        self.limits = [buft.max_size for buft in self.bufts]
        self.chunks: list[list[Buffer]] = [[] for _ in self.bufts]
        self._index = [i if separate else self.bufts.index(buft) for i, buft in enumerate(bufts)]
        self._alignments = [buft.alignment for buft in self.bufts]
        self._plain = all(type(buft).alloc_size is BufferType.alloc_size for buft in self.bufts)

    # -- indices and sizes ---------------------------------------------------------------------

    def of_ids(self, ids: BufferIds) -> list[int]:
        """Return, for each buffer id (index of a given buffer type), the index of the distinct type."""
        index = self._index
        return [index[i] for i in ids]

    def sizes(self, tensors: Sequence[Tensor], where: Sequence[int]) -> list[int]:
        """Return each tensor's padded bytes in the buffer type that `where` gives by index."""
        alignments = self._alignments
        if self._plain:
            return [(n := t.nbytes) + -n % alignments[m] for t, m in zip(tensors, where, strict=True)]
        bufts = self.bufts
        return [padded(bufts[m].alloc_size(t), alignments[m]) for t, m in zip(tensors, where, strict=True)]

    def by_buffer_id(self, sizes: Sequence[int]) -> list[int]:
        """Return `sizes` of distinct buffer types by buffer id; a type given again has 0, to count once."""
        index = self._index
        return [sizes[memory] if index.index(memory) == i else 0 for i, memory in enumerate(index)]

    # -- buffers -------------------------------------------------------------------------------

    def grow(self, peaks: Sequence[Sequence[int]], before_free: Callable[[], object]) -> bool:
        """Replace chunks (buffers) below their needed size (`peaks`) by larger ones; return whether any was.

        Chunks that are large enough stay. `before_free` is called before any is freed.

        Raises:
            AllocationError: A device lacks room; all chunks were freed.
        """
        short = [
            (m, chunk, size)
            for m, sizes in enumerate(peaks)
            for chunk, size in enumerate(sizes)
            if chunk >= len(self.chunks[m]) or self.chunks[m][chunk].size < size
        ]
        if short:
            before_free()
        # Free old chunks first: the device may lack room for both.
        for m, chunk, _ in short:
            if chunk < len(self.chunks[m]):
                self.chunks[m][chunk].free()
        try:
            for m, chunk, size in short:
                buffer = self.bufts[m].alloc_buffer(size)
                self.chunks[m][chunk : chunk + 1] = [buffer]
                buffer.usage = BufferUsage.COMPUTE
        except BaseException:
            self.free()
            raise
        return bool(short)

    def free(self) -> None:
        """Free the chunks (buffers) of all buffer types."""
        for chunks in self.chunks:
            for buffer in chunks:
                if not buffer.is_freed:
                    buffer.free()
            chunks.clear()

    def needs_init(self) -> bool:
        """Whether any of the chunks (buffers) requires `init_tensor` for tensors placed in it."""
        return any([b.prepares_tensors for chunks in self.chunks for b in chunks])

    def in_use(self) -> set[Buffer]:
        """The set of all allocated chunks (buffers)."""
        return {buffer for chunks in self.chunks for buffer in chunks}
