"""GpuPlan: a lowered graph with scratch memory and bound kernel arguments."""

from __future__ import annotations

from abc import abstractmethod
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, Generic, TypeGuard, TypeVar

from ggmlb.backends.common.fusion import Group, Item, fuse
from ggmlb.backends.gpu.kinds import BoundItems, KindLowering
from ggmlb.core.tensor import Tensor
from ggmlb.interface import GraphPlan
from ggmlb.parallel.row_split import RowSplitProduct, is_split

if TYPE_CHECKING:
    from ggmlb.backends.gpu.stream import GpuBackend
    from ggmlb.core.graph import Graph
    from ggmlb.interface import Buffer, BufferType

ALIGNMENT: Final = 256
"""Alignment promised by `launch.Scratch` [bytes]."""

Step = TypeVar("Step")
"""A backend's step: a launch with its arguments, or a split product."""


@dataclass(slots=True)
class Part(Generic[Step]):
    """A node, or the nodes of a fused group, with the steps that compute it.

    Attributes:
        nodes: The computed nodes, the result last.
        steps: Its steps.
    """

    nodes: tuple[Tensor, ...]
    steps: list[Step]

    def describe(self) -> str:
        """Return the names of the part's nodes, for messages and timelines."""
        return " with ".join(node.describe() for node in self.nodes)


class Arena:
    """The scratch memory of a stream, which its plans use in turn, as they run in order.

    Memory that is too small is replaced; plans bound to it keep it.
    """

    def __init__(self, buft: BufferType) -> None:
        self._buft = buft
        self._buffer: Buffer | None = None

    def get(self, nbytes: int) -> Buffer:
        """Return scratch memory of at least `nbytes`, with undefined contents; grows if too small."""
        if self._buffer is None or self._buffer.size < nbytes:
            self._buffer = self._buft.alloc_buffer(nbytes)
        return self._buffer


class GpuPlan(GraphPlan, Generic[Step]):
    """A graph's steps (launches, library calls), bound to buffers, which the plan keeps alive.

    Steps read positions, row indices and other changing values from tensors, so that they do not change
    between runs. A product with a split weight is one step, which several devices compute.

    Args:
        backend: The stream.
        graph: The graph.
        by: The backend's lowering.

    Attributes:
        parts: The nodes with their steps.
        buffers: The buffers that they use.
        has_indices: Whether steps read indices, so that `synchronize` must check them.
    """

    def __init__(self, backend: GpuBackend, graph: Graph, by: KindLowering[Any, Any]) -> None:
        super().__init__(backend, graph)
        items = fuse(graph, backend.can_fuse, names=backend.rules.patterns)
        bound = BoundItems(items, backend.device.kinds, by, _is_apart)
        products = {
            i: RowSplitProduct(x, backend, backend.helpers) for i, x in enumerate(items) if _is_apart(x)
        }
        nbytes, offsets = place_pieces(bound.pieces)
        bound.give(
            backend.arena.get(nbytes) if nbytes else None,
            offsets,
            backend.bad_indices.bind(self, bound.records, backend),
        )
        self.has_indices = bool(bound.records)
        used = [buffer for buffer in bound.memory if buffer is not None]
        self.buffers: list[Any] = list(dict.fromkeys(used))
        self.buffers += {b for product in products.values() for b in product.buffers}.difference(used)
        steps = iter(self._bind(bound))
        self.parts: list[Part[Step]] = []
        for i, (item, n) in enumerate(zip(items, bound.n_steps, strict=True)):
            own = [self._split_step(products[i])] if i in products else list(islice(steps, n))
            if own:
                self.parts.append(Part(item.nodes if isinstance(item, Group) else (item,), own))

    @abstractmethod
    def _bind(self, bound: BoundItems[Any]) -> Sequence[Step]:
        """Return the steps with memory bound."""

    @abstractmethod
    def _split_step(self, product: RowSplitProduct) -> Step:
        """Return the step for a split product."""

    def describe(self) -> str:
        """Return the number of nodes and the last node of the plan's graph, for messages."""
        if not self.parts:
            return "a graph of views"
        return f"a graph of {len(self.parts)} nodes, up to {self.parts[-1].nodes[-1].describe()}"

    def release(self) -> None:
        """Release the plan's steps and buffers."""
        self.parts = []
        self.buffers = []


def _is_apart(item: Item) -> TypeGuard[Tensor]:
    """Whether a node is a product with a split weight, which several devices compute."""
    return isinstance(item, Tensor) and is_split(item) and not item.is_empty


@lru_cache(64)  # similar graphs have the same pieces
def place_pieces(pieces: Sequence[tuple[int, int, int]]) -> tuple[int, tuple[int, ...]]:
    """Place pieces of scratch memory by their lifetimes; return the total size and each offset [bytes].

    Pieces with disjoint lifetimes share memory.

    Args:
        pieces: Size [bytes], first and last step of each piece.
    """
    live: defaultdict[int, list[int]] = defaultdict(list)  # the placed pieces by step
    offsets = [0] * len(pieces)
    total = 0
    for number in sorted(range(len(pieces)), key=lambda i: -pieces[i][0]):
        nbytes, first, last = pieces[number]
        size = -(-nbytes // ALIGNMENT) * ALIGNMENT
        others = {other for step in range(first, last + 1) for other in live[step]}
        at = 0
        for start, end in sorted([(offsets[i], offsets[i] + pieces[i][0]) for i in others]):
            if at + size <= start:
                break
            at = max(at, -(-end // ALIGNMENT) * ALIGNMENT)
        offsets[number] = at
        total = max(total, at + size)
        for step in range(first, last + 1):
            live[step].append(number)
    return total, tuple(offsets)
