"""Signature: all of a graph that its split, its allocation and its plans depend on.

A program that decodes builds a new graph for each token, of new tensors, which is the graph of the token
before in all but identity. Two graphs of equal signatures are computed by the same `Program`.
"""

from __future__ import annotations

from math import copysign
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from ggmlb.enums import BufferUsage
from ggmlb.errors import FreedError
from ggmlb.placement import placement_clock

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ggmlb.graph import Graph
    from ggmlb.tensor import Tensor

_FACTS = tuple(map(attrgetter, ("op", "dtype", "ne", "nb", "flags", "view_offs")))
_buffer = attrgetter("buffer")
_params = attrgetter("params")


class Signature:
    """A graph whose tensors are numbers: leafs first, then nodes, then what they need unlisted.

    Reading a graph takes from its tensors the places that an allocator of compute memory gave them: that
    memory is given out anew for each graph.

    Attributes:
        tensors: By number.
        numbers: Number of each tensor; -1 for `None`, an absent one.
        n_leafs: How many of the tensors are leafs of the graph.
        n_nodes: How many are nodes.
        facts: Ops, types, extents, strides, flags, and offsets in viewed tensors, each by number.
        params: The op's parameters, by number.
        sources: For all nodes, one after another, the numbers of their sources; -1 for an absent one.
        n_sources: How many of `sources` belong to each node.
        bases: Number of the tensor in whose memory each one lies; -1 for what is no view.
        outside: Tensors, no views, that lie in a buffer of the user's: weights, caches.
        places: Buffer, its usage, and offset of each of `outside`.
        wishes: Number and backend index of the tensors whose backend the user asked for.
        zeros: Number, name and sign of the kept parameters that are zero, once compared: 0.0 equals -0.0.

    Raises:
        FreedError: A tensor lies in a freed buffer of the user's.
    """

    __slots__ = (
        "bases",
        "facts",
        "n_leafs",
        "n_nodes",
        "n_sources",
        "numbers",
        "outside",
        "params",
        "places",
        "sources",
        "tensors",
        "wishes",
        "zeros",
    )

    def __init__(self, graph: Graph, user: Mapping[Tensor, int]) -> None:
        leafs, nodes = graph.leafs, graph.nodes
        self.n_leafs, self.n_nodes = len(leafs), len(nodes)
        self.tensors = tensors = [*leafs, *nodes]
        numbers: dict[Tensor | None, int] = dict(zip(tensors, range(len(tensors)), strict=True))
        numbers[None] = -1
        self.numbers = numbers
        try:
            self.sources = [numbers[s] for t in nodes for s in t.src]
            self.bases = [numbers[t.view_src] for t in tensors]
        except KeyError:
            self._add_unlisted()
            self.sources = [numbers[s] for t in nodes for s in t.src]
            self.bases = [numbers[t.view_src] for t in tensors]
        self.n_sources = [len(t.src) for t in nodes]
        self.facts = [list(map(fact, tensors)) for fact in _FACTS]
        self.params = list(map(_params, tensors))
        self.wishes = [(i, user[t]) for i, t in enumerate(tensors) if t in user] if user else []
        self.outside: list[Tensor] = []
        self.places: list[Any] = []
        self.zeros: list[tuple[int, str, float]] | None = None
        self._find_outside()

    def _add_unlisted(self) -> None:
        tensors, numbers = self.tensors, self.numbers
        for tensor in tensors:  # which grows
            for needed in (*tensor.src, tensor.view_src):
                if needed is not None and needed not in numbers:
                    numbers[needed] = len(tensors)
                    tensors.append(needed)

    def _find_outside(self) -> None:
        tensors = self.tensors
        buffers = list(map(_buffer, tensors))
        there = set(buffers)
        there.discard(None)
        ours = {b for b in there if b.usage is BufferUsage.COMPUTE}
        if ours:
            for tensor, buffer in zip(tensors, buffers, strict=True):
                if buffer in ours:
                    tensor.buffer = None
            placement_clock.tick()
            there -= ours
        if not there:
            return
        outside = self.outside
        for tensor, buffer, base in zip(tensors, buffers, self.bases, strict=True):
            if base < 0 and buffer in there:
                outside.append(tensor)
                self.places += (buffer, buffer.usage, tensor.offset)
        if any(b.is_freed for b in there):
            self.check_freed()

    def check_freed(self) -> None:
        """Raise a FreedError if a tensor of the user's lies in memory that was freed."""
        for tensor in self.outside:
            buffer = tensor.buffer
            if buffer is not None and buffer.is_freed:
                raise FreedError(
                    f"{tensor.describe()} lies in a {buffer.name} buffer of {buffer.size:,} bytes that was "
                    "freed; place it anew before the graph is allocated or computed"
                )

    def keep(self) -> None:
        """Hold on to the parameters as they are now, whatever becomes of the tensors."""
        self.params = [dict(p) if p else p for p in self.params]
        self.zeros = None

    def matches(self, other: Signature) -> bool:
        """Whether graphs of another signature are split, allocated and computed as the kept one is."""
        return (
            self.n_leafs == other.n_leafs
            and self.sources == other.sources
            and self.n_sources == other.n_sources
            and self.bases == other.bases
            and self.facts == other.facts
            and self.outside == other.outside
            and self.places == other.places
            and self.wishes == other.wishes
            and self.has_params(other.params)
        )

    def has_params(self, params: Sequence[dict[str, Any]]) -> bool:
        """Whether all parameters are equal to the kept ones, the signs of zeros included."""
        try:
            same = self.params == params
        except ValueError:  # arrays in a custom function's data have no truth value
            return False
        if same and self.zeros is None:
            self.zeros = [
                (i, name, copysign(1.0, value))
                for i, kept in enumerate(self.params)
                if kept
                for name, value in kept.items()
                if type(value) is float and not value
            ]
        return same and all(copysign(1.0, params[i][name]) == sign for i, name, sign in self.zeros or ())
