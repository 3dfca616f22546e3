"""Command: a timed piece of work of a stream."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Command:
    """A piece of work of a stream, with its times.

    Attributes:
        name: Name of the computed or moved tensors.
        is_copy: Whether it only moved data.
        start: When it began [ns, on the clock of `time.perf_counter_ns`]; 0 until known.
        stop: When it ended [ns].
    """

    name: str
    is_copy: bool = False
    start: int = 0
    stop: int = 0
