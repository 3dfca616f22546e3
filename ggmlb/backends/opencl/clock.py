"""The times of commands, from a queue that keeps them, on the host's clock."""

from __future__ import annotations

from time import perf_counter_ns
from typing import NamedTuple

import pyopencl as cl

from ggmlb.interface import Command

N_LOOKS = 5
"""How often the two clocks are compared; the comparison that took the least time counts."""


class _Look(NamedTuple):
    """How long it took to read both clocks, the device's time, and what to add to get the host's [ns]."""

    took: int
    at: int
    offset: int


class Clock:
    """Notes commands of a profiling queue, and gives them their times when the queue is idle."""

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
        """Fill in when the commands, which have ended, began and ended."""
        first, last = self._first, _look(self._queue)
        drift = (last.offset - first.offset) / max(last.at - first.at, 1)
        for command, event in self._events:
            times = event.profile
            command.start, command.stop = (
                at + first.offset + round((at - first.at) * drift) for at in (times.start, times.end)
            )


def _look(queue: cl.CommandQueue) -> _Look:
    """Read both clocks, as close to each other as can be."""
    looks = []
    for _ in range(N_LOOKS):
        before = perf_counter_ns()
        marker = cl.enqueue_marker(queue)
        marker.wait()
        after = perf_counter_ns()
        at = marker.profile.end
        looks.append(_Look(after - before, at, (before + after) // 2 - at))
    return min(looks)
