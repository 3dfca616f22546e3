"""BLAS limited to one thread during computations, which use the backend's own threads.

This also makes results reproducible: with several threads, BLAS divides products differently and rounds
differently.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from itertools import repeat
from threading import Lock
from types import TracebackType
from typing import Any

import threadpoolctl  # type: ignore[import-untyped]

from ggmlb.core.errors import BackendError
from ggmlb.system.process import after_fork


@cache
def _libraries() -> list[Any]:
    """The BLAS libraries loaded in this process, NumPy's among them."""
    try:
        found = threadpoolctl.ThreadpoolController().lib_controllers
    except OSError as error:
        raise BackendError(f"CPU: finding NumPy's BLAS, to limit its threads, failed: {error}") from error
    return [library for library in found if library.user_api == "blas"]


def _set(counts: Iterable[int]) -> list[int]:
    """Set the number of threads of each library; return the previous numbers."""
    before = []
    for library, n in zip(_libraries(), counts):  # noqa: B905 - the counts may go on
        before.append(library.get_num_threads())
        # Since 3.8, threadpoolctl ignores all threads but the first that set a number, unless cleared.
        forget = getattr(library, "clear_controlling_thread", lambda force: None)
        forget(force=True)
        library.set_num_threads(n)
        forget(force=True)
    return before


class _OneThread:
    """Context manager that sets BLAS to one thread, and restores it when the last concurrent user exits.

    The setting is process-wide, and restored for the caller's own use of NumPy.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._n_inside = 0
        self._before: list[int] = []
        after_fork(self._forget_threads)

    def __enter__(self) -> None:
        with self._lock:
            if not self._n_inside:
                self._before = _set(repeat(1))
            self._n_inside += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._n_inside = max(0, self._n_inside - 1)  # 0 if a step has forked this process
            if not self._n_inside:
                _set(self._before)

    def _forget_threads(self) -> None:
        """In a forked process: reset the count, as the threads that were inside do not exist there."""
        self._lock = Lock()
        if self._n_inside:
            self._n_inside = 0
            _set(self._before)


one_blas_thread = _OneThread()
