"""Workspace: the scratch memory of a backend, shared by the steps of all its plans."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np

Array = Any
"""A NumPy array."""

_ALIGNMENT = 64
_LEAST = 1 << 20


class Workspace:
    """Allocator of a backend's scratch arrays; nodes, which run in order, use the same memory in turn.

    The steps of a backend run in order, so nodes and plans can share scratch. Memory that is too small is
    replaced; plans that bound parts of it keep it alive.

    Args:
        allocate: Returns a flat uint8 array of a number of bytes, aligned to 64.
    """

    def __init__(self, allocate: Callable[[int], Array]) -> None:
        self._allocate = allocate
        self._memory = allocate(0)
        self._used = 0

    @property
    def nbytes(self) -> int:
        """Size of the memory from which scratch is taken [bytes]."""
        return int(self._memory.size)

    def restart(self) -> None:
        """Make all of the workspace's memory available again."""
        self._used = 0

    def take(self, shape: tuple[int, ...], dtype: Any = np.float32) -> Array:
        """Return a C-contiguous scratch array of undefined contents, valid until the next `restart`."""
        dtype = np.dtype(dtype)
        n = prod(shape) * dtype.itemsize
        memory, start = self.reserve(n)
        return memory[start : start + n].view(dtype).reshape(shape)

    def reserve(self, n: int) -> tuple[Array, int]:
        """Reserve `n` bytes of scratch until the next `restart`; return the memory and their offset."""
        if self._used + n > self._memory.size:
            try:
                self._memory = self._allocate(max(n, 2 * self._memory.size, _LEAST))
            except MemoryError:  # the reserve for later nodes is optional
                self._memory = self._allocate(n)
            self._used = 0
        start = self._used
        self._used = -(-(start + n) // _ALIGNMENT) * _ALIGNMENT
        return self._memory, start
