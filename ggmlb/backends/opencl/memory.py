"""MemoryLedger: counts a device's allocations, and releases memory when pending work is done."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ggmlb.backends.opencl.runtime import is_done

if TYPE_CHECKING:
    import pyopencl as cl


class MemoryLedger:
    """Counter of a device's memory, because OpenCL reports no free memory and overcommits.

    Buffers are released by any thread, and by the garbage collector at any point. Each change is one
    atomic operation on a dict or deque, so that no lock is needed.

    Attributes:
        total: The device's memory [bytes].
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self._tickets = itertools.count()
        self._sizes: dict[int, int] = {}
        self._leaving: deque[tuple[cl.Buffer | None, int, list[cl.Event]]] = deque()

    @property
    def free(self) -> int:
        """Free memory [bytes], including memory that pending work still uses."""
        self._sweep()
        return max(0, self.total - sum(list(self._sizes.values())))

    def take(self, nbytes: int) -> int:
        """Count an allocation; return its ticket for `give_back`."""
        ticket = next(self._tickets)
        self._sizes[ticket] = nbytes
        return ticket

    def give_back(self, memory: cl.Buffer | None, ticket: int, uses: Mapping[int, cl.Event]) -> None:
        """Release memory as soon as the commands that use it have ended."""
        self._leaving.append((memory, ticket, list(uses.values())))
        self._sweep()

    def _sweep(self) -> None:
        for _ in range(len(self._leaving)):
            try:
                leaving = self._leaving.popleft()
            except IndexError:  # another sweep has it
                return
            if all(map(is_done, leaving[2])):
                del self._sizes[leaving[1]]
            else:
                self._leaving.append(leaving)
