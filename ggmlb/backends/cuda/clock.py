"""The times of a stream's work, from events around it, on the host's clock."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter_ns
from typing import TYPE_CHECKING

from ggmlb.interface import Command

if TYPE_CHECKING:
    from ggmlb.backends.cuda.driver import Driver
    from ggmlb.backends.cuda.stream import Stream

N_LOOKS = 5
"""How often the two clocks are compared; the comparison that took the least time counts."""


class Clock:
    """Puts timed events around commands, and gives them their times when the stream is idle.

    CUDA tells the time between two events only, so all are measured from one whose time the host knows. The
    stream's device must be the current one.
    """

    def __init__(self, driver: Driver, stream: Stream, commands: list[Command]) -> None:
        self._driver = driver
        self._stream = stream
        self._commands = commands
        self._events: list[tuple[Command, int, int]] = []
        looks = [self._look() for _ in range(N_LOOKS)]
        best = min(looks)
        _, self._began, self._zero = best
        for look in looks:
            if look is not best:
                driver.event_free(look[2])

    @contextmanager
    def time(self, name: str, is_copy: bool = False) -> Iterator[None]:
        """Time what is queued within the block."""
        before = self._mark()
        yield
        command = Command(name, is_copy)
        self._commands.append(command)
        self._events.append((command, before, self._mark()))

    def settle(self) -> None:
        """Fill in when the commands, which have ended, began and ended."""
        driver = self._driver
        for command, before, after in self._events:
            command.start = self._began + round(driver.event_elapsed(self._zero, before) * 1e9)
            command.stop = self._began + round(driver.event_elapsed(self._zero, after) * 1e9)
            driver.event_free(before)
            driver.event_free(after)
        driver.event_free(self._zero)

    def _look(self) -> tuple[int, int, int]:
        """Return how long it took to see an event reached, the middle of that time, and the event."""
        before = perf_counter_ns()
        event = self._mark()
        self._driver.event_synchronize(event)
        after = perf_counter_ns()
        return after - before, (before + after) // 2, event

    def _mark(self) -> int:
        event = self._driver.event_new(timed=True)
        with self._stream.lock:
            self._driver.event_record(event, self._stream.handle)
        return event
