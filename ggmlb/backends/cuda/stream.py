"""Streams and events of a device."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ggmlb.backends.cuda.driver import cuda_errors
from ggmlb.interface import Event

if TYPE_CHECKING:
    from ggmlb.backends.cuda.device import CudaDevice
    from ggmlb.backends.cuda.driver import Driver


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
