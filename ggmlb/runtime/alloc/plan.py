"""Plan: a place for each tensor of a graph, so that tensors which live at the same time share no byte."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import le
from typing import TYPE_CHECKING, Final, NoReturn

from ggmlb.core.enums import Op, TensorFlag
from ggmlb.core.errors import GraphError
from ggmlb.core.ops import SPECS
from ggmlb.core.tensor import Tensor, same_layout
from ggmlb.runtime.alloc.arena import CHUNK_BITS, OFFSET_MASK, Arena

if TYPE_CHECKING:
    from ggmlb.runtime.alloc.memory import BufferIds
    from ggmlb.runtime.indexed_graph import GraphKey, IndexedGraph

_NONE = Op.NONE  # looked up once: it is asked of many

_INPLACE: Final = {op: spec.inplace for op, spec in SPECS.items() if spec.inplace}

_PLACED_EARLY = TensorFlag.INPUT | TensorFlag.PARAM


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """Places for the tensors of all graphs of one topology, up to certain sizes.

    Attributes:
        key: The topology.
        buffer_ids: The caller's choice of a buffer type for each tensor.
        owned: Numbers of the tensors that have a place; the next four fields go with it.
        memories: In which memory each of them lies.
        chunks: In which chunk of it.
        offsets: Where in the chunk [bytes].
        sizes: How much room there is for each [bytes].
        views: Numbers of the tensors that lie in the memory of another.
        inplace: Pairs of numbers: a node, and the operand whose place it takes.
        peaks: For each memory, what each of its chunks must hold [bytes].
    """

    key: GraphKey
    buffer_ids: BufferIds
    owned: list[int]
    memories: list[int]
    chunks: list[int]
    offsets: list[int]
    sizes: list[int]
    views: Sequence[int]
    inplace: list[tuple[int, int]]
    peaks: list[list[int]]

    def suits(self, tensors: Sequence[Tensor], sizes: Sequence[int]) -> bool:
        """Whether other tensors of the same topology fit, of which the owned ones have these sizes."""
        return all(map(le, sizes, self.sizes)) and all(
            same_layout(tensors[node], tensors[operand]) for node, operand in self.inplace
        )


def make_plan(
    graph: IndexedGraph,
    buffer_ids: BufferIds,
    memories: Sequence[int],
    sizes: Sequence[int],
    limits: Sequence[int],
    stays: int = TensorFlag.OUTPUT,
) -> Plan:
    """Plan a graph in one pass over its nodes.

    What holds data from outside (leafs, inputs, parameters) is placed first, side by side. A node is
    placed when it is computed, and its place is free after the last node that reads it or a view of it.
    Outputs, and results that no node reads, keep theirs.

    Args:
        graph: What is planned.
        buffer_ids: See `Plan`.
        memories: For each tensor, the memory that it belongs in.
        sizes: For each tensor, what it takes there, a multiple of the alignment [bytes].
        limits: For each memory, the largest chunk [bytes].
        stays: The flags of tensors whose memory is never given out again.

    Raises:
        GraphError: A node comes before one that it reads.

    Source: ggml_gallocr_alloc_graph_impl.
    """
    tensors, sources, ops, outside = graph.tensors, graph.sources, graph.ops, graph.outside
    n, n_leafs = len(tensors), graph.n_leafs
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
        # A node that nobody reads is a result, views included. But a view without an op is none: the
        # scheduler lists such views to mark how long their source is needed.
        *(i for i in views if i not in read_as_such and ops[i] is not _NONE),
    ):
        last[roots[i]] = never

    arenas = [Arena(limit) for limit in limits]
    addresses: dict[int, int] = {}
    early = [i for i in flagged if flags[i] & _PLACED_EARLY]
    for i in (*graph.listed[:n_leafs], *graph.unlisted, *early):
        if waiting[i]:
            waiting[i] = False
            addresses[i] = arenas[memories[i]].alloc(sizes[i])

    inplace: list[tuple[int, int]] = []
    end = 0
    for node, n_reads in zip(graph.listed[n_leafs:], graph.n_sources, strict=True):
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

    owned, placed = list(addresses), addresses.values()
    return Plan(
        key=graph.key,
        buffer_ids=buffer_ids,
        owned=owned,
        memories=[memories[i] for i in owned],
        chunks=[address >> CHUNK_BITS for address in placed],
        offsets=[address & OFFSET_MASK for address in placed],
        sizes=[sizes[i] for i in owned],
        views=views,
        inplace=inplace,
        peaks=[arena.peaks for arena in arenas],
    )


def _fail_order(graph: IndexedGraph, node: int, source: int) -> NoReturn:
    raise GraphError(
        f"the graph lists {graph.tensors[node].describe()} before {graph.tensors[source].describe()}, "
        "which it reads; build it with build_forward_expand, or list nodes after what they read"
    )
