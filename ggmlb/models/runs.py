"""Runs: a cache of graphs that are split, allocated and planned once, then computed many times."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from ggmlb import Backend, Graph, Scheduler, Tensor

MOST = 64
"""Limit of cached graphs; beyond it, the least recently used is dropped."""


class HasGraph(Protocol):
    """A graph with its inputs and outputs as attributes."""

    graph: Graph


Key = TypeVar("Key", bound=Hashable)
Built = TypeVar("Built", bound=HasGraph)


class Runs(Generic[Key, Built]):
    """Cache of allocated graphs by key (their sizes); all share the same compute buffers.

    Computing one overwrites the results of the others: set all inputs after `get`, and read results before
    the next `get`.

    Args:
        backends: Streams, highest priority first.
        parallel: Whether computations of one graph overlap; those of different graphs never do.

    Attributes:
        scheduler: The scheduler that computes them.
        last: The graph returned last; `None` before the first.
    """

    def __init__(self, backends: Sequence[Backend], parallel: bool = False) -> None:
        self.scheduler = Scheduler(backends, parallel=parallel, keep_graphs=True)
        self.last: Built | None = None
        self._built: OrderedDict[Key, Built] = OrderedDict()

    def __len__(self) -> int:
        return len(self._built)

    def keys(self) -> list[Key]:
        """The keys (sizes) of the cached graphs."""
        return list(self._built)

    def values(self) -> list[Built]:
        """The cached graphs."""
        return list(self._built.values())

    def reserve(self, largest: Iterable[Built]) -> None:
        """Allocate compute memory for these largest graphs, so that smaller ones need no more.

        Raises:
            AllocationError: A device lacks room.
            UnsupportedOpError: No device runs a node.
        """
        for built in largest:
            self.scheduler.reserve(built.graph)

    def get(self, key: Key, build: Callable[[], Built]) -> Built:
        """Return the graph of `key`, cached or made by `build`, allocated and ready for its inputs.

        Raises:
            AllocationError: A device lacks room.
            UnsupportedOpError: No device runs a node.
        """
        built = self._built.get(key)
        if built is not None and built is self.last and self.scheduler.graph is built.graph:
            return built  # still placed: no other graph was placed since
        built = self._built.pop(key, None)
        if built is None:
            built = build()
            while len(self._built) >= MOST:
                self._built.popitem(last=False)
        self.scheduler.alloc_graph(built.graph)
        self._built[key] = self.last = built
        return built

    def start(self, built: Built) -> None:
        """Queue the computation of a graph from `get`; its inputs may be overwritten once this returns."""
        self.scheduler.graph_compute_async(built.graph)

    def traced(self, built: Built, nodes: Iterable[Tensor]) -> dict[Tensor, npt.NDArray[Any]]:
        """Compute a graph from `get`; return copies of the values of the given nodes."""
        wanted = frozenset(nodes)
        found: dict[Tensor, npt.NDArray[Any]] = {}

        def keep(node: Tensor, is_asked: bool) -> bool:
            if not is_asked:
                found[node] = np.array(node.to_numpy())
            return node in wanted

        self.scheduler.set_eval_callback(keep)
        try:
            self.start(built)
            self.wait()
        finally:
            self.scheduler.set_eval_callback(None)
        return found

    def wait(self) -> None:
        """Wait for the queued computations."""
        self.scheduler.synchronize()

    def free(self) -> None:
        """Free the compute memory of all graphs."""
        self.last = None
        self._built.clear()
        if not self.scheduler.is_freed:
            self.scheduler.free()
