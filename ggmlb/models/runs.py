"""Runs: a cache of graphs that are split, allocated and planned once, then computed many times."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from ggmlb import Backend, Buffer, DeviceType, Graph, Scheduler, Tensor

MOST = 64
"""Limit of cached graphs; beyond it, the least recently used is dropped."""


class HasGraph(Protocol):
    """A graph with its inputs and outputs as attributes."""

    graph: Graph


class Reading(NamedTuple):
    """How a result is read: queued on a backend, or in place.

    Attributes:
        place: Buffer and offset of the tensor.
        backend: The backend that copies it; `None` if it is in host memory.
        data: The host memory, as flat bytes.
        values: The same, as a flat array of the tensor's type.
    """

    place: tuple[Buffer | None, int]
    backend: Backend | None
    data: npt.NDArray[np.uint8]
    values: npt.NDArray[Any]


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
        apart = [b.device for b in backends if b.device.type is DeviceType.GPU and b.device.caps.host_buffer]
        self._pinned = apart[0].host_buffer_type if apart else None
        self._results: Buffer | None = None
        self._readings: weakref.WeakKeyDictionary[Tensor, Reading] = weakref.WeakKeyDictionary()

    @property
    def buffers(self) -> list[Buffer]:
        """The compute buffers, and the page-locked memory of results."""
        return [*self.scheduler.buffers, *([] if self._results is None else [self._results])]

    def __len__(self) -> int:
        return len(self._built)

    def keys(self) -> list[Key]:
        """The keys (sizes) of the cached graphs."""
        return list(self._built)

    def values(self) -> list[Built]:
        """The cached graphs."""
        return list(self._built.values())

    def reserve(self, largest: Iterable[Built], nbytes: int = 0) -> None:
        """Allocate compute memory for these largest graphs, so that smaller ones need no more.

        Args:
            largest: The graphs.
            nbytes: Size of the largest result that is read [bytes].

        Raises:
            AllocationError: A device lacks room.
            UnsupportedOpError: No device runs a node.
        """
        for built in largest:
            self.scheduler.reserve(built.graph)
        self._reserve_result(nbytes)

    def _reserve_result(self, nbytes: int) -> None:
        """Allocate page-locked memory for results of `nbytes`, if a device apart from the host has it."""
        if self._pinned is not None and (self._results is None or self._results.size < nbytes):
            self._readings.clear()  # of the smaller memory
            self._results = self._pinned.alloc_buffer(nbytes)

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

    def read(self, *results: Tensor) -> list[npt.NDArray[Any]]:
        """Wait for the queued computations; return results of the last as flat arrays.

        Their copies to the host are queued behind them, so that there is one wait. The next `read` or
        computation may overwrite the arrays. A tensor must always be read after the same others, if any.
        """
        found, end = [], 0
        for result in results:
            start, end = end, end + result.nbytes
            reading = self._readings.get(result)
            if reading is None or reading.place != (result.buffer, result.offset):
                self._reserve_result(sum(r.nbytes for r in results))
                reading = self._readings[result] = self._reading(result, start)
            if reading.backend is not None:
                reading.backend.get_tensor_async(result, reading.data)
            found.append(reading.values)
        self.wait()
        return found

    def _reading(self, result: Tensor, start: int) -> Reading:
        buffer, place = result.buffer, (result.buffer, result.offset)
        if buffer is not None and buffer.is_host:
            values = np.asarray(result).reshape(-1)
            return Reading(place, None, values.view(np.uint8), values)
        whole = np.empty(start + result.nbytes, np.uint8) if self._results is None else self._results.base
        data = whole[start : start + result.nbytes]
        return Reading(place, self.scheduler.get_tensor_backend(result), data, data.view(result.dtype.numpy))

    def free(self) -> None:
        """Free the compute memory of all graphs."""
        self.last = None
        self._built.clear()
        self._readings.clear()
        if self._results is not None and not self._results.is_freed:
            self._results.free()
        self._results = None
        if not self.scheduler.is_freed:
            self.scheduler.free()
