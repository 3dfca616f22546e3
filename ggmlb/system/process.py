"""Processors, threads, forks and exit of the process; guards for libraries that break at these."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable
from operator import index
from pathlib import Path
from threading import Thread, get_ident
from time import monotonic, sleep
from typing import Any, Final

from ggmlb.core.errors import ArgumentError, BackendError, kind_of

EXIT_TIMEOUT_S: Final = 5.0
"""How long the exit of the process waits for the work of other threads [s]."""


MAX_THREADS: Final = 512
"""Maximum number of threads of a backend (GGML_MAX_N_THREADS)."""


def n_cpus() -> int:
    """Return the number of processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def resident_nbytes() -> int | None:
    """Return the memory of this process that is resident [bytes]; `None` if unknown."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


def checked_n_threads(n: int) -> int:
    """Return a number of threads given by a user, after checking that it is a whole number in range.

    Raises:
        ArgumentError: It is not a whole number from 1 to `MAX_THREADS`.
    """
    try:
        number = index(n)
    except TypeError:
        raise ArgumentError(f"n_threads is {kind_of(n)}; give a whole number, 1 to {MAX_THREADS}") from None
    if not 1 <= number <= MAX_THREADS:
        raise ArgumentError(f"set_n_threads: {n} threads asked for; give 1 or more, at most {MAX_THREADS}")
    return number


def start_thread(name: str, work: Callable[..., object], *args: Any) -> Thread | None:
    """Start a daemon thread that calls `work(*args)`; return it, or `None` if the system refuses."""
    thread = Thread(target=work, args=args, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError:  # a limit on processes, or too little memory for a stack
        return None
    return thread


def after_fork(react: Callable[[], object]) -> None:
    """Register a function to call in each forked child process, before it continues."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=react)


class ProcessState:
    """Number of forks, and whether Python is exiting.

    At exit, Python stops daemon threads when they return from a library call. In some libraries, C++ then
    aborts the process, or OpenBLAS waits for threads that never end. Therefore daemon threads may not
    begin work once the exit has begun, and the exit waits for their current work.

    Attributes:
        n_forks: Number of forks from the first process to this one.
        ending_in: The thread in which Python exits; 0 until then.
        busy: Functions that return whether threads have work in progress.
    """

    def __init__(self) -> None:
        self.n_forks = 0
        self.ending_in = 0
        self.busy: list[Callable[[], bool]] = []
        after_fork(self._note_fork)
        atexit.register(self._end)

    def check_not_exiting(self, call: str) -> None:
        """End this thread silently, by SystemExit naming `call`, if Python is exiting in another thread.

        Raises:
            SystemExit: Python is exiting, in another thread.
        """
        if self.ending_in and self.ending_in != get_ident():
            raise SystemExit(f"{call}: Python is exiting and does not wait for this thread; join it first")

    def _note_fork(self) -> None:
        self.n_forks += 1

    def _end(self) -> None:
        self.ending_in = get_ident()
        deadline = monotonic() + EXIT_TIMEOUT_S
        while any(is_busy() for is_busy in self.busy) and monotonic() < deadline:
            sleep(0.0005)


process_state: Final = ProcessState()


class LibraryGuard:
    """Guard against calls of a library after a fork, or from a daemon thread while Python exits.

    GPU drivers do not survive a fork: a child that uses them hangs or crashes. The guard is created when a
    backend's module is imported, so a child may use it if the parent did not import it.

    Args:
        library: Its name, for the error.
    """

    def __init__(self, library: str) -> None:
        self._library = library
        self._n_forks = process_state.n_forks
        self._inside: list[int] = []
        process_state.busy.append(self._is_busy)

    def check(self, call: str) -> None:
        """Raise in a process forked after the library's first use, and in a daemon thread while Python exits.

        Raises:
            BackendError: The process was forked after the library was first used.
            SystemExit: Python is exiting, in another thread.
        """
        if self._n_forks != process_state.n_forks:
            raise BackendError(
                f"{call}: {self._library} was used before this process was forked and cannot be used here; "
                f"start workers with the 'spawn' method, or use {self._library} in the workers only"
            )
        process_state.check_not_exiting(call)

    def renew(self) -> None:
        """Allow the library in this forked process, if the parent loaded but did not use it."""
        self._n_forks = process_state.n_forks

    def enter(self, call: str) -> None:
        """Begin a section of library calls by this thread; errors as in `check`."""
        self._inside.append(get_ident())  # before the check, so that an exit that begins now waits for it
        try:
            self.check(call)
        except BaseException:
            self.leave()
            raise

    def leave(self) -> None:
        """End the section begun by `enter`."""
        self._inside.remove(get_ident())

    def _is_busy(self) -> bool:
        return bool(({*self._inside} - {get_ident()}) & sys._current_frames().keys())
