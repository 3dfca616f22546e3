"""Times of a stream's work from CUDA events, on the host's clock."""

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
"""Number of clock comparisons, of which the fastest is used."""

SPAN_NS = 1_000_000_000
"""Longest measured interval [ns], in which a float32 of milliseconds resolves 60 ns."""


class Clock:
    """Records timed events around commands, and sets their times when the stream is idle.

    CUDA measures only intervals between events, as float32 milliseconds: an hour to 0.25 ms. So events
    are measured from an anchor event at most about `SPAN_NS` before them, and anchors from the previous
    anchor. The first anchor, and any after an idle pause, has the host's time. The stream's device must
    be the current one.
    """

    def __init__(self, driver: Driver, stream: Stream, commands: list[Command]) -> None:
        self._driver = driver
        self._stream = stream
        self._commands = commands
        self._events: list[tuple[Command | None, int, int]] = []
        self._last = self._newest = 0
        self._add_anchor()

    @contextmanager
    def time(self, name: str, is_copy: bool = False) -> Iterator[None]:
        """Context manager that times the work queued in its block."""
        if perf_counter_ns() - self._last > SPAN_NS and self._driver.event_done(self._newest):
            self._add_anchor()
        before = self._mark()
        yield
        command = Command(name, is_copy)
        self._commands.append(command)
        self._newest = self._mark()
        self._events.append((command, before, self._newest))
        self._last = perf_counter_ns()

    def settle(self) -> None:
        """Set start and stop of the finished commands."""
        driver = self._driver
        anchor = at = 0
        for command, before, after in self._events:
            if command is None:
                anchor, at = before, after
                continue
            start = at + round(driver.event_elapsed(anchor, before) * 1e9)
            command.start, command.stop = start, start + round(driver.event_elapsed(before, after) * 1e9)
            if start - at > SPAN_NS:
                anchor, at = before, start
        for command, before, after in self._events:
            driver.event_free(before)
            if command is not None:
                driver.event_free(after)

    def _add_anchor(self) -> None:
        """Record an anchor with a known host time: no command, the event, and the time [ns]."""
        looks = [self._look() for _ in range(N_LOOKS)]
        best = min(looks)
        for look in looks:
            if look is not best:
                self._driver.event_free(look[2])
        self._newest = best[2]
        self._events.append((None, best[2], best[1]))
        self._last = perf_counter_ns()

    def _look(self) -> tuple[int, int, int]:
        """Record an event and wait for it; return the duration, the middle of the wait, and the event."""
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
