"""Command: a piece of work that a stream did, and when."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Command:
    """A piece of work that a stream did.

    Attributes:
        name: What it computed or moved.
        is_copy: Whether it only moved data.
        start: When it began [ns, on the clock of `time.perf_counter_ns`]; 0 until known.
        stop: When it ended [ns].
    """

    name: str
    is_copy: bool = False
    start: int = 0
    stop: int = 0
