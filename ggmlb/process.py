"""The process: how many processors it may use, and libraries that a fork of it cannot go on using."""

from __future__ import annotations

import os

from ggmlb.errors import ArgumentError, BackendError


def n_cpus() -> int:
    """Return the number of processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def checked_n_threads(n: int) -> int:
    """Return a number of threads that a user asked for.

    Raises:
        ArgumentError: It is less than 1.
    """
    if n < 1:
        raise ArgumentError(f"set_n_threads: {n} threads asked for; give 1 or more")
    return n


class ForkGuard:
    """Knows whether this process was forked since a library came into use in it.

    Drivers of GPUs do not survive a fork: where a child uses them, it hangs or crashes. Made when a backend's
    module is imported, so a child that imports it first is free to use it.

    Args:
        library: Its name, for the error.
    """

    def __init__(self, library: str) -> None:
        self._library = library
        self._forked = False
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._note)

    def _note(self) -> None:
        self._forked = True

    def check(self, call: str) -> None:
        """Refuse a call in a forked process.

        Raises:
            BackendError: The process was forked after the library came into use.
        """
        if self._forked:
            raise BackendError(
                f"{call}: {self._library} was used before this process was forked, and cannot be used in it; "
                f"start workers with the 'spawn' method, or use {self._library} in the workers only"
            )
