"""Estimated duration of a run, from the time of a few of its cases."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from time import perf_counter
from typing import Final

from ggmlb.testing.run import FamilyTask, Runner, worker_processes

N_TRIED: Final = 8
"""Number of cases tried for each device and mode."""
TRIAL_S: Final = 4.0
"""Time after which no more cases are tried [s]."""


def forecast_s(work: Sequence[FamilyTask], jobs: int = 1) -> float:
    """Estimate the time of all `work` in `jobs` processes [s], from a few cases of each device and mode.

    Cases differ, more so if compiled kernels are not cached. Results of the tried cases are ignored.

    Args:
        work: The tasks.
        jobs: Number of processes, for all modes except `perf`.
    """
    groups: dict[tuple[str, str], list[FamilyTask]] = defaultdict(list)
    for task in work:
        groups[task.device, task.mode].append(task)
    total_s = 0.0
    with Runner() as runner:
        for (name, mode), tasks in groups.items():
            start = perf_counter()
            if mode == "perf":
                runner.rates(runner.device(name))
            total_s += perf_counter() - start
            start, n = perf_counter(), 0
            for trial in _trials(tasks):
                list(runner.run(trial))
                n += 1
                if perf_counter() - start > TRIAL_S:
                    break
            took_s = (perf_counter() - start) / n * sum(len(task.ids) for task in tasks)
            total_s += took_s / (1 if mode == "perf" else jobs)
    return total_s


def forecast(work: Sequence[FamilyTask], jobs: int = 1) -> str:
    """Return the estimated duration of a run as text; with `jobs` above 1, try cases in another process."""
    if jobs <= 1:
        return about_minutes(forecast_s(work))
    try:
        with worker_processes(1) as pool:
            return about_minutes(pool.submit(forecast_s, work, jobs).result())
    except BrokenProcessPool:
        return "unknown, because a tried case ended its process"


def _trials(tasks: Sequence[FamilyTask]) -> Iterator[FamilyTask]:
    """Yield some cases, evenly distributed over the tasks, as tasks of one case."""
    cases = [(task, i) for task in tasks for i in task.ids]
    step = max(1, len(cases) // N_TRIED)
    for task, name in cases[step // 2 :: step][:N_TRIED]:
        yield replace(task, ids=(name,))


def about_minutes(seconds: float) -> str:
    """Format a duration as `"less than a minute"`, `"about 12 minutes"`, `"about 2.5 hours"`."""
    minutes = round(seconds / 60)
    if minutes < 1:
        return "less than a minute"
    if minutes < 100:
        return f"about {minutes} minute{'s' * (minutes > 1)}"
    return f"about {seconds / 3600:.1f} hours"
