"""What is allocated on a device, and memory that is given back when pending work is done with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ggmlb.backends.opencl.runtime import is_done

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pyopencl as cl


class MemoryLedger:
    """Counts a device's memory: OpenCL itself does not tell what is free, and lends more than there is.

    Attributes:
        total: The device's memory [bytes].
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self._used = 0
        self._leaving: list[tuple[cl.Buffer | None, int, list[cl.Event]]] = []

    @property
    def free(self) -> int:
        """Bytes not allocated, those that pending work still holds not counted."""
        self._sweep()
        return max(0, self.total - self._used)

    def take(self, nbytes: int) -> None:
        """Note an allocation."""
        self._used += nbytes

    def give_back(self, memory: cl.Buffer | None, nbytes: int, uses: Mapping[int, cl.Event]) -> None:
        """Release memory as soon as the commands that use it have ended."""
        self._leaving.append((memory, nbytes, list(uses.values())))
        self._sweep()

    def _sweep(self) -> None:
        still: list[tuple[cl.Buffer | None, int, list[cl.Event]]] = []
        for memory, nbytes, uses in self._leaving:
            if all(map(is_done, uses)):
                self._used -= nbytes
            else:
                still.append((memory, nbytes, uses))
        self._leaving = still
