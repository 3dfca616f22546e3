"""Topology: what the allocation of a graph depends on besides sizes, as lists of numbers."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ggmlb.core.enums import BufferUsage, Op, TensorFlag
from ggmlb.core.errors import FreedError
from ggmlb.core.tensor import Tensor
from ggmlb.interface import Buffer

if TYPE_CHECKING:
    from ggmlb.runtime.alloc.numbering import Numbering

TopologyKey = tuple[Any, ...]

PLACE_FLAGS = TensorFlag.INPUT | TensorFlag.OUTPUT | TensorFlag.PARAM
"""The flags that matter to where a tensor lies."""


@dataclass(slots=True, eq=False)
class Topology:
    """A graph whose tensors are numbers, with its nodes in the order in which they are computed.

    Attributes:
        tensors: By number. Their types and extents matter, not where they lie.
        listed: Numbers of the graph's leafs, then of its nodes; a tensor may be listed twice.
        n_leafs: How many of `listed` are leafs.
        unlisted: Numbers of the tensors that are needed, as a source or as the base of a view, but not
            listed. They hold data from outside, like leafs.
        sources: For all nodes, one after another, the numbers of their sources; -1 for an absent one.
        n_sources: How many of `sources` belong to each node.
        bases: Number of the tensor in whose memory each view lies; -1 for what is no view.
        views: Numbers of the views.
        ops: By number.
        flags: By number.
        flagged: Numbers of the tensors with any of `PLACE_FLAGS`.
        outside: Numbers of the tensors, no views, that lie in a buffer that is not the allocator's.
        key: What the others follow from, `tensors` aside: graphs with equal keys can be allocated alike,
            sizes apart.
    """

    tensors: Sequence[Tensor]
    listed: Sequence[int]
    n_leafs: int
    unlisted: Sequence[int]
    sources: Sequence[int]
    n_sources: Sequence[int]
    bases: Sequence[int]
    views: Sequence[int]
    ops: Sequence[Op]
    flags: Sequence[int]
    flagged: Sequence[int]
    outside: Sequence[int]
    key: TopologyKey = field(init=False)

    def __post_init__(self) -> None:
        self.key = (
            self.n_leafs,
            self.listed,
            self.sources,
            self.n_sources,
            self.bases,
            self.ops,
            self.flags,
            self.outside,
        )

    @classmethod
    def read(cls, graph: Numbering, own: Collection[Buffer]) -> Topology:
        """Read a graph as it is.

        Args:
            graph: Its tensors are read, nothing is changed.
            own: The buffers that the allocator may give out anew.

        Raises:
            FreedError: A tensor lies in a freed buffer of the user's.
        """
        tensors, bases = graph.tensors, graph.bases
        buffers = [t.buffer for t in tensors]
        foreign = {b for b in set(buffers).difference(own) if b is not None and not _is_void(b)}
        # A view is where its base is, or will be.
        outside = [i for i, b in enumerate(buffers) if b in foreign and bases[i] < 0] if foreign else []
        for i in outside if any(b.is_freed for b in foreign) else ():
            check_freed(tensors[i])
        flags = [t.flags for t in tensors]
        return cls(
            tensors=tensors,
            listed=graph.listed,
            n_leafs=graph.n_leafs,
            unlisted=graph.unlisted,
            sources=graph.sources,
            n_sources=graph.n_sources,
            bases=bases,
            views=graph.views,
            ops=[t.op for t in tensors],
            flags=flags,
            flagged=[i for i, f in enumerate(flags) if f & PLACE_FLAGS],
            outside=outside,
        )

    def placeable(self) -> list[int]:
        """The tensors that need a place: those that are no views, and do not lie elsewhere."""
        outside = set(self.outside)
        return [i for i, base in enumerate(self.bases) if base < 0 and i not in outside]


def check_freed(tensor: Tensor) -> None:
    """Raise a FreedError if a tensor of the user's lies in memory that was freed."""
    buffer = tensor.buffer
    if buffer is not None and buffer.is_freed:
        raise FreedError(
            f"{tensor.describe()} lies in a {buffer.name} buffer of {buffer.size:,} bytes that was freed; "
            "place it anew before the graph is allocated or computed"
        )


def _is_void(buffer: Buffer) -> bool:
    """Whether the buffer is freed memory of an allocator: what lay there is to be placed anew."""
    return buffer.is_freed and buffer.usage is BufferUsage.COMPUTE
