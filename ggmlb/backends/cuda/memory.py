"""A device's memory: given out, and taken back when the work that still uses it has ended."""

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
    """Memory of another library: what keeps it."""

    __slots__ = ("owner",)

    def __init__(self, owner: object) -> None:
        self.owner = owner


class DeferredRelease:
    """What a stream needs until its work is done, and what is released after it.

    Attributes:
        held: Host arrays of transfers, each with an event behind its transfer.
        blas: A cuBLAS handle, and its workspace.
    """

    def __init__(self, driver: Driver, stream: Stream, idle_graphs: IdleGraphs) -> None:
        self._driver = driver
        self._stream = stream
        self._idle_graphs = idle_graphs
        self.held: list[tuple[int, npt.NDArray[Any]]] = []
        self.blas: tuple[CuBlas, CudaBuffer] | None = None

    def close(self) -> None:
        """Release all; the work is done."""
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
    """Allocates for one device.

    A buffer may be dropped at any moment, by garbage collection in the middle of a capture too. So
    `give_back` only notes it; what may still use the memory is marked, and looked at, by the next call here.

    Attributes:
        streams: The device's.
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
        """Return the address of `nbytes`; where there is no room, wait for what is leaving and try once more.

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
        """Release memory, by its address or its owner, once the work now queued on the streams is done.

        A stream that was dropped, and not freed, leaves its remains.
        """
        users = tuple(streams)
        if users or not isinstance(memory, BorrowedMemory):
            self._dropped.append((memory, users))

    def give_back_event(self, event: int) -> None:
        """Release an event that was dropped."""
        self._events.append(event)

    def sweep_if_idle(self) -> None:
        """As `sweep`, unless a stream of the device has work: cudaFree would wait for all of them."""
        if not self._dropped and not self._leaving and not self._events:
            return
        streams = [stream for stream in list(self.streams) if stream.handle]
        with self._driver.on(self._device):
            if all(stream.is_idle() for stream in streams):
                self.sweep()

    def sweep(self, wait: bool = False) -> None:
        """Free what no work uses any more; with `wait`, all that was given back."""
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
                marks = [(stream, stream.mark()) for stream in streams if stream.handle]
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
