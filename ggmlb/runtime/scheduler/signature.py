"""Signature: all of a graph that its split, its allocation and its plans depend on.

A program that decodes builds a new graph for each token, of new tensors, which is the graph of the token
before in all but identity. Two graphs of equal signatures are computed by the same `Program`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from math import copysign
from typing import Any

from ggmlb.core.enums import NO_OPS, BufferUsage
from ggmlb.core.graph import Graph
from ggmlb.core.placement import Zeros, placement_clock, zeros_of
from ggmlb.core.tensor import Tensor
from ggmlb.interface import Buffer
from ggmlb.runtime.alloc.numbering import Numbering
from ggmlb.runtime.alloc.topology import PLACE_FLAGS, check_freed


class Signature(Numbering):
    """A graph as numbers, with all that its split, its allocation and its plans depend on.

    Reading a graph takes from its tensors the places that an allocator of compute memory gave them: that
    memory is given out anew for each graph.

    Attributes:
        ops: By number.
        flags: By number.
        facts: Types, extents, strides, and offsets in viewed tensors, each by number.
        params: The op's parameters, by number.
        buffers: Buffer of the user's in which each tensor lies, by number; `None` for what has no place.
        outside: Numbers of the tensors, no views, that lie in a buffer of the user's: weights, caches.
        places: The tensors of `outside`, their buffers, and their offsets there; and how buffers are used.
        requests: Backend index of the tensors whose backend the user asked for, by number.
        zeros: The kept parameters that are zero, once compared.

    Raises:
        FreedError: A tensor lies in a freed buffer of the user's.
    """

    def __init__(self, graph: Graph, user: Mapping[Tensor, int]) -> None:
        super().__init__(graph)
        tensors = self.tensors
        self.ops = [t.op for t in tensors]
        self.flags = [t.flags for t in tensors]
        self.facts = (
            [t.dtype for t in tensors],
            [t.ne for t in tensors],
            [t.nb for t in tensors],
            [t.view_offs for t in tensors],
        )
        self.params = [t.params for t in tensors]
        self.requests = {i: user[t] for i, t in enumerate(tensors) if t in user} if user else {}
        self.zeros: Zeros | None = None
        self.buffers: list[Buffer | None] = [t.buffer for t in tensors]
        self.outside: list[int] = []
        self.places: tuple[Any, ...] = ()
        self._find_outside()

    def _find_outside(self) -> None:
        tensors, buffers = self.tensors, self.buffers
        there = {b for b in set(buffers) if b is not None}
        ours = {b for b in there if b.usage is BufferUsage.COMPUTE}
        if ours:
            for i, buffer in enumerate(buffers):
                if buffer in ours:
                    tensors[i].buffer = buffers[i] = None
            placement_clock.tick()
            there -= ours
        if not there:
            return
        bases = self.bases
        self.outside = [i for i, buffer in enumerate(buffers) if buffer is not None and bases[i] < 0]
        placed = [tensors[i] for i in self.outside]
        where = [buffers[i] for i in self.outside], [t.offset for t in placed]
        self.places = (placed, *where, {b: b.usage for b in there})
        if any(b.is_freed for b in there):
            self.check_freed()

    def check_freed(self) -> None:
        """Raise a FreedError if a tensor of the user's lies in memory that was freed."""
        for i in self.outside:
            check_freed(self.tensors[i])

    @cached_property
    def computes(self) -> list[bool]:
        """Whether an op computes each tensor, by number: neither a leaf nor a view of what is there."""
        return [op not in NO_OPS for op in self.ops]

    @cached_property
    def work(self) -> list[int]:
        """Numbers of the nodes that compute something, in order."""
        computes = self.computes
        return [i for i in self.nodes if computes[i]]

    @cached_property
    def roots(self) -> list[int]:
        """Number of the tensor in whose memory each tensor lies, by number: its own, if it is no view."""
        roots = list(range(len(self.tensors)))
        for i in self.views:
            roots[i] = self.bases[i]
        return roots

    @cached_property
    def spans(self) -> tuple[list[int], list[int]]:
        """Where each node's part of `sources` begins, and where it ends, by number; -1 for no node."""
        begins, ends = [-1] * len(self.tensors), [-1] * len(self.tensors)
        for node, n, end in zip(self.nodes, self.n_sources, accumulate(self.n_sources), strict=True):
            begins[node] = end - n
            ends[node] = end
        return begins, ends

    def reads(self, node: int) -> Sequence[int]:
        """Return the numbers of a node's sources; -1 for an absent one."""
        begins, ends = self.spans
        return self.sources[begins[node] : ends[node]]

    @cached_property
    def flagged(self) -> list[int]:
        """Numbers of the tensors with flags that matter to where they lie."""
        matter = {flags for flags in {*self.flags} if flags & PLACE_FLAGS}
        return [i for i, flags in enumerate(self.flags) if flags in matter]

    def keep(self) -> None:
        """Hold on to the parameters as they are now, whatever becomes of the tensors."""
        self.params = [p.copy() if p else p for p in self.params]
        self.zeros = None

    def matches(self, other: Signature) -> bool:
        """Whether graphs of another signature are split, allocated and computed as the kept one is."""
        return (
            self.n_leafs == other.n_leafs
            and self.listed == other.listed
            and self.sources == other.sources
            and self.n_sources == other.n_sources
            and self.bases == other.bases
            and self.ops == other.ops
            and self.flags == other.flags
            and self.facts == other.facts
            and self.places == other.places
            and self.requests == other.requests
            and self.has_params(other.params)
        )

    def has_params(self, params: Sequence[dict[str, Any]]) -> bool:
        """Whether all parameters are equal to the kept ones, the signs of zeros included."""
        try:
            same = self.params == params
        except ValueError:  # arrays in a custom function's data have no truth value
            return False
        if same and self.zeros is None:
            self.zeros = zeros_of(self.params)
        return same and all(copysign(1.0, params[i][name]) == sign for i, name, sign in self.zeros or ())
