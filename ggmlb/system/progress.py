"""Progress of work that a user did not ask for by name, as compiling kernels at first use.

    with progress.task("OpenCL0: compiling kernels", n_steps) as task:
        for kernel in missing:
            task.step(kernel.name)
            compile(kernel)

Nothing is shown in the first second. Then a line on standard error tells what goes on, and at the end how
long it took, if standard error is a terminal or a notebook's. `GGMLB_PROGRESS=1` shows it elsewhere too,
as in a log; `GGMLB_PROGRESS=0` never.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from time import perf_counter
from typing import Final

from ggmlb.core.errors import shown
from ggmlb.system import env

PATIENCE_S: Final = 1.0
"""How long a task may take without a word [s]."""


class Task:
    """A task under way; see `task`.

    Attributes:
        n_done: Steps begun before the one under way.
    """

    def __init__(self, what: str, n_steps: int | None) -> None:
        self.n_done = 0
        self._what = what
        self._n_steps = n_steps
        self._name = ""
        self._start = perf_counter()
        self._shown = False
        self._width = 0
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None
        self._live = _is_live()
        self._told = env.flag("GGMLB_PROGRESS", default=self._live)

    def step(self, name: str) -> None:
        """Tell that a step of that name begins, which may take long."""
        with self._lock:
            if self._name:
                self.n_done += 1
            self._name = name
            if self._shown and self._live:
                self._show()
        if self._told and self._timer is None:
            # A thread, because a first step may last for many seconds.
            self._timer = threading.Timer(PATIENCE_S, self._begin)
            self._timer.daemon = True
            with suppress(RuntimeError):  # no more threads: nothing is told
                self._timer.start()

    def end(self) -> None:
        """Tell how long it took, if anything was told."""
        if self._timer is not None:
            self._timer.cancel()
        with self._lock:
            if self._shown:
                n = self.n_done + 1
                self._write(f"{self._what}: {n} in {perf_counter() - self._start:.1f} s", "\n")
            self._told = False

    def _begin(self) -> None:
        with self._lock:
            if self._told:
                self._shown = True
                self._show()

    def _show(self) -> None:
        of = f" of {self._n_steps}" if self._n_steps else ""
        self._write(f"{self._what}: {self.n_done + 1}{of} ({self._name})", "" if self._live else "\n")

    def _write(self, line: str, end: str) -> None:
        """Write a line over the last one, where there is a screen."""
        line = shown(line)
        if self._live:
            self._width, padding = len(line), " " * (self._width - len(line))
            line = f"\r{line}{padding}"
        stream = sys.stderr
        if stream is not None:
            stream.write(f"{line}{end}")
            stream.flush()


@contextmanager
def task(what: str, n_steps: int | None = None) -> Iterator[Task]:
    """Yield a task whose steps are told to the user if it takes more than a second.

    Args:
        what: Who does what, as `"OpenCL0: compiling kernels"`.
        n_steps: How many steps there will be, if that is known.
    """
    this = Task(what, n_steps)
    try:
        yield this
    finally:
        this.end()


def _is_live() -> bool:
    """Whether standard error is a screen, on which a line can be written over."""
    stream = sys.stderr
    return stream is not None and (stream.isatty() or type(stream).__module__ == "ipykernel.iostream")
