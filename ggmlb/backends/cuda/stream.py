"""Streams and events of a device, and its memory, which is released when streams are done with it."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from ggmlb.backends.cuda.driver import cuda_errors
from ggmlb.interface import Event

if TYPE_CHECKING:
    from ggmlb.backends.cuda.buffer import CudaBuffer
    from ggmlb.backends.cuda.cublas import CuBlas
    from ggmlb.backends.cuda.device import CudaDevice
    from ggmlb.backends.cuda.driver import Driver
    from ggmlb.backends.cuda.plan import IdleGraphs


class Stream:
    """A CUDA stream.

    Attributes:
        handle: CUDA's handle; 0 once freed.
        lock: Held during capture, and for each call that queues work, records an event or adds a wait:
            during a capture, that would become part of the graph or break the capture. While it is held,
            no other stream's lock is taken (except by sums over cards, in order), and no thread waits for
            the device.
    """

    def __init__(self, driver: Driver, device: int) -> None:
        self._driver = driver
        self.device = device
        self.lock = threading.RLock()
        self._marks: list[int] = []
        with driver.on(device):
            self.handle = driver.stream_new()

    def mark(self) -> int:
        """Record an event after the work queued so far; return it, to be released by `unmark`."""
        try:
            event = self._marks.pop()
        except IndexError:
            with self._driver.on(self.device):
                event = self._driver.event_new()
        with self.lock:
            self._driver.event_record(event, self.handle)
        return event

    def unmark(self, event: int) -> None:
        """Release an event that is reached, or that streams already wait for."""
        self._marks.append(event)

    def is_idle(self) -> bool:
        """Whether all of its work is done."""
        with self.lock:
            return self._driver.stream_done(self.handle)

    def wait_for(self, others: Iterable[Stream]) -> None:
        """Let later work run after the work queued so far on other streams."""
        for other in others:
            if other is not self and other.handle:
                event = other.mark()
                with self.lock:
                    self._driver.stream_wait(self.handle, event)
                other.unmark(event)  # to record it again does not move a wait that was queued

    def synchronize(self) -> None:
        """Block until the work queued so far is done; other threads may queue and capture meanwhile."""
        with self._driver.on(self.device):
            event = self.mark()
            self._driver.event_synchronize(event)
        self.unmark(event)

    def free(self) -> None:
        """Release the stream; its work must be done."""
        handle, self.handle = self.handle, 0
        with self._driver.on(self.device):
            for event in self._marks:
                self._driver.event_free(event)
            self._marks.clear()
            self._driver.stream_free(handle)


class CudaEvent(Event):
    """A point in a stream's work.

    Attributes:
        handle: CUDA's event.
    """

    device: CudaDevice

    def __init__(self, device: CudaDevice) -> None:
        super().__init__(device)
        with cuda_errors(device.driver, f"create an event on {device.name}"), device.on():
            self.handle = device.driver.event_new()
        self._leave = weakref.finalize(self, device.memory_pool.give_back_event, self.handle)
        self._leave.atexit = False

    def _synchronize(self) -> None:
        device = self.device
        with cuda_errors(device.driver, f"wait for an event of {device.name}"), device.on():
            device.driver.event_synchronize(self.handle)

    def _free(self) -> None:
        device = self.device
        self._leave.detach()
        with cuda_errors(device.driver, f"free an event of {device.name}"), device.on():
            device.driver.event_free(self.handle)


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
