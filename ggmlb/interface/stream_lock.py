"""StreamLock: one thread at a time plans or computes on a backend."""

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

NESTED_TIMEOUT_S: Final = 5.0
"""How long a function called under one lock waits for another lock [s]."""


class _Thread(threading.local):
    """The locks that a thread holds, outermost first, and the lock that a worker thread works under."""

    within: tuple[StreamLock, ...] = ()
    works_under: StreamLock | None = None


_thread: Final = _Thread()


class StreamLock:
    """Lock of a backend, whose steps share scratch memory; re-entrant use raises instead of deadlocking.

    It is released when the work is queued or done. A user's function called under the lock must not use the
    same backend, in this thread or a worker thread. It may use another one, but waits for its lock only
    `NESTED_TIMEOUT_S`, because the holder may be waiting for this thread.
    """

    __slots__ = ("__weakref__", "_lock", "_within")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._within: tuple[StreamLock, ...] = ()
        _all.add(self)

    def run(self, owner: Freeable, work: Callable[[Arg], Result], arg: Arg) -> Result:
        """Call `work(arg)` while holding the lock of the backend `owner`.

        Raises:
            GraphError: The holder of the lock waits (or seems to wait) for this call.
            SystemExit: Python is exiting, in another thread.
        """
        within = _thread.within
        if not within and _thread.works_under is not None:
            within = _thread.works_under._within
        if not within:
            with self._lock:  # in its own `with`, which Ctrl-C cannot interrupt before the release
                return self._run(owner, work, arg, within)
        if self in within or not self._lock.acquire(timeout=NESTED_TIMEOUT_S):
            raise GraphError(
                f"{owner._title} is planning or computing, and waits for this call; give a custom op or "
                "callback that plans or computes a backend of its own"
            )
        try:
            return self._run(owner, work, arg, within)
        finally:
            self._lock.release()

    def _run(
        self, owner: Freeable, work: Callable[[Arg], Result], arg: Arg, within: tuple[StreamLock, ...]
    ) -> Result:
        before = _thread.within
        _thread.within = self._within = (*within, self)
        try:
            if process_state.ending_in:
                process_state.check_not_exiting(f"plan or compute on {owner._title}")
            return work(arg)
        finally:
            self._within, _thread.within = (), before

    @contextmanager
    def worker(self) -> Iterator[None]:
        """Context manager for a worker thread of the lock's holder: use of the backend raises there, too."""
        _thread.works_under = self
        try:
            yield
        finally:
            _thread.works_under = None


_all: Final[weakref.WeakSet[StreamLock]] = weakref.WeakSet()


def _release_lost_threads() -> None:
    """In a forked process, release the locks of threads that do not exist there."""
    for each in _all:
        if each not in _thread.within:
            each._lock, each._within = threading.Lock(), ()


after_fork(_release_lost_threads)
process_state.busy.append(lambda: any(each._lock.locked() for each in list(_all)))
