"""DeviceMemory: allocation, and release after pending work."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

if TYPE_CHECKING:
    from ggmlb.backends.cuda.buffer import CudaBuffer
    from ggmlb.backends.cuda.cublas import CuBlas
    from ggmlb.backends.cuda.driver import Driver
    from ggmlb.backends.cuda.graphs import IdleGraphs
    from ggmlb.backends.cuda.stream import Stream


class BorrowedMemory:
    """Memory of another library, with its owner."""

    __slots__ = ("owner",)

    def __init__(self, owner: object) -> None:
        self.owner = owner


class DeferredRelease:
    """Resources of a stream, released when its work is done.

    Attributes:
        held: Host arrays of transfers, each with an event recorded after its transfer.
        blas: A cuBLAS handle, and its workspace.
    """

    def __init__(self, driver: Driver, stream: Stream, idle_graphs: IdleGraphs) -> None:
        self._driver = driver
        self._stream = stream
        self._idle_graphs = idle_graphs
        self.held: list[tuple[int, npt.NDArray[Any]]] = []
        self.blas: tuple[CuBlas, CudaBuffer] | None = None

    def close(self) -> None:
        """Release all resources; the work must be done."""
        for event, _ in self.held:
            self._stream.unmark(event)
        self.held.clear()
        self._idle_graphs.close()
        blas, self.blas = self.blas, None
        if blas is not None:
            with self._driver.on(self._stream.device):
                blas[0].close()
        self._stream.free()


class DeviceMemory:
    """Allocator of one device.

    Garbage collection may drop a buffer at any moment, even during a capture. So `give_back` only records
    it; the next call records events for work that may still use the memory, and checks them.

    Attributes:
        streams: The device's streams.
    """

    def __init__(self, driver: Driver, device: int) -> None:
        self._driver = driver
        self._device = device
        self._lock = threading.Lock()
        self.streams: weakref.WeakSet[Stream] = weakref.WeakSet()
        self._dropped: deque[tuple[int | BorrowedMemory | DeferredRelease, tuple[Stream, ...]]] = deque()
        self._leaving: list[tuple[int | BorrowedMemory | DeferredRelease, list[tuple[Stream, int]]]] = []
        self._events: deque[int] = deque()

    def allocate(self, nbytes: int) -> int:
        """Allocate `nbytes`; on failure, wait for pending releases and retry once.

        Raises:
            Exception: One of the driver's errors.
        """
        driver = self._driver
        with driver.on(self._device):
            self.sweep()
            try:
                return driver.malloc(nbytes)
            except driver.errors as error:
                if not driver.is_out_of_memory(error):
                    raise
            self.sweep(wait=True)
            driver.trim()
            return driver.malloc(nbytes)

    def give_back(self, memory: int | BorrowedMemory | DeferredRelease, streams: Iterable[Stream]) -> None:
        """Release memory, given by address or owner, when the work now queued on the streams is done.

        A dropped stream that was not freed passes its `DeferredRelease`.
        """
        users = tuple(streams)
        if users or not isinstance(memory, BorrowedMemory):
            self._dropped.append((memory, users))

    def give_back_event(self, event: int) -> None:
        """Release a dropped event."""
        self._events.append(event)

    def sweep_if_idle(self) -> None:
        """As `sweep`, unless a stream of the device has work, which cudaFree would wait for."""
        if not self._dropped and not self._leaving and not self._events:
            return
        streams = [stream for stream in list(self.streams) if stream.handle]
        with self._driver.on(self._device):
            if all(stream.is_idle() for stream in streams):
                self.sweep()

    def sweep(self, wait: bool = False) -> None:
        """Free returned memory that no work uses any more; with `wait`, all of it."""
        if not self._dropped and not self._leaving and not self._events:
            return
        driver = self._driver
        lent = []  # what becomes of it is its owner's code, which runs without the lock
        remains = []
        with self._lock, driver.on(self._device):
            while self._events:
                driver.event_free(self._events.popleft())
            while self._dropped:
                memory, streams = self._dropped.popleft()
                marks = [
                    (stream, stream.mark()) for stream in streams if stream.handle and not stream.is_idle()
                ]
                self._leaving.append((memory, marks))
            still = []
            for memory, marks in self._leaving:
                if wait:
                    for _, event in marks:
                        driver.event_synchronize(event)
                elif not all(driver.event_done(event) for _, event in marks):
                    still.append((memory, marks))
                    continue
                if isinstance(memory, BorrowedMemory):
                    lent.append(memory)
                elif isinstance(memory, DeferredRelease):
                    remains.append(memory)
                else:
                    driver.free(memory)
                for stream, event in marks:
                    if stream.handle:
                        stream.unmark(event)
                    else:
                        driver.event_free(event)
            self._leaving = still
        for each in remains:
            each.close()
        lent.clear()
