"""IndexedGraph: a graph as lists of integers, for the allocator and the scheduler.

Assignment, splits, placement and plans depend only on these lists, so that graphs with equal lists share
them (`IndexedGraph.match`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import accumulate, chain, count
from math import copysign
from operator import itemgetter
from typing import Any

from ggmlb.core.enums import NO_OPS, BufferUsage, TensorFlag
from ggmlb.core.errors import FreedError
from ggmlb.core.graph import Graph
from ggmlb.core.ops import SPECS
from ggmlb.core.placement import are_equal, zeros_of
from ggmlb.core.tensor import Tensor
from ggmlb.interface import Buffer, BufferType

PLACE_FLAGS = TensorFlag.INPUT | TensorFlag.OUTPUT | TensorFlag.PARAM
"""The flags that affect the placement of a tensor."""

_ALSO_WRITING = {op for op, spec in SPECS.items() if spec.also_written}

GraphKey = tuple[Any, ...]

N_FIRST = 64
"""Number of nodes compared first: in graphs of other sizes, these differ already."""


class IndexedGraph:
    """A graph with numbered tensors: leafs, then nodes, then unlisted tensors that these need.

    The graph itself is not changed.

    Args:
        graph: The graph.
        is_own: Whether a buffer is the caller's compute memory: tensors in it count as unplaced.

    Attributes:
        tensors: Tensors by number.
        listed: Numbers of the graph's leafs, then of its nodes in computing order; a tensor may be listed
            twice.
        n_leafs: Number of leafs in `listed`.
        nodes: Numbers of the graph's nodes, in order.
        unlisted: Numbers of tensors that are needed as a source or view source, but not listed. They hold
            data from outside the graph, like leafs.
        users: For each of `unlisted`, the number of a listed tensor that needs it.
        sources: Numbers of the sources of all nodes, concatenated; -1 if absent.
        n_sources: Number of sources of each node.
        bases: Number of each view's source; -1 if not a view.
        ops: Ops by number.
        flags: Flags by number.
        buffers: Buffer of each tensor, by number; `None` if unplaced.
        own, foreign: Buffers of the tensors: those that `is_own` accepts, and the user's.
        outside: Numbers of tensors (not views) in a buffer of the user: weights, caches.
        layouts, view_offs, params: Of the tensors and their ops, by number, as saved by `keep`.

    Raises:
        FreedError: A tensor is in a freed buffer of the user.
    """

    def __init__(self, graph: Graph, is_own: Callable[[Buffer], bool] = lambda _: False) -> None:
        nodes = graph.nodes
        self.n_leafs = len(graph.leafs)
        self.tensors = tensors = [*graph.leafs, *nodes]
        self.listed: Sequence[int] = range(len(tensors))
        self.numbers: dict[Tensor | None, int] = dict(zip(tensors, self.listed, strict=True))
        if len(self.numbers) < len(tensors):
            self.tensors = list(dict.fromkeys(tensors))
            self.numbers = dict(zip(self.tensors, count()))
            self.listed = [*map(self.numbers.__getitem__, tensors)]
            tensors = self.tensors
        self.nodes = self.listed[self.n_leafs :]
        n_distinct = len(tensors)
        self.numbers[None] = -1
        self.users: list[int] = []
        self._reached: list[tuple[int, int]] = []
        number_of, operands = self.numbers.__getitem__, [t.src for t in nodes]
        try:
            self.sources = [*map(number_of, chain.from_iterable(operands))]
            self.bases = [number_of(t.view_src) for t in tensors]
        except KeyError:
            self._add_unlisted(nodes)
            self.sources = [*map(number_of, chain.from_iterable(operands))]
            self.bases = [number_of(t.view_src) for t in tensors]
        self.unlisted = range(n_distinct, len(tensors))
        self.n_sources = [*map(len, operands)]
        self.ops = [t.op for t in tensors]
        self.flags = [t.flags for t in tensors]
        self.buffers: list[Buffer | None] = [t.buffer for t in tensors]
        self.outside: list[int] = []
        there = {b for b in {*self.buffers} if b is not None}
        self.own = {*filter(is_own, there)}
        self.foreign = there - self.own
        if self.own:
            self.buffers = [None if b in self.own else b for b in self.buffers]
        if self.foreign:
            bases = self.bases  # a view is where its base is, or will be
            self.outside = [i for i, b in enumerate(self.buffers) if b is not None and bases[i] < 0]
        if freed := {b for b in self.foreign if b.is_freed}:
            self.check_freed()  # else only views are in freed buffers; they follow their source
            self.foreign -= freed
            self.buffers = [None if b in freed else b for b in self.buffers]

    def _add_unlisted(self, nodes: Sequence[Tensor]) -> None:
        numbers, users, tensors = self.numbers, self.users, self.tensors
        n_distinct = len(tensors)
        for node in nodes:
            for i, source in enumerate(node.src):
                if source is not None and source not in numbers:
                    self._reached.append((numbers[node], i))
                    numbers[source] = len(tensors)
                    tensors.append(source)
                    users.append(numbers[node])
        for number, tensor in enumerate(tensors):  # `tensors` grows
            base = tensor.view_src
            if base is not None and base not in numbers:
                self._reached.append((number, -1))
                numbers[base] = len(tensors)
                tensors.append(base)
                users.append(number if number < n_distinct else users[number - n_distinct])

    # -- equal graphs --------------------------------------------------------------------------

    def keep(self) -> None:
        """Save the properties that `match` compares with later graphs; the tensors may change afterwards."""
        tensors = self.tensors
        self.layouts = [t.layout for t in tensors]
        self.view_offs = [t.view_offs for t in tensors]
        self.set_params([t.params for t in tensors])
        self._first_layouts = [tensors[i].layout for i in self.nodes[:N_FIRST]]
        placed = self._outside_of(tensors)
        self._there = placed, [t.offset for t in placed], {b: b._usage for b in self.foreign}

    def set_params(self, params: Sequence[dict[str, Any]]) -> None:
        """Save copies of all ops' parameters, by tensor number; the user may change the originals."""
        self.params = [p.copy() if p else _NO_PARAMS for p in params]
        self._zeros = zeros_of(self.params)

    def has_params(self, params: Sequence[dict[str, Any]]) -> bool:
        """Whether parameters equal those saved by `set_params`; 0.0 and -0.0 differ."""
        same = are_equal(self.params, params)
        return same and all([copysign(1.0, params[i][name]) == sign for i, name, sign in self._zeros])

    def match(self, graph: Graph) -> list[Tensor] | None:
        """Return the tensors of another graph by number, if it equals the saved one; else `None`."""
        if [t.layout for t in graph.nodes[:N_FIRST]] != self._first_layouts:
            return None  # before anything else, as most often the sizes differ
        tensors = self._numbered(graph)
        is_same = (
            tensors is not None
            and [t.layout for t in tensors] == self.layouts
            and [t.op for t in tensors] == self.ops
            and [t.flags for t in tensors] == self.flags
            and [t.view_offs for t in tensors] == self.view_offs
            and self._are_there(tensors)
            and self.has_params([t.params for t in tensors])
        )
        return tensors if is_same else None

    def _are_there(self, tensors: list[Tensor]) -> bool:
        """Whether the user's buffers hold the same tensors at the same offsets, and no others."""
        placed, offsets, usage = self._there
        buffers, bases = [t.buffer for t in tensors], self.bases
        return (
            self._outside_of(tensors) == placed
            and [t.offset for t in placed] == offsets
            and not any([b.is_freed or b.usage is not kind for b, kind in usage.items()])
            and (buffers == self.buffers or _roots_of(buffers, bases) == _roots_of(self.buffers, bases))
        )

    @cached_property
    def _outside_of(self) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
        """Function that picks the items of the tensors in the user's buffers."""
        return picker(self.outside)

    def _numbered(self, graph: Graph) -> list[Tensor] | None:
        """Return the tensors of another graph by number, if it has the same edges; else `None`."""
        nodes = graph.nodes
        tensors = listed = [*graph.leafs, *nodes]
        if len(graph.leafs) != self.n_leafs or len(listed) != len(self.listed):
            return None
        if not isinstance(self.listed, range):  # of a tensor that is listed twice, the last has its number
            tensors = list(
                map(dict(zip(self.listed, listed, strict=True)).__getitem__, range(max(self.listed) + 1))
            )
            if [tensors[i] for i in self.listed] != listed:
                return None
        for number, source in self._reached:
            user = tensors[number]
            found = user.view_src if source < 0 else user.src[source] if source < len(user.src) else None
            if found is None:
                return None
            tensors.append(found)
        sources = [t.src for t in nodes]
        sources_of, bases_of = self._getters
        padded = (*tensors, None, None)
        is_same = (
            len({*tensors}) == len(tensors)
            and tuple(chain.from_iterable([*sources, (None, None)])) == sources_of(padded)
            and (*[t.view_src for t in tensors], None, None) == bases_of(padded)
            and list(map(len, sources)) == self.n_sources
        )
        return tensors if is_same else None

    @cached_property
    def _getters(self) -> tuple[itemgetter[Any], itemgetter[Any]]:
        """Getters of all sources, and of the sources of views; both append two None, to return tuples."""
        return itemgetter(*self.sources, -1, -1), itemgetter(*self.bases, -1, -1)

    def bind(self, tensors: list[Tensor]) -> None:
        """Replace the tensors by those of an equal graph, listed by number."""
        self.tensors = tensors
        self.__dict__.pop("numbers", None)

    @cached_property
    def numbers(self) -> dict[Tensor | None, int]:
        """Maps each tensor to its number (index in `tensors`), and `None` (an absent source) to -1."""
        return {**dict(zip(self.tensors, count())), None: -1}

    # -- lists derived from edges and flags ----------------------------------------------------

    @property
    def key(self) -> GraphKey:
        """Key of the topology: graphs with equal keys have the same plan, sizes aside."""
        return (
            self.n_leafs,
            self.listed,
            self.sources,
            self.n_sources,
            self.bases,
            self.ops,
            self.flags,
            self.outside,
        )

    @cached_property
    def views(self) -> list[int]:
        """Indices (tensor numbers) of the views."""
        return [i for i, base in enumerate(self.bases) if base >= 0]

    @cached_property
    def roots(self) -> list[int]:
        """Maps each tensor's number to that of the tensor owning its memory: a view's source, else itself."""
        roots = list(range(len(self.tensors)))
        for i in self.views:
            roots[i] = self.bases[i]
        return roots

    @cached_property
    def some_unreadable(self) -> bool:
        """Whether any of the user's buffers may hold packed weights that cannot be read back."""
        return any([type(b.buft).is_readable is not BufferType.is_readable for b in self.foreign])

    @cached_property
    def flagged(self) -> list[int]:
        """Indices (tensor numbers) of the tensors flagged as input, output or parameter."""
        matter = {flags for flags in {*self.flags} if flags & PLACE_FLAGS}
        return [i for i, flags in enumerate(self.flags) if flags in matter]

    @cached_property
    def computes(self) -> list[bool]:
        """Whether an op computes each tensor, by number; false for leafs and views."""
        return [op not in NO_OPS for op in self.ops]

    @cached_property
    def work(self) -> list[int]:
        """Indices (tensor numbers) of the nodes that an op computes (no views), in execution order."""
        computes = self.computes
        return [i for i in self.nodes if computes[i]]

    @cached_property
    def writes(self) -> dict[int, list[int]]:
        """Maps each in-place node's number to the numbers of the tensors whose memory it overwrites."""
        bases, ops, roots = self.bases, self.ops, self.roots
        found = {i: [bases[i]] for i in self.work if bases[i] >= 0}
        for op in {*ops} & _ALSO_WRITING:
            for node in [i for i in self.work if ops[i] is op]:
                also = [roots[self.reads(node)[k]] for k in SPECS[op].also_written]
                found[node] = [*found.get(node, ()), *also]
        return found

    @cached_property
    def written(self) -> set[int]:
        """Indices (tensor numbers) of the tensors whose memory in-place nodes overwrite."""
        return set(chain.from_iterable(self.writes.values()))

    @cached_property
    def spans(self) -> tuple[list[int], list[int]]:
        """Where each node's operands begin and end in list `sources`, by tensor number; -1 if not a node."""
        begins, ends = [-1] * len(self.tensors), [-1] * len(self.tensors)
        for node, n, end in zip(self.nodes, self.n_sources, accumulate(self.n_sources), strict=True):
            begins[node] = end - n
            ends[node] = end
        return begins, ends

    def reads(self, node: int) -> Sequence[int]:
        """Return the numbers of a node's sources; -1 for an absent one."""
        begins, ends = self.spans
        return self.sources[begins[node] : ends[node]]

    def placeable(self) -> list[int]:
        """Return the numbers of the tensors to allocate: neither placed nor views."""
        outside = set(self.outside)
        return [i for i, base in enumerate(self.bases) if base < 0 and i not in outside]

    def check_freed(self) -> None:
        """Raise a FreedError if a tensor is in a buffer that the user freed."""
        for tensor in map(self.tensors.__getitem__, self.outside):
            buffer = tensor.buffer
            if buffer is not None and buffer.is_freed:
                raise FreedError(
                    f"{tensor.describe()} is in a freed {buffer.name} buffer of {buffer.size:,} bytes; "
                    "place it again before the graph is allocated or computed"
                )


_NO_PARAMS: dict[str, Any] = {}


def is_compute(buffer: Buffer) -> bool:
    """Whether a buffer is compute memory, which graphs reuse."""
    return buffer._usage is BufferUsage.COMPUTE  # without a check, as the buffer may be freed


def picker(numbers: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """Return a function that takes a sequence and returns the tuple of its items at indices `numbers`."""
    if len(numbers) > 1:  # itemgetter returns a single element by itself
        return itemgetter(*numbers)
    return lambda items: tuple([items[i] for i in numbers])


def _roots_of(buffers: Sequence[Buffer | None], bases: Sequence[int]) -> list[Buffer | None]:
    """Return the buffers of all but views, which may have been created before their source was placed."""
    return [buffer for buffer, base in zip(buffers, bases, strict=True) if base < 0]
