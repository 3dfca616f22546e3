"""Progress of implicit long tasks, such as compiling kernels at first use.

    with progress.task("OpenCL0: compiling kernels", n_steps) as task:
        for kernel in missing:
            task.step(kernel.name)
            compile(kernel)

After one second, a line shows the progress, and at the end the duration: on standard error, if that is a
terminal, or in the output of a notebook. `GGMLB_PROGRESS=1` shows it elsewhere, too (a log);
`GGMLB_PROGRESS=0` never.

Not by rich, whose bars show nothing in a log and take 50 ms to import.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from time import perf_counter
from typing import Final

from ggmlb.core.errors import shown
from ggmlb.system import env, log

SHOW_AFTER_S: Final = 1.0
"""Duration below which a task shows nothing [s]."""


class Task:
    """A long task, made by the function `task`, whose progress is shown step by step.

    Attributes:
        n_done: Steps finished.
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
        self._is_notebook = in_notebook()
        self._live = self._is_notebook or (sys.stderr is not None and sys.stderr.isatty())
        self._is_enabled = env.flag("GGMLB_PROGRESS", default=self._live)

    def step(self, name: str) -> None:
        """Begin the step `name`, and show that name with the progress."""
        with self._lock:
            if self._name:
                self.n_done += 1
            self._name = name
            if self._shown and self._live:
                self._show()
        if self._is_enabled and self._timer is None:
            # A thread, because the first step may take many seconds.
            self._timer = threading.Timer(SHOW_AFTER_S, self._begin)
            self._timer.daemon = True
            with suppress(RuntimeError):  # no more threads: no progress is shown
                self._timer.start()

    def end(self) -> None:
        """Show the duration, if any progress was shown."""
        if self._timer is not None:
            self._timer.cancel()
        with self._lock:
            if self._name:
                n, took_s = self.n_done + 1, perf_counter() - self._start
                log.record("kernels", log.INFO, "%s: %d in %.1f s", self._what, n, took_s)
                if self._shown:
                    self._write(f"{self._what}: {n} in {took_s:.1f} s", "\n")
            self._is_enabled = False

    def _begin(self) -> None:
        with self._lock:
            if self._is_enabled:
                self._shown = True
                self._show()

    def _show(self) -> None:
        of = f" of {self._n_steps}" if self._n_steps else ""
        self._write(f"{self._what}: {self.n_done + 1}{of} ({self._name})", "" if self._live else "\n")

    def _write(self, line: str, end: str) -> None:
        """Write a line, over the last one on a terminal."""
        line = shown(line)
        if self._live:
            self._width, padding = len(line), " " * (self._width - len(line))
            line = f"\r{line}{padding}"
        stream = sys.stdout if self._is_notebook else sys.stderr  # notebooks show standard error as an error
        if stream is not None:
            stream.write(f"{line}{end}")
            stream.flush()


@contextmanager
def task(what: str, n_steps: int | None = None) -> Iterator[Task]:
    """Context manager of a task whose steps are shown if it takes more than a second.

    Args:
        what: Device and work, such as `"OpenCL0: compiling kernels"`.
        n_steps: Number of steps; `None` if unknown.
    """
    this = Task(what, n_steps)
    try:
        yield this
    finally:
        this.end()


def in_notebook() -> bool:
    """Whether standard output is that of a notebook's cell, where a line can be overwritten."""
    return type(sys.stdout).__module__ == "ipykernel.iostream"
