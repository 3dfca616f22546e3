"""Plan: a place for each tensor of a graph, such that tensors with overlapping lifetimes share no byte.

Planning allocates no memory: a `DynamicAllocator` hands out abstract addresses.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NoReturn

from ggmlb.core.enums import Op, TensorFlag
from ggmlb.core.errors import GraphError
from ggmlb.core.ops import SPECS
from ggmlb.core.tensor import Tensor, same_layout

if TYPE_CHECKING:
    from ggmlb.runtime.compile.read import GraphKey, IndexedGraph

BufferIds = Sequence[int]
"""Index of a buffer type for each tensor of a topology, by its number."""

_NONE = Op.NONE  # looked up once, for speed

_INPLACE: Final = {op: spec.inplace for op, spec in SPECS.items() if spec.inplace}

_PLACED_EARLY = TensorFlag.INPUT | TensorFlag.PARAM

CHUNK_BITS = 64
"""An address is `chunk << CHUNK_BITS | offset`, so that blocks of two chunks are never neighbours."""

OFFSET_MASK = (1 << CHUNK_BITS) - 1
"""Mask that extracts the offset within a chunk."""


class DynamicAllocator:
    """Best-fit allocator of abstract addresses (chunk, offset); joins freed neighbours (ggml_dyn_tallocr).

    The memory consists of chunks of at most `limit` bytes. All sizes, and hence all addresses, are
    multiples of the alignment.

    Attributes:
        peaks: Size needed by each chunk [bytes].
    """

    __slots__ = ("_limit", "_sizes", "_starts", "_tops", "peaks")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        # The free blocks, by address. The unused end of each chunk is not among them.
        self._starts: list[int] = []
        self._sizes: list[int] = []
        self._tops: list[int] = []
        self.peaks: list[int] = []

    def alloc(self, size: int) -> int:
        """Allocate `size` bytes (at most a chunk's limit); return the address: chunk and offset, packed."""
        sizes = self._sizes
        if not size or not sizes:
            return self._grow(size)
        best = 0
        for free in sizes:
            if free >= size and (free < best or not best):
                best = free
        if not best:
            return self._grow(size)
        # Of equal sizes, the last block: low addresses hold long-lived tensors.
        i = len(sizes) - 1
        while sizes[i] != best:
            i -= 1
        address = self._starts[i]
        if best == size:
            del sizes[i], self._starts[i]
        else:
            sizes[i] = best - size
            self._starts[i] = address + size
        return address

    def _grow(self, size: int) -> int:
        tops = self._tops
        chunk = 0 if len(tops) == 1 and tops[0] + size <= self._limit else self._chunk_for(size)
        offset = tops[chunk]
        top = tops[chunk] = offset + size
        if top > self.peaks[chunk]:
            self.peaks[chunk] = top
        return chunk << CHUNK_BITS | offset

    def _chunk_for(self, size: int) -> int:
        """Return the chunk that grows least by a block at its end; a new one if none has room."""
        best, best_spare = -1, 0
        for chunk, top in enumerate(self._tops):
            if top + size > self._limit:
                continue
            spare = self.peaks[chunk] - top - size
            if best < 0 or (0 <= spare < best_spare) or (best_spare < 0 and spare > best_spare):
                best, best_spare = chunk, spare
        if best < 0:
            best = len(self._tops)
            self._tops.append(0)
            self.peaks.append(0)
        return best

    def free(self, address: int, size: int) -> None:
        """Free `size` bytes at an address."""
        if not size:
            return
        starts, sizes = self._starts, self._sizes
        i = bisect_left(starts, address)
        if i and starts[i - 1] + sizes[i - 1] == address:
            i -= 1
            address = starts.pop(i)
            size += sizes.pop(i)
        end = address + size
        chunk = address >> CHUNK_BITS
        if end == chunk << CHUNK_BITS | self._tops[chunk]:
            self._tops[chunk] -= size
        elif i < len(starts) and starts[i] == end:
            starts[i] = address
            sizes[i] += size
        else:
            starts.insert(i, address)
            sizes.insert(i, size)


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """Addresses for the tensors of any graph of one topology whose tensors are not larger than planned.

    Attributes:
        key: The topology.
        buffer_ids: The caller's choice of a buffer type for each tensor.
        addresses: Address (`DynamicAllocator`) of each placed tensor, by number.
        memories: Index of the memory of each tensor.
        sizes: Bytes reserved for each.
        views: Numbers of the views.
        inplace: Pairs of numbers: a node, and the operand whose place it reuses.
        peaks: For each memory, the size of each of its chunks [bytes].
    """

    key: GraphKey
    buffer_ids: BufferIds
    addresses: dict[int, int]
    memories: Sequence[int]
    sizes: Sequence[int]
    views: Sequence[int]
    inplace: list[tuple[int, int]]
    peaks: list[list[int]]

    def fits(self, tensors: Sequence[Tensor], sizes: Sequence[int]) -> bool:
        """Whether the plan has room for tensors of the same topology with these `sizes` in bytes."""
        return all([sizes[i] <= self.sizes[i] for i in self.addresses]) and all(
            [same_layout(tensors[node], tensors[operand]) for node, operand in self.inplace]
        )


def make_plan(
    graph: IndexedGraph,
    buffer_ids: BufferIds,
    memories: Sequence[int],
    sizes: Sequence[int],
    limits: Sequence[int],
    stays: int = TensorFlag.OUTPUT,
) -> Plan:
    """Choose an address for each tensor of a graph; flags in `stays` mark tensors whose memory is kept.

    Tensors with data from outside (leafs, inputs, parameters) are placed first, without overlap. A node's
    place is allocated when it is computed, and freed after the last node that reads it or a view of it.
    Outputs, and results that no node reads, keep theirs.

    Args:
        graph: The graph.
        buffer_ids: See `Plan`.
        memories: For each tensor, the index of its memory.
        sizes: For each tensor, its size there, a multiple of the alignment [bytes].
        limits: For each memory, the largest chunk [bytes].
        stays: The flags of tensors whose memory is never reused.

    Raises:
        GraphError: A node comes before one that it reads.

    Source: ggml_gallocr_alloc_graph_impl.
    """
    tensors, sources, ops, outside = graph.tensors, graph.sources, graph.ops, graph.outside
    n = len(tensors)
    bases, flags, views, flagged = graph.bases, graph.flags, graph.views, graph.flagged

    # By number, with one more item than tensors: an absent source has the number -1.
    roots = [*range(n), -1]
    waiting = [True] * n + [False]
    for i in views:
        roots[i] = bases[i]
        waiting[i] = False
    for i in outside:
        waiting[i] = False

    # `last[root]` is the index in `reads` of the last time that the memory is read, if it may be freed then.
    reads = [roots[i] for i in sources]
    never = len(reads)
    last = [never] * (n + 1)
    for read, root in enumerate(reads):
        last[root] = read
    read_as_such = set(sources)
    for i in (
        -1,
        *outside,
        *(i for i in flagged if flags[i] & stays),
        # A node that no other reads is a result, views included. A view without an op is not: the
        # scheduler lists such views to keep their source allocated.
        *(i for i in views if i not in read_as_such and ops[i] is not _NONE),
    ):
        last[roots[i]] = never

    arenas = [DynamicAllocator(limit) for limit in limits]
    addresses: dict[int, int] = {}
    early = [i for i in flagged if flags[i] & _PLACED_EARLY]
    for i in (*graph.listed[: graph.n_leafs], *graph.unlisted, *early):
        if waiting[i]:
            waiting[i] = False
            addresses[i] = arenas[memories[i]].alloc(sizes[i])

    inplace: list[tuple[int, int]] = []
    end = 0
    for node, n_reads in zip(graph.nodes, graph.n_sources, strict=True):
        start, end = end, end + n_reads
        if waiting[node]:
            waiting[node] = False
            memory, size, op = memories[node], sizes[node], ops[node]
            for operand in sources[start : start + _INPLACE[op]] if op in _INPLACE else ():
                if (
                    last[operand] < end
                    and memories[operand] == memory
                    and sizes[operand] == size
                    and same_layout(tensors[operand], tensors[node])
                    and (n_reads == 1 or reads[start:end].count(operand) == 1)
                ):
                    addresses[node] = addresses[operand]
                    last[operand] = never
                    inplace.append((node, operand))
                    break
            else:
                addresses[node] = arenas[memory].alloc(size)
        for root in reads[start:end]:
            if waiting[root]:
                _fail_order(graph, node, root)
            if last[root] < end:
                last[root] = never
                arenas[memories[root]].free(addresses[root], sizes[root])

    peaks = [arena.peaks for arena in arenas]
    return Plan(graph.key, buffer_ids, addresses, memories, sizes, views, inplace, peaks)


def _fail_order(graph: IndexedGraph, node: int, source: int) -> NoReturn:
    raise GraphError(
        f"the graph lists {graph.tensors[node].describe()} before {graph.tensors[source].describe()}, "
        "which it reads; build it with build_forward_expand, or list nodes after what they read"
    )
