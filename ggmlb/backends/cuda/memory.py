"""A device's memory: given out, and taken back when the work that still uses it has ended."""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ggmlb.backends.cuda.driver import Driver
    from ggmlb.backends.cuda.stream import Stream


class DeviceMemory:
    """Allocates for one device.

    A buffer may be dropped at any moment, by garbage collection in the middle of a capture too. So
    `give_back` only notes it; what may still use the memory is marked, and looked at, by the next call here.
    """

    def __init__(self, driver: Driver, device: int) -> None:
        self._driver = driver
        self._device = device
        self._lock = threading.Lock()
        self._dropped: deque[tuple[int, tuple[Stream, ...]]] = deque()
        self._leaving: list[tuple[int, list[tuple[Stream, int]]]] = []

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

    def give_back(self, address: int, streams: Iterable[Stream]) -> None:
        """Release memory as soon as the work now queued on the streams is done."""
        self._dropped.append((address, tuple(streams)))

    def sweep(self, wait: bool = False) -> None:
        """Free what no work uses any more; with `wait`, all that was given back."""
        driver = self._driver
        with self._lock, driver.on(self._device):
            while self._dropped:
                address, streams = self._dropped.popleft()
                marks = [(stream, stream.mark()) for stream in streams if stream.handle]
                self._leaving.append((address, marks))
            still = []
            for address, marks in self._leaving:
                if wait:
                    for _, event in marks:
                        driver.event_synchronize(event)
                elif not all(driver.event_done(event) for _, event in marks):
                    still.append((address, marks))
                    continue
                driver.free(address)
                for stream, event in marks:
                    if stream.handle:
                        stream.unmark(event)
                    else:
                        driver.event_free(event)
            self._leaving = still
