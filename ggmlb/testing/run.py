"""Runner of the kit: selection of cases and devices, worker processes."""

from __future__ import annotations

import atexit
import re
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing import active_children, get_context
from time import sleep
from typing import TYPE_CHECKING, Final

from ggmlb.core.errors import ArgumentError, did_you_mean
from ggmlb.interface import Device
from ggmlb.testing import gradients, perf
from ggmlb.testing.behaviour import CHECKS, behaves
from ggmlb.testing.cases import FAMILIES, cases_of
from ggmlb.testing.compute import Bench, refusal
from ggmlb.testing.devices import device_named, weight_memories
from ggmlb.testing.failure import program_of, run_again
from ggmlb.testing.results import CaseResult, Outcome

if TYPE_CHECKING:
    from ggmlb.testing.cases import KitCase

MODES: Final = ("test", "support", "grad", "perf", "behaviour")
ALL: Final = ("behaviour", "test", "support", "grad", "perf")
"""All modes, in the order of a run: behaviour first, a common cause of wrong values."""

PRODUCTS: Final = ("mul_mat", "mul_mat_id", "get_rows", "add")
WITH_WEIGHTS: Final = {"behaviour": (), "grad": ("mul_mat",)}
"""Families whose first operand is also placed in each buffer type for weights, by mode; else `PRODUCTS`."""


@dataclass(frozen=True, slots=True)
class Selection:
    """Which cases to run: a mode, ops, a pattern of case ids, and a limit per family.

    Attributes:
        mode: One of `MODES`.
        ops: Names of ops, functions or families, in any case; all if empty.
        pattern: Regular expression to find in the id.
        limit: Most cases of a family, of which the first differ most; 0 for no limit.
    """

    mode: str = "test"
    ops: tuple[str, ...] = ()
    pattern: str = ""
    limit: int = 0

    def __post_init__(self) -> None:
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise ArgumentError(
                f"the pattern {self.pattern!r} is not a regular expression: {error}"
            ) from error
        known = known_ops(self.mode)
        for op in self.ops:
            if op.lower() not in known:
                raise ArgumentError(
                    f"no op {op!r} in mode {self.mode}{did_you_mean(op.lower(), sorted(known))}"
                )


@dataclass(frozen=True, slots=True)
class FamilyTask:
    """The cases of one family on one device: the unit of work of a process.

    Attributes:
        memory: Name of the buffer type of the op's first operand; the device's own if empty.
    """

    device: str
    mode: str
    family: str
    ids: tuple[str, ...]
    memory: str = ""


def tasks(device: Device, selection: Selection) -> list[FamilyTask]:
    """Return a device's tasks: the selected cases of each family with weights in each buffer type."""
    found = []
    with_weights = WITH_WEIGHTS.get(selection.mode, PRODUCTS)
    memories = [buft.name for buft in weight_memories(device)] if with_weights else []
    for family in _names(selection.mode):
        for memory in ("", *memories) if family in with_weights else ("",):
            named = names_of(selection.mode, family, memory)
            ids = [i for i, of in named if _wanted(selection, {family.lower(), *of})]
            ids = [i for i in ids if re.search(selection.pattern, i)]
            if selection.limit:
                ids = ids[: selection.limit]
            if ids:
                found.append(FamilyTask(device.name, selection.mode, family, tuple(ids), memory))
    return found


def declined_as_a_whole(device: Device, task: FamilyTask) -> str:
    """Return why a device declines all cases of a task of several; empty if it takes one."""
    if task.mode not in ("test", "support") or task.memory or len(task.ids) < 2:
        return ""
    chosen, why = set(task.ids), ""
    for case in cases_of(task.family):
        if case.id in chosen:
            try:
                why = refusal(device, case.program.case(case.id).build()) or ""
            except Exception:  # which its case reports
                return ""
            if not why:
                return ""
    return why


def selections(modes: Sequence[str], ops: Sequence[str], pattern: str, limit: int) -> list[Selection]:
    """Return a selection for each mode, of those of `ops` that it knows; `pattern` and `limit` filter cases.

    Raises:
        ArgumentError: There is no such mode, no mode knows an op, or the pattern is invalid.
    """
    known = {mode: known_ops(mode) for mode in modes}
    everywhere = set().union(*known.values())
    for op in ops:
        if op.lower() not in everywhere:
            where = " or ".join(modes)
            raise ArgumentError(f"no op {op!r} in mode {where}{did_you_mean(op.lower(), sorted(everywhere))}")
    found = []
    for mode in modes:
        chosen = tuple(op for op in ops if op.lower() in known[mode])
        if chosen or not ops:
            found.append(Selection(mode, chosen, pattern, limit))
    return found


def names_of(mode: str, family: str, memory: str = "") -> Iterator[tuple[str, frozenset[str]]]:
    """Yield each case's id in a family, and op names that select it; `memory`: weights' buffer type."""
    if mode == "behaviour":
        yield from ((name, frozenset({name})) for name in CHECKS[family])
    else:
        cases = _perf_cases if mode == "perf" else _cases
        yield from ((case.id, case.ops) for case in cases(family, memory))


def _cases(family: str, memory: str) -> Iterator[KitCase]:
    return (case.within(memory) if memory else case for case in cases_of(family))


def _perf_cases(family: str, memory: str) -> Iterator[perf.PerfCase]:
    return (case.within(memory) if memory else case for case in perf.CASES if case.family == family)


def known_ops(mode: str) -> set[str]:
    """Return the names of ops that select cases of a mode.

    Raises:
        ArgumentError: There is no such mode.
    """
    if mode not in MODES:
        raise ArgumentError(f"no mode {mode!r}{did_you_mean(mode, MODES)}")
    alike = [mode] if mode == "behaviour" else [mode, "test"]  # an op may have no size in mode perf
    return {name for of in alike for names in _names(of).values() for name in names}


def _names(mode: str) -> dict[str, set[str]]:
    """Return the names that select cases, by family."""
    families = {
        "behaviour": list(CHECKS),
        "perf": list(dict.fromkeys(c.family for c in perf.CASES)),
        "grad": [family for family in FAMILIES if family in gradients.FAMILIES],
    }
    return {
        family: {family.lower()}.union(*(of for _, of in names_of(mode, family)))
        for family in families.get(mode, FAMILIES)
    }


def _wanted(selection: Selection, names: set[str]) -> bool:
    return not selection.ops or any(op.lower() in names for op in selection.ops)


class Runner:
    """Runs tasks on devices, with a stream on each. A context manager, which frees them on exit.

    Args:
        devices: Devices by name that are not in the registry (a test's own).
        keep_errors: Whether results of failures have the exception, whose traceback holds device memory.
    """

    def __init__(self, devices: Iterable[Device] = (), *, keep_errors: bool = False) -> None:
        self._keep_errors = keep_errors
        self._devices = {device.name: device for device in devices}
        self._benches: dict[str, Bench] = {}
        self._gradients: dict[str, gradients.GradientBench] = {}
        self._rates: dict[str, perf.PeakRates] = {}

    def run(self, task: FamilyTask) -> Iterator[CaseResult]:
        """Run the cases of a task; yield each result.

        Raises:
            BackendBroken: The device opens no stream.
        """
        for result in self._run(task):
            if result.outcome is not Outcome.FAILED:
                yield result
                continue
            error = result.error if self._keep_errors else None
            yield replace(result, error=error, program=_program(task, result))

    def _run(self, task: FamilyTask) -> Iterator[CaseResult]:
        device = self.device(task.device)
        if task.mode == "behaviour":
            yield from (behaves(device, task.family, name) for name in task.ids)
        elif task.mode == "perf":
            rates, chosen = self.rates(device), set(task.ids)
            cases = _perf_cases(task.family, task.memory)
            yield from (perf.measure(device, case, rates) for case in cases if case.id in chosen)
        else:
            run, chosen = self._run_of(device, task.mode), set(task.ids)
            yield from (run(case) for case in _cases(task.family, task.memory) if case.id in chosen)

    def device(self, name: str) -> Device:
        """Return a device by its name (`device_named`).

        Raises:
            ArgumentError, BackendError, RegistryError: There is no such device, or it cannot be used.
        """
        if name not in self._devices:
            self._devices[name] = device_named(name)
        return self._devices[name]

    def rates(self, device: Device) -> perf.PeakRates:
        """Return the peak rates of a device for mode `perf`, measured once."""
        if device.name not in self._rates:
            self._rates[device.name] = perf.measure_rates(device)
        return self._rates[device.name]

    def close(self) -> None:
        """Free all streams."""
        for bench in (*self._benches.values(), *self._gradients.values()):
            bench.free()
        self._benches.clear()
        self._gradients.clear()

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _run_of(self, device: Device, mode: str) -> Callable[[KitCase], CaseResult]:
        if mode == "grad":
            if device.name not in self._gradients:
                self._gradients[device.name] = gradients.GradientBench(device)
            return self._gradients[device.name].check
        if device.name not in self._benches:
            self._benches[device.name] = Bench(device)
        bench = self._benches[device.name]
        return bench.support if mode == "support" else bench.test


def _program(task: FamilyTask, result: CaseResult) -> str:
    """Return the case of a failure as a program to paste."""
    if task.mode in ("test", "support") and not task.memory and "(" not in task.device:
        case = next((c for c in cases_of(task.family) if c.id == result.id), None)
        if case is not None:
            return program_of(task.device, case)
    return run_again(task.device, task.mode, task.family, result.id, task.memory)


def run_all(work: Sequence[FamilyTask], jobs: int = 1) -> Iterator[CaseResult]:
    """Yield the results of all tasks, in the order of `work`, computed in `jobs` processes.

    Args:
        work: The tasks.
        jobs: Number of processes, each with its own streams: a crash ends one family, not the run.
    """
    waiting: dict[int, list[CaseResult]] = {i: [] for i in range(len(work))}
    for i, result in run_as_done(work, jobs):
        waiting[i].append(result)
        if jobs <= 1:
            yield from waiting[i]
            waiting[i].clear()
    for i in sorted(waiting):
        yield from waiting[i]


def run_as_done(work: Sequence[FamilyTask], jobs: int = 1) -> Iterator[tuple[int, CaseResult]]:
    """Yield the tasks' results from `jobs` processes, each as soon as known, with the task's index in `work`.

    Tasks of mode `perf` run last, in one process, with nothing beside them. If the caller stops or
    raises, running worker processes are ended.

    Args:
        work: The tasks.
        jobs: As in `run_all`; results of several processes are known once a task is done.
    """
    numbered = dict(enumerate(work))
    if jobs <= 1:
        with Runner() as runner:
            for i, task in numbered.items():
                yield from ((i, result) for result in runner.run(task))
        return
    yield from _in_processes({i: task for i, task in numbered.items() if task.mode != "perf"}, jobs)
    yield from _in_processes({i: task for i, task in numbered.items() if task.mode == "perf"}, 1)


def _in_processes(left: dict[int, FamilyTask], jobs: int) -> Iterator[tuple[int, CaseResult]]:
    last, alone = max(left, default=-1), jobs == 1
    of = left.get(last)
    while left:
        with worker_processes(1 if alone else jobs) as pool:
            try:
                if alone:
                    futures = ((i, pool.submit(_in_process, task)) for i, task in tuple(left.items()))
                else:
                    number = {pool.submit(_in_process, task): i for i, task in left.items()}
                    futures = ((number[future], future) for future in as_completed(number))
                for i, future in futures:
                    results = future.result()
                    del left[i]
                    yield from ((i, result) for result in results)
            except BrokenProcessPool:  # any of the running tasks may have ended it: run the rest one by one
                if alone:
                    i = next(iter(left))
                    yield from ((i, result) for result in _crashed(left.pop(i)))
                alone = jobs == 1 or not alone
    if of is not None and jobs > 1 and alone:
        why = f"a worker process ended while {jobs} ran, but none when run alone: too little memory?"
        yield last, CaseResult(of.mode, of.device, "processes", "worker processes", Outcome.FAILED, why)


@contextmanager
def worker_processes(n: int) -> Iterator[ProcessPoolExecutor]:
    """Context manager of worker processes, which are ended immediately if an exception leaves the block."""
    others = set(active_children())
    pool = ProcessPoolExecutor(n, get_context("spawn"), _leave_interrupts_to_parent)
    try:
        yield pool
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        workers = set(active_children()) - others
        for worker in workers:
            worker.terminate()
        for worker in workers:
            worker.join()
            # The pool's own thread joins it too, and may not have noted the end yet.
            for _ in range(1000):
                if not worker.is_alive():
                    break
                sleep(0.001)
        raise
    else:
        pool.shutdown()


def _leave_interrupts_to_parent() -> None:
    """Ignore Ctrl-C, which a terminal sends to all processes: the parent ends its workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


_of_process: list[Runner] = []
"""The runner of a worker process, which frees its streams when the process ends."""


def _in_process(task: FamilyTask) -> list[CaseResult]:
    if not _of_process:
        _of_process.append(Runner())
        atexit.register(_of_process[0].close)
    return list(_of_process[0].run(task))


def _crashed(task: FamilyTask) -> Iterator[CaseResult]:
    why = "the worker process ended while it ran only this family: a crash in the backend?"
    for name in task.ids:
        yield CaseResult(task.mode, task.device, task.family, name, Outcome.FAILED, why)
