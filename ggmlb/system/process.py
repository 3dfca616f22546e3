"""The process: how many processors it may use, its forks and its end, and libraries that survive neither."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable
from operator import index
from threading import Thread, get_ident
from time import monotonic, sleep
from typing import Any, Final

from ggmlb.core.errors import ArgumentError, BackendError, kind_of

PATIENCE_S: Final = 5.0
"""How long the end of the process waits for what other threads have under way [s]."""


MAX_THREADS: Final = 512
"""Threads that a backend may have (GGML_MAX_N_THREADS)."""


def n_cpus() -> int:
    """Return the number of processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def checked_n_threads(n: int) -> int:
    """Return a number of threads that a user asked for.

    Raises:
        ArgumentError: It is no whole number, less than 1, or more than `MAX_THREADS`.
    """
    try:
        number = index(n)
    except TypeError:
        raise ArgumentError(f"n_threads is {kind_of(n)}; give a whole number, 1 to {MAX_THREADS}") from None
    if not 1 <= number <= MAX_THREADS:
        raise ArgumentError(f"set_n_threads: {n} threads asked for; give 1 or more, at most {MAX_THREADS}")
    return number


def start_thread(name: str, work: Callable[..., object], *args: Any) -> Thread | None:
    """Start a thread that nobody joins at the end of Python; `None` where the system gives none."""
    thread = Thread(target=work, args=args, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError:  # a limit of the user's processes or of the container, or no room for a stack
        return None
    return thread


def after_fork(react: Callable[[], object]) -> None:
    """Call a function in each process that is forked from this one, before it goes on."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=react)


class ProcessState:
    """What becomes of this process.

    At its end, Python stops the threads that nobody joins (daemons) where they stand, as soon as they come
    back from a library. Some libraries do not bear that: C++ then aborts the process, and OpenBLAS waits for
    threads that never end. So no such thread begins anything once the end has begun, and what they have
    under way is waited for.

    Attributes:
        n_forks: How many forks there were on the way from the first process to this one.
        ending_in: The thread in which Python ends; 0 until then.
        busy: Each says whether threads have something under way.
    """

    def __init__(self) -> None:
        self.n_forks = 0
        self.ending_in = 0
        self.busy: list[Callable[[], bool]] = []
        self._refused: set[int] = set()
        after_fork(self._note_fork)
        atexit.register(self._end)

    def check_goes_on(self, call: str) -> None:
        """Refuse to begin anything in a thread that the end of Python stops.

        Raises:
            BackendError: Python is ending, in another thread.
        """
        if self.ending_in and self.ending_in != get_ident():
            self._refused.add(get_ident())
            raise BackendError(
                f"{call}: Python is ending, and does not wait for this thread; join it before that"
            )

    def _note_fork(self) -> None:
        self.n_forks += 1

    def _end(self) -> None:
        self.ending_in = get_ident()
        tell, threading.excepthook = threading.excepthook, lambda args: self._tell(args, tell)
        deadline = monotonic() + PATIENCE_S
        while any(is_busy() for is_busy in self.busy) and monotonic() < deadline:
            sleep(0.0005)

    def _tell(self, args: threading.ExceptHookArgs, tell: Callable[[threading.ExceptHookArgs], Any]) -> None:
        """Let a thread that was refused end as quietly as Python would have ended it."""
        if args.thread is None or args.thread.ident not in self._refused:
            tell(args)


process_state: Final = ProcessState()


class LibraryGuard:
    """Watches over the calls of a library that survives neither a fork nor the end of a thread within it.

    Drivers of GPUs do not survive a fork: where a child uses them, it hangs or crashes. The guard is made
    when a backend's module is imported, so a child that imports it first is free to use it.

    Args:
        library: Its name, for the error.
    """

    def __init__(self, library: str) -> None:
        self._library = library
        self._n_forks = process_state.n_forks
        self._inside: list[int] = []
        process_state.busy.append(self._is_busy)

    def check(self, call: str) -> None:
        """Refuse a call in a forked process, and in a thread that the end of Python stops.

        Raises:
            BackendError: The process was forked after the library came into use, or ends.
        """
        if self._n_forks != process_state.n_forks:
            raise BackendError(
                f"{call}: {self._library} was used before this process was forked, and cannot be used in it; "
                f"start workers with the 'spawn' method, or use {self._library} in the workers only"
            )
        process_state.check_goes_on(call)

    def enter(self, call: str) -> None:
        """Note that this thread calls the library until it says `leave`; refuses as `check` does."""
        self._inside.append(get_ident())  # before one looks whether Python is ending, which then looks here
        try:
            self.check(call)
        except BackendError:
            self.leave()
            raise

    def leave(self) -> None:
        """Note the end of calls."""
        self._inside.remove(get_ident())

    def _is_busy(self) -> bool:
        return bool(({*self._inside} - {get_ident()}) & sys._current_frames().keys())
