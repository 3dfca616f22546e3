"""A device's memory: given out, and taken back when the work that still uses it has ended."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ggmlb.backends.cuda.driver import Driver
    from ggmlb.backends.cuda.stream import Stream


class Lent:
    """Memory of another library: what keeps it."""

    __slots__ = ("owner",)

    def __init__(self, owner: object) -> None:
        self.owner = owner


class DeviceMemory:
    """Allocates for one device.

    A buffer may be dropped at any moment, by garbage collection in the middle of a capture too. So
    `give_back` only notes it; what may still use the memory is marked, and looked at, by the next call here.
    """

    def __init__(self, driver: Driver, device: int) -> None:
        self._driver = driver
        self._device = device
        self._lock = threading.Lock()
        self._dropped: deque[tuple[int | Lent, tuple[Stream, ...]]] = deque()
        self._leaving: list[tuple[int | Lent, list[tuple[Stream, int]]]] = []

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

    def give_back(self, memory: int | Lent, streams: Iterable[Stream]) -> None:
        """Release memory, by its address or its owner, once the work now queued on the streams is done."""
        users = tuple(streams)
        if users or not isinstance(memory, Lent):
            self._dropped.append((memory, users))

    def sweep(self, wait: bool = False) -> None:
        """Free what no work uses any more; with `wait`, all that was given back."""
        if not self._dropped and not self._leaving:
            return
        driver = self._driver
        lent = []  # what becomes of it is its owner's code, which runs without the lock
        with self._lock, driver.on(self._device):
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
                if isinstance(memory, Lent):
                    lent.append(memory)
                else:
                    driver.free(memory)
                for stream, event in marks:
                    if stream.handle:
                        stream.unmark(event)
                    else:
                        driver.event_free(event)
            self._leaving = still
        lent.clear()
