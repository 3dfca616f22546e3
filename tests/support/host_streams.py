"""Streams and events of the simulated driver: lists of work, done when something waits for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter


class HostError(RuntimeError):
    """What CUDA would report."""

    def __init__(self, text: str, status: int = 1) -> None:
        super().__init__(text)
        self.status = status


RECORD = "record"
"""The work that an event's record is: it is done a moment after all before it."""


@dataclass(slots=True)
class Op:
    """Work on a stream: what it is, how it is done, and the device memory it touches."""

    name: str
    run: Callable[[], object]
    addresses: tuple[int, ...] = ()


@dataclass(slots=True, eq=False)
class HostStream:
    device: int
    queue: list[Op] = field(default_factory=list)
    n_queued: int = 0
    n_done: int = 0
    captured: list[Op] | None = None
    ends: dict[int, float] = field(default_factory=lambda: {0: perf_counter()})

    def run_to(self, n: int) -> None:
        while self.n_done < n:
            op = self.queue.pop(0)
            self.n_done += 1
            op.run()
            self.ends[self.n_done] = perf_counter()

    def is_done(self, n: int) -> bool:
        """Whether work was done by now, as it is asked; what only records events is done a moment later."""
        answer = self.n_done >= n
        while self.queue and self.queue[0].name == RECORD:
            self.run_to(self.n_done + 1)
        return answer


@dataclass(slots=True)
class Point:
    """Where an event was recorded last."""

    stream: HostStream | None = None
    n: int = 0
    device: int = 0
    recorded: float = field(default_factory=lambda: perf_counter())  # by name: tests set the time

    def time(self) -> float:
        """When it was reached: not before the work queued before it ended, nor before it was recorded."""
        assert self.stream is not None
        return max(self.recorded, self.stream.ends[self.n])

    def run(self) -> None:
        """Do the work before it."""
        if self.stream is not None:
            self.stream.run_to(self.n)

    def is_reached(self) -> bool:
        return self.stream is None or self.stream.is_done(self.n)
