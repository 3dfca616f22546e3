"""Plan: a place for each tensor of a graph, so that tensors which live at the same time share no byte."""

from __future__ import annotations

from dataclasses import dataclass
from operator import le
from types import MappingProxyType
from typing import TYPE_CHECKING

from ggmlb.alloc.arena import CHUNK_BITS, Arena
from ggmlb.enums import Op, TensorFlag
from ggmlb.errors import GraphError
from ggmlb.tensor import Tensor, same_layout

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ggmlb.alloc.memory import BufferIds
    from ggmlb.alloc.topology import Topology, TopologyKey

INPLACE_OPERANDS: Mapping[Op, int] = MappingProxyType(
    {
        Op.FILL: 1,
        Op.SCALE: 1,
        Op.DIAG_MASK_ZERO: 1,
        Op.DIAG_MASK_INF: 1,
        Op.ADD: 2,
        Op.ADD_ID: 1,
        Op.ADD1: 1,
        Op.SUB: 2,
        Op.MUL: 2,
        Op.DIV: 2,
        Op.SQR: 1,
        Op.SQRT: 1,
        Op.LOG: 1,
        Op.UNARY: 1,
        Op.ROPE: 1,
        Op.ROPE_BACK: 1,
        Op.SILU_BACK: 2,
        Op.RMS_NORM: 1,
        Op.RMS_NORM_BACK: 1,
        Op.SOFT_MAX: 1,
        Op.SOFT_MAX_BACK: 1,
    }
)
"""How many of an op's first operands may lend their memory to its result.

Kernels of these ops must work when the result lies exactly where one of those operands does. The ops
are those of ggml_op_can_inplace. ggml may take any operand of the same layout; here only those that a
kernel naturally reads element by element or row by row: not a mask, a bias or a table.
"""

_FROM_OUTSIDE = TensorFlag.INPUT | TensorFlag.PARAM


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """Places for the tensors of all graphs of one topology, up to certain sizes.

    Attributes:
        key: The topology.
        buffer_ids: The caller's choice of a buffer type for each node and leaf; `None` if all are 0.
        owned: Numbers of the tensors that have a place; the next four fields go with it.
        memories: In which memory each of them lies.
        chunks: In which chunk of it.
        offsets: Where in the chunk [bytes].
        sizes: How much room there is for each [bytes].
        views: Numbers of the tensors that lie in the memory of another.
        inplace: Pairs of numbers: a node, and the operand whose place it takes.
        peaks: For each memory, what each of its chunks must hold [bytes].
    """

    key: TopologyKey
    buffer_ids: BufferIds | None
    owned: list[int]
    memories: list[int]
    chunks: list[int]
    offsets: list[int]
    sizes: list[int]
    views: list[int]
    inplace: list[tuple[int, int]]
    peaks: list[list[int]]

    def suits(self, tensors: Sequence[Tensor], sizes: Sequence[int]) -> bool:
        """Whether other tensors of the same topology fit, of which the owned ones have these sizes."""
        return all(map(le, sizes, self.sizes)) and all(
            same_layout(tensors[node], tensors[operand]) for node, operand in self.inplace
        )


def make_plan(
    topology: Topology,
    buffer_ids: BufferIds | None,
    memories: Sequence[int],
    sizes: list[int],
    limits: Sequence[int],
) -> Plan:
    """Plan a graph in one pass over its nodes.

    What holds data from outside (leafs, inputs, parameters) is placed first, side by side. A node is
    placed when it is computed, and its place is free after the last node that reads it or a view of it.
    Outputs, and results that no node reads, keep theirs.

    Args:
        topology: The graph.
        buffer_ids: See `Plan`.
        memories: For each tensor, the memory that it belongs in.
        sizes: For each tensor, what it takes there, a multiple of the alignment [bytes].
        limits: For each memory, the largest chunk [bytes].

    Raises:
        GraphError: A node comes before one that it reads.

    Source: ggml_gallocr_alloc_graph_impl.
    """
    roots, flags = topology.roots, topology.flags
    arenas = [Arena(limit) for limit in limits]
    nodes = topology.listed[topology.n_leafs :]
    operands = _operands(topology)
    last = _last_readers(topology, operands)
    dying: list[list[int]] = [[] for _ in nodes]
    for root, position in enumerate(last):
        if position >= 0:
            dying[position].append(root)

    addresses = [-1] * len(roots)
    waiting = topology.placeable()
    for i in (
        *topology.listed[: topology.n_leafs],
        *topology.unlisted,
        *(node for node in nodes if flags[node] & _FROM_OUTSIDE),
    ):
        if waiting[i]:
            waiting[i] = False
            addresses[i] = arenas[memories[i]].alloc(sizes[i])

    inplace: list[tuple[int, int]] = []
    for position, node in enumerate(nodes):
        if waiting[node]:
            waiting[node] = False
            operand = _dying_operand(topology, node, operands[position], last, position)
            if operand >= 0 and memories[operand] == memories[node] and sizes[node] <= sizes[operand]:
                last[operand] = -1
                addresses[node] = addresses[operand]
                sizes[node] = sizes[operand]
                inplace.append((node, operand))
            else:
                addresses[node] = arenas[memories[node]].alloc(sizes[node])
        for root in dying[position]:
            if last[root] == position:
                arenas[memories[root]].free(addresses[root], sizes[root])

    owned = [i for i, address in enumerate(addresses) if address >= 0]
    mask = (1 << CHUNK_BITS) - 1
    return Plan(
        key=topology.key,
        buffer_ids=buffer_ids,
        owned=owned,
        memories=[memories[i] for i in owned],
        chunks=[addresses[i] >> CHUNK_BITS for i in owned],
        offsets=[addresses[i] & mask for i in owned],
        sizes=[sizes[i] for i in owned],
        views=[i for i, root in enumerate(roots) if i != root],
        inplace=inplace,
        peaks=[arena.peaks for arena in arenas],
    )


def _operands(topology: Topology) -> list[list[int]]:
    """Cut the sources into one list per node."""
    sources = topology.sources
    operands = []
    end = 0
    for n in topology.n_sources:
        start, end = end, end + n
        operands.append(sources[start:end])
    return operands


def _last_readers(topology: Topology, operands: Sequence[Sequence[int]]) -> list[int]:
    """For each tensor, the position of the last node that reads its memory; -1 if it must stay."""
    roots = topology.roots
    n_leafs = topology.n_leafs
    last = [-1] * len(roots)
    for position, reads in enumerate(operands):
        for i in reads:
            if i >= 0:
                last[roots[i]] = position
        if reads and max(reads) >= n_leafs + position:
            _check_order(topology, position, reads)
    for i in set(topology.listed).difference(topology.sources):
        # What no node reads is a result, and stays. But a view without an op is none: the scheduler lists
        # such views to mark how long their source is needed.
        if topology.ops[i] is not Op.NONE:
            last[roots[i]] = -1
    for i, flags in enumerate(topology.flags):
        if flags & TensorFlag.OUTPUT:
            last[roots[i]] = -1
    for i, outside in enumerate(topology.outside):
        if outside:
            last[i] = -1
    return last


def _dying_operand(
    topology: Topology, node: int, reads: Sequence[int], last: Sequence[int], position: int
) -> int:
    """Return the operand whose memory the node may take because nothing else needs it; -1 if none."""
    tensors, roots = topology.tensors, topology.roots
    for i in reads[: INPLACE_OPERANDS.get(topology.ops[node], 0)]:
        if i >= 0 and last[i] == position and same_layout(tensors[node], tensors[i]):
            # The node may read the same memory otherwise, too: as a mask, transposed, at an offset.
            n_reads = sum(roots[j] == i for j in reads if j >= 0)
            if n_reads == 1:
                return i
    return -1


def _check_order(topology: Topology, position: int, reads: Sequence[int]) -> None:
    for i in reads:
        if i >= topology.n_leafs + position and i not in topology.unlisted:
            node = topology.tensors[topology.listed[topology.n_leafs + position]]
            raise GraphError(
                f"the graph lists {node.describe()} before its source {topology.tensors[i].describe()}; "
                "build it with build_forward_expand, or list nodes after what they read"
            )
