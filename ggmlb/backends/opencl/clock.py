"""Times of commands from a profiling queue, on the host's clock."""

from __future__ import annotations

from time import perf_counter_ns
from typing import NamedTuple

import pyopencl as cl

from ggmlb.interface import Command

N_LOOKS = 5
"""Number of clock comparisons, of which the fastest is used."""


class _Look(NamedTuple):
    """Duration of a comparison, device time, and offset to the host's clock [ns]."""

    took: int
    at: int
    offset: int


class QueueClock:
    """Records commands of a profiling queue, and sets their times when the queue is idle."""

    def __init__(self, queue: cl.CommandQueue, commands: list[Command]) -> None:
        self._queue = queue
        self._commands = commands
        self._events: list[tuple[Command, cl.Event]] = []
        self._first = _look(queue)

    def note(self, name: str, event: cl.Event, is_copy: bool = False) -> None:
        """Add a command that was queued."""
        command = Command(name, is_copy)
        self._commands.append(command)
        self._events.append((command, event))

    def settle(self) -> None:
        """Set start and stop of the finished commands."""
        first, last = self._first, _look(self._queue)
        drift = (last.offset - first.offset) / max(last.at - first.at, 1)
        for command, event in self._events:
            times = event.profile
            command.start, command.stop = (
                at + first.offset + round((at - first.at) * drift) for at in (times.start, times.end)
            )


def _look(queue: cl.CommandQueue) -> _Look:
    """Read both clocks, as close in time as possible."""
    looks = []
    for _ in range(N_LOOKS):
        before = perf_counter_ns()
        marker = cl.enqueue_marker(queue)
        marker.wait()
        after = perf_counter_ns()
        at = marker.profile.end
        looks.append(_Look(after - before, at, (before + after) // 2 - at))
    return min(looks)
