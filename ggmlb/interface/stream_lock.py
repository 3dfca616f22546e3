"""Turns: one thread at a time plans or computes on a backend."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, TypeVar

from ggmlb.core.errors import GraphError
from ggmlb.core.lifetime import Freeable
from ggmlb.system.process import after_fork, process_state

if TYPE_CHECKING:
    Arg = TypeVar("Arg")
    Result = TypeVar("Result")

PATIENCE_S: Final = 5.0
"""How long a function called in a turn waits for a turn at another backend [s]."""


class _Thread(threading.local):
    """The turns of a thread, the outermost first; a helper has the turns it works in."""

    within: tuple[Turns, ...] = ()
    helps: Turns | None = None


_thread: Final = _Thread()


class Turns:
    """Lock of a backend, because its steps share scratch memory; re-entrant use raises.

    A turn ends when its work is queued or done. A user's function called in a turn must not take another
    at the same backend, in this thread or a helper thread. It may take one at another backend, but waits
    only some seconds for it, because the holder of that turn may be waiting for this thread.
    """

    __slots__ = ("__weakref__", "_lock", "_within")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._within: tuple[Turns, ...] = ()
        _all.add(self)

    def run(self, owner: Freeable, work: Callable[[Arg], Result], arg: Arg) -> Result:
        """Call `work(arg)` when no other thread has a turn.

        Raises:
            GraphError: The holder of the turn waits (or seems to wait) for this call.
            SystemExit: Python is exiting, in another thread.
        """
        within = _thread.within
        if not within and _thread.helps is not None:
            within = _thread.helps._within
        if not within:
            with self._lock:  # its own `with`, which Ctrl-C cannot come in between
                return self._run(owner, work, arg, within)
        if self in within or not self._lock.acquire(timeout=PATIENCE_S):
            raise GraphError(
                f"{owner._title} is in the middle of planning or computing, which waits for this call; give "
                "a custom op or callback that plans or computes a backend of its own"
            )
        try:
            return self._run(owner, work, arg, within)
        finally:
            self._lock.release()

    def _run(
        self, owner: Freeable, work: Callable[[Arg], Result], arg: Arg, within: tuple[Turns, ...]
    ) -> Result:
        before = _thread.within
        _thread.within = self._within = (*within, self)
        try:
            if process_state.ending_in:
                process_state.check_goes_on(f"plan or compute on {owner._title}")
            return work(arg)
        finally:
            self._within, _thread.within = (), before

    @contextmanager
    def helped(self) -> Iterator[None]:
        """Context manager in which this thread works for the holder of the turn."""
        _thread.helps = self
        try:
            yield
        finally:
            _thread.helps = None


_all: Final[weakref.WeakSet[Turns]] = weakref.WeakSet()


def _free_of_lost_threads() -> None:
    """In a forked process, release the turns of threads that do not exist there."""
    for turns in _all:
        if turns not in _thread.within:
            turns._lock, turns._within = threading.Lock(), ()


after_fork(_free_of_lost_threads)
process_state.busy.append(lambda: any(turns._lock.locked() for turns in list(_all)))
