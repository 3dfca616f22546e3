"""Libraries that compute the same program by turns, each in a process of its own.

Neither's idle threads disturb the other so. The script that is run has `LIBRARIES`, classes by name that are
made of a case and a number of threads, with `run`, `values` and `close`; and `CASES`, with `op`, `what`,
`build` and `nmse`. `environments()` may return what a library's process needs besides. With one thread its
processor time is measured, which other work on the machine disturbs least.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

TURN_S = 0.15
"""How long a library computes before the other one has its turn; at least one call."""
SETTLE_S = 0.02
"""Threads of OpenMP wait by spinning for some milliseconds after the last call."""


def arguments(doc: str, rounds: int, threads: int = 2) -> argparse.ArgumentParser:
    """Return the arguments that the scripts of libraries by turns share."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--threads", type=int, default=threads)
    parser.add_argument("--ops", default="", help="names of ops; nothing is saved")
    return parser


class Players:
    """The processes of a script's libraries; a context manager that ends them.

    Attributes:
        load: Of the machine, of one minute, before and after each case.
    """

    def __init__(self, script: str, threads: int) -> None:
        # Read by BLAS and OpenMP when the processes start.
        os.environ.update(OMP_NUM_THREADS=str(threads), OPENBLAS_NUM_THREADS=str(threads))
        context = multiprocessing.get_context("spawn")
        module = Path(script).stem
        self.load = [os.getloadavg()[0]]
        self._cases = importlib.import_module(module).CASES
        self._pipes: dict[str, Any] = {}
        self._processes = []
        environments = getattr(importlib.import_module(module), "environments", dict)()
        for name in importlib.import_module(module).LIBRARIES:
            self._pipes[name], other = context.Pipe()
            process = context.Process(target=_play, args=(module, name, threads, other), daemon=True)
            usual = dict(os.environ)
            os.environ.update(environments.get(name, {}))
            process.start()
            os.environ.clear()
            os.environ.update(usual)
            self._processes.append(process)

    def measured(
        self, args: argparse.Namespace, numbers: Iterable[int] | None = None
    ) -> Iterator[tuple[Any, dict[str, list[float]], float]]:
        """Yield each case, seconds per call of each library by rounds, and the greatest error.

        Args:
            args: Those of `arguments`.
            numbers: Of the cases; all by default.
        """
        chosen = args.ops.split(",") if args.ops else ()
        for number in range(len(self._cases)) if numbers is None else numbers:
            case = self._cases[number]
            if not chosen or case.op in chosen:
                yield case, *self._measure(number, args.rounds)
                self.load.append(os.getloadavg()[0])

    @property
    def loads(self) -> str:
        """The least and the greatest load."""
        return f"{min(self.load):.1f} to {max(self.load):.1f}"

    def _measure(self, number: int, rounds: int) -> tuple[dict[str, list[float]], float]:
        for pipe in self._pipes.values():  # at the same time: nothing is measured yet
            pipe.send(("build", number))
        *ours, theirs = [pipe.recv() for pipe in self._pipes.values()]
        nmse = max(error(self._cases[number], values, theirs) for values in ours)
        seconds: dict[str, list[float]] = {name: [] for name in self._pipes}
        for i in range(rounds):
            # Whoever goes first in one round goes last in the next.
            for name in list(self._pipes)[:: 1 if i % 2 else -1]:
                time.sleep(SETTLE_S)
                self._pipes[name].send(("time", None))
                seconds[name].append(self._pipes[name].recv())
        return seconds, nmse

    def __enter__(self) -> Players:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            return  # they end with this process
        for pipe in self._pipes.values():
            pipe.send(None)
        for process in self._processes:
            process.join()


def _play(module: str, name: str, threads: int, pipe: Connection) -> None:
    """Answer `("build", number)` with the values, `("time", None)` with seconds per call."""
    cases = importlib.import_module(module)
    program = None
    while (task := pipe.recv()) is not None:
        what, argument = task
        if what == "build":
            if program is not None:
                program.close()
            program = cases.LIBRARIES[name](cases.CASES[argument], threads)
            program.run()
            pipe.send(program.values())
        else:
            pipe.send(min(turn(program.run, time.thread_time if threads == 1 else time.perf_counter)))


def turn(run: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> Iterator[float]:
    """Yield the times of a turn's calls [s]."""
    end = time.perf_counter() + TURN_S
    while time.perf_counter() < end:
        start = clock()
        run()
        yield clock() - start


def best_s(call: Callable[[], object], rounds: int, clock: Callable[[], float] = time.perf_counter) -> float:
    """Return the least time of some calls [s]."""
    times = []
    for _ in range(rounds):
        start = clock()
        call()
        times.append(clock() - start)
    return min(times)


def error(case: Any, ours: Any, theirs: Any) -> float:
    """The normalised mean squared error; ends the run if it is too great."""
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        raise SystemExit(
            f"{case.op} {case.what}: {ours.shape} {ours.dtype}, ggml {theirs.shape} {theirs.dtype}"
        )
    x, y = ours.astype(np.float64), theirs.astype(np.float64)
    nmse = float(((x - y) ** 2).sum() / max((y**2).sum(), 1e-30))
    if not nmse <= case.nmse:
        raise SystemExit(f"{case.op} {case.what}: NMSE {nmse:.2e}, allowed are {case.nmse:.0e}")
    return nmse
