"""Threads: parallel execution of lists of NumPy calls, which release the GIL."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import numpy as np

from ggmlb.interface.stream_lock import StreamLock
from ggmlb.system.process import process_state, start_thread

if TYPE_CHECKING:
    Steps = Sequence[Callable[[], Any]]


class Threads:
    """The calling thread and `n - 1` workers, started at first use, and again after a fork.

    A pair of queues wakes a thread in about half the time that an executor of the standard library takes;
    the work is short enough for this to count.

    Args:
        n: Threads, the caller's included.
        lock: The lock of the backend, held by the caller of `run`.
    """

    def __init__(self, n: int, lock: StreamLock | None = None) -> None:
        self.n = n
        self._stream_lock = lock or StreamLock()
        self._begin()

    def run(self, lists: Sequence[Steps]) -> None:
        """Run lists of calls on the threads, each list in order; raise the first exception.

        Each free thread takes the next list, so that a late thread delays no other.
        """
        if self._n_forks != process_state.n_forks:
            self._begin()  # threads do not survive a fork
        n = self._start(min(self.n, len(lists)) - 1)
        rest = iter(lists)
        failures: list[BaseException | None] = []
        try:
            for _ in range(n):
                self._work.put(rest)
            try:
                _run(rest)
            except BaseException as error:
                failures.append(error)
                for _ in rest:  # start no more lists, but wait for those that run: they use memory
                    pass
            failures += [self._done.get() for _ in range(n)]
        except BaseException:  # an interrupt: the queues are out of step
            self.free()
            raise
        failure = next(filter(None, failures), None)
        if failure is not None:
            try:
                raise failure
            finally:
                del failure, failures  # this frame is in their traceback

    def free(self) -> None:
        """Stop the threads when their work is done; a later `run` starts new ones."""
        for _ in range(self._n_started):
            self._work.put(None)
        self._begin()

    def __del__(self) -> None:
        for _ in range(self._n_started):
            self._work.put(None)

    def _begin(self) -> None:
        self._work: SimpleQueue[Iterator[Steps] | None] = SimpleQueue()
        self._done: SimpleQueue[BaseException | None] = SimpleQueue()
        self._n_started = 0
        self._most = self.n
        self._n_forks = process_state.n_forks

    def _start(self, n: int) -> int:
        """Start missing threads; return how many of `n` are running."""
        while self._n_started < min(n, self._most):
            if start_thread("ggmlb-cpu", _serve, self._work, self._done, self._stream_lock) is None:
                self._most = self._n_started  # do not try again at each node
            else:
                self._n_started += 1
        return min(n, self._n_started)


def _serve(
    work: SimpleQueue[Iterator[Steps] | None], done: SimpleQueue[BaseException | None], lock: StreamLock
) -> None:
    with lock.worker(), np.errstate(all="ignore"):  # the state is each thread's own
        while (lists := work.get()) is not None:
            try:
                _run(lists)
            except BaseException as error:
                done.put(error)
            else:
                done.put(None)


def _run(lists: Iterator[Steps]) -> None:
    for steps in lists:
        for step in steps:
            step()
