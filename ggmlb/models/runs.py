"""Runs: cached graphs, split, allocated and planned once, and computed repeatedly."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Generic, Protocol, TypeVar

from ggmlb import Backend, Graph, Scheduler

NBYTES = 1 << 30
"""Limit of the device memory of cached graphs [bytes]; beyond it, the least recently used is freed."""


class HasGraph(Protocol):
    """A graph with its inputs and outputs as attributes."""

    graph: Graph


Key = TypeVar("Key", bound=Hashable)
Built = TypeVar("Built", bound=HasGraph)


class Run(Generic[Built]):
    """A graph allocated by its own scheduler.

    Args:
        built: The graph with its inputs and outputs.
        backends: Streams, highest priority first.
        parallel: Whether computations of the graph overlap on several devices (see `Scheduler`).

    Attributes:
        built: The graph with its inputs and outputs.
        scheduler: The scheduler that computes it.
        nbytes: Its device memory [bytes].
    """

    def __init__(self, built: Built, backends: Sequence[Backend], parallel: bool = False) -> None:
        self.built = built
        self.scheduler = Scheduler(backends, parallel=parallel)
        try:
            self.scheduler.alloc_graph(built.graph)
        except BaseException:
            self.scheduler.free()
            raise
        self.nbytes = sum(self.scheduler.buffer_size(b) for b in backends)

    def compute(self) -> None:
        """Compute the graph with the current inputs, and wait for it."""
        self.scheduler.graph_compute(self.built.graph)

    def start(self) -> None:
        """Queue the graph with the current inputs, which may be overwritten then."""
        self.scheduler.graph_compute_async(self.built.graph)

    def wait(self) -> None:
        """Wait for what was queued."""
        self.scheduler.synchronize()


class Runs(Generic[Key, Built]):
    """Cache of runs by their sizes.

    Args:
        backends: Streams, highest priority first.
        parallel: Whether computations of one graph overlap; those of different graphs never do.

    Attributes:
        last: The run returned last; `None` before the first.
    """

    def __init__(self, backends: Sequence[Backend], parallel: bool = False) -> None:
        self._backends = tuple(backends)
        self._parallel = parallel
        self._runs: OrderedDict[Key, Run[Built]] = OrderedDict()
        self.last: Run[Built] | None = None

    def __len__(self) -> int:
        return len(self._runs)

    def keys(self) -> list[Key]:
        """The sizes of the cached runs."""
        return list(self._runs)

    def values(self) -> list[Run[Built]]:
        """The runs that are kept."""
        return list(self._runs.values())

    def get(self, key: Key, build: Callable[[], Built]) -> Run[Built]:
        """Return the run of these sizes, cached or new.

        Raises:
            AllocationError: A device lacks room.
            UnsupportedOpError: No device runs a node.
        """
        run = self._runs.pop(key, None)
        if self._parallel and self.last is not None and run is not self.last:
            self.last.wait()  # nothing orders the work of two schedulers
        if run is None:
            run = Run(build(), self._backends, self._parallel)
            room = NBYTES - run.nbytes
            while self._runs and sum(r.nbytes for r in self._runs.values()) > room:
                self._runs.popitem(last=False)[1].scheduler.free()
        self._runs[key] = self.last = run
        return run

    def free(self) -> None:
        """Free the memory of all runs."""
        self.last = None
        for run in self._runs.values():
            run.scheduler.free()
        self._runs.clear()
