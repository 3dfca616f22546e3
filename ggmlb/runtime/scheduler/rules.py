"""What a scheduler assigns by, and the causes that it gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from ggmlb.interface import Backend, BufferType


@dataclass(frozen=True, slots=True)
class Rules:
    """What a scheduler assigns by.

    Attributes:
        backends: In order of priority, highest first.
        bufts: The memory each computes in.
        op_offload: Whether a device may take a node whose weight lies in host memory.
        strict: Whether a request that cannot be granted is an error.
        separate: Whether streams of one device compute in memory of their own each, so that one need not
            wait for another.
    """

    backends: Sequence[Backend]
    bufts: Sequence[BufferType]
    op_offload: bool = True
    strict: bool = False
    separate: bool = False


class Cause(str, Enum):
    """Why a tensor was given to a backend, with the pass that decided it."""

    USER = "set by the user"
    PLACED = "lies in the backend's memory"
    VIEW = "lies in the memory of its source"
    INPUT = "graph input: last backend"
    WEIGHT = "runs where its weight is"
    OFFLOAD = "offloaded: worth copying its weight"
    NEIGHBOUR = "follows the nodes around it"
    BEST = "most operands already there"
    UPGRADE = "same memory, higher priority"
    WRITES = "writes into memory that lies there"
    USED = "read by a node there"
    FIRST = "first backend that can run it"

    def __str__(self) -> str:
        return self.value
