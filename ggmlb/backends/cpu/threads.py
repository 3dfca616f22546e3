"""Threads that run lists of bound NumPy calls side by side; NumPy lets go of the GIL while it computes."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class Threads:
    """A pool of `n` threads, the caller's included; made when first used, and again after a fork."""

    def __init__(self, n: int) -> None:
        self.n = n
        self._pool: ThreadPoolExecutor | None = None
        self._pid = 0

    def run(self, lists: Sequence[Sequence[Callable[[], Any]]]) -> None:
        """Call the steps of each list in order, the lists at the same time; raise the first failure."""
        if self._pool is None or self._pid != os.getpid():
            self._pool = ThreadPoolExecutor(max(1, self.n - 1), "ggmlb-cpu")
            self._pid = os.getpid()
        futures = [self._pool.submit(_run, steps) for steps in lists[1:]]
        try:
            _run(lists[0])
        finally:
            errors = [f.exception() for f in futures]
        for error in errors:
            if error is not None:
                raise error

    def free(self) -> None:
        """End the threads."""
        if self._pool is not None and self._pid == os.getpid():
            self._pool.shutdown()
        self._pool = None


def _run(steps: Sequence[Callable[[], Any]]) -> None:
    # Each thread has NumPy's floating-point error state for itself.
    with np.errstate(all="ignore"):
        for step in steps:
            step()
