"""Turns: one thread at a time plans or computes on a backend, and nobody waits for who waits for them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock, get_ident
from typing import TYPE_CHECKING, Final, TypeVar

from ggmlb.core.errors import GraphError
from ggmlb.core.lifetime import Freeable
from ggmlb.system.process import after_fork, fate

if TYPE_CHECKING:
    Arg = TypeVar("Arg")
    Result = TypeVar("Result")

_waiting: Final[dict[int, Turns]] = {}
"""What each thread waits for that wants a turn."""

_helping: Final[dict[int, Turns]] = {}
"""For each thread that works for whoever has a turn: which."""


class Turns:
    """The turns at a backend: its steps share scratch memory, so that threads must take them.

    A turn ends when its work is queued, or done. A user's function that is called in a turn must not take one
    at the same backend, in this thread or in another that works for it: that is refused, and so is to wait
    for a thread that waits, by way of however many backends, for the one that asks.
    """

    __slots__ = ("__weakref__", "_holder", "_lock")

    def __init__(self) -> None:
        self._lock = Lock()
        self._holder = 0
        _all.add(self)

    def run(self, owner: Freeable, work: Callable[[Arg], Result], arg: Arg) -> Result:
        """Call `work(arg)` when nobody else has a turn.

        Raises:
            GraphError: Whoever has the turn waits for this call.
            BackendError: Python is ending, in another thread.
        """
        me = get_ident()
        _waiting[me] = self  # before one looks whether to wait: of two that do so at once, one sees the other
        try:
            if self._holder:
                self._check_wait(owner)
            # The lock's own `with`, which Ctrl-C cannot come in between.
            with self._lock:
                del _waiting[me]
                self._holder = me
                try:
                    if fate.ending_in:
                        fate.check_goes_on(f"plan or compute on {owner._title}")
                    return work(arg)
                finally:
                    self._holder = 0
        except BaseException:
            _waiting.pop(me, None)
            raise

    @contextmanager
    def helped(self) -> Iterator[None]:
        """Say that this thread works for whoever has a turn, who waits for it."""
        me = get_ident()
        _helping[me] = self
        try:
            yield
        finally:
            _helping.pop(me, None)

    def _check_wait(self, owner: Freeable) -> None:
        """Refuse to wait for who cannot go on before this thread does."""
        if not self._lock.locked():
            return  # Ctrl-C came before the last holder was forgotten
        stuck: set[int] = set()
        more = {get_ident()}
        while more:
            stuck |= more
            if self._holder in stuck:
                raise GraphError(
                    f"{owner._title} is in the middle of planning or computing, which waits for this call; "
                    "give a custom op or a callback that plans or computes a backend of its own"
                )
            more = {thread for thread, turns in list(_waiting.items()) if turns._holder in stuck}
            more |= {turns._holder for thread, turns in list(_helping.items()) if thread in stuck}
            more -= {0} | stuck


_all: Final[weakref.WeakSet[Turns]] = weakref.WeakSet()


def _free_of_lost_threads() -> None:
    """Let a forked process take the turns of threads that it does not have."""
    for turns in _all:
        if turns._holder != get_ident():
            turns._lock, turns._holder = Lock(), 0
    _waiting.clear()
    _helping.clear()


after_fork(_free_of_lost_threads)
fate.busy.append(lambda: any(turns._lock.locked() for turns in list(_all)))
