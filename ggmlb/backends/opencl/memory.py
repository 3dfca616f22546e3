"""What is allocated on a device, and memory that is given back when pending work is done with it."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ggmlb.backends.opencl.runtime import is_done

if TYPE_CHECKING:
    import pyopencl as cl


class MemoryLedger:
    """Counts a device's memory: OpenCL itself does not tell what is free, and lends more than there is.

    Buffers are given back by any thread, and by the garbage collector in the middle of anything: each change
    is a single step on a dict or a deque, so that no lock is needed.

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
        """Bytes not allocated, those that pending work still holds not counted."""
        self._sweep()
        return max(0, self.total - sum(list(self._sizes.values())))

    def take(self, nbytes: int) -> int:
        """Note an allocation; return the ticket to give it back by."""
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
