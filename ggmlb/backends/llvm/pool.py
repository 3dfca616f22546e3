"""Pool: the threads of a backend, the caller's and workers.

An idle worker polls for about a millisecond (longer than the usual pause between two graphs), then sleeps
until the next graph; waking it takes a tenth of a millisecond. No thread waits for a sleeping worker (see
`kernels.driver`).
"""

from __future__ import annotations

import ctypes
from _thread import allocate_lock
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ggmlb.backends.llvm.codegen.library import Library, function
from ggmlb.backends.llvm.kernels import driver
from ggmlb.interface.host import aligned_empty
from ggmlb.system.process import process_state, start_thread

SPINS = 40000
"""Number of polls of an idle worker before it sleeps; one takes about 25 ns."""


class Span(NamedTuple):
    """A range of steps as arguments of `driver.run`: an array, as ctypes takes 0.1 us per argument.

    Attributes:
        words: Control block, table of steps, first step, end (exclusive).
        address: Address of `words`.
    """

    words: npt.NDArray[np.int64]
    address: int


class Pool:
    """The calling thread and `n - 1` workers, started at first use, and again after a fork.

    Only one thread at a time may call it.
    """

    _workers: Sequence[_Worker] = ()  # for `__del__`, if `__init__` failed

    def __init__(self, n: int, library: Library) -> None:
        self.n = n
        self._library = library
        self._run = function(library.address(driver.run), 1)
        self._control = aligned_empty(driver.control_words(n) * 8).view(np.int64)
        self._ends = self._control[driver.STOP :][:1]  # `driver` may be unloaded at interpreter exit
        self._begin()

    def _begin(self) -> None:
        self._control[:] = 0
        self._control[driver.YIELD] = _address_of_yield()
        self._control[driver.THREADS] = self.n
        self._workers = []
        self._most = self.n
        self._n_forks = process_state.n_forks

    def span(self, table: int, first: int, last: int) -> Span:
        """Return steps `first` to `last - 1` of the array at address `table`, as an argument for `run`.

        Args:
            table: Address of the array of steps.
            first: The first step.
            last: End of the range (exclusive).
        """
        words = np.array([self._control.ctypes.data, table, first, last], np.int64)
        return Span(words, words.ctypes.data)

    def run(self, span: Span, share: bool) -> None:
        """Run a range of steps; `share`: whether the workers take part.

        Args:
            span: The steps, from this pool's `span`.
            share: Whether any step has several chunks.
        """
        if self._n_forks != process_state.n_forks:
            self._begin()  # threads do not survive a fork, and the control block may be inconsistent
        if share and self.n > 1:
            self._wake()
        self._run(span.address)

    def _wake(self) -> None:
        while len(self._workers) < min(self.n - 1, self._most):
            serve = function(self._library.address(driver.serve), 4)
            number = len(self._workers) + 1
            worker = _Worker(serve, self._control, number)
            if worker.thread is None:
                self._most = len(self._workers)  # do not try again at each graph
            else:
                self._workers = [*self._workers, worker]
        for worker in self._workers:
            if worker.sleeps:
                worker.sleeps = False
                worker.bell.release()

    def free(self) -> None:
        """End the worker threads, and wait until they have ended."""
        workers = self._workers if self._n_forks == process_state.n_forks else []
        self._end()
        for worker in workers:
            if worker.thread is not None:
                worker.thread.join()
        self._begin()

    def __del__(self) -> None:
        if self._workers:
            self._end()

    def _end(self) -> None:
        self._ends[0] = 1
        for worker in self._workers:
            worker.end()


def _address_of_yield() -> int:
    """The address of `sched_yield`; 0 where the system has none."""
    found = getattr(ctypes.pythonapi, "sched_yield", None)
    return 0 if found is None else ctypes.cast(found, ctypes.c_void_p).value or 0


class _Worker:
    """A worker thread: runs `driver.serve`, then sleeps until `bell` is released."""

    def __init__(self, serve: Any, control: npt.NDArray[np.int64], number: int) -> None:
        self._control = control  # kept alive while the thread reads it
        self._number = number
        self._serve = serve
        self.sleeps = False
        self.ends = False
        self.bell = allocate_lock()
        self.bell.acquire()
        self.thread = start_thread("ggmlb-llvm", self._work)

    def _work(self) -> None:
        address = self._control.ctypes.data
        while not self.ends:
            self._serve(address, self._number, SPINS, 0)
            self.sleeps = True
            if not self.ends:  # otherwise `end` may already have run, and nothing would release it
                self.bell.acquire()

    def end(self) -> None:
        """Make the thread end."""
        self.ends = True
        if self.sleeps:
            self.sleeps = False
            self.bell.release()
