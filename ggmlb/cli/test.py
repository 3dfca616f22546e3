"""`ggmlb test`: the conformance kit on the command line."""

from __future__ import annotations

import math
import os
import signal
import stat
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from enum import Enum
from itertools import product
from pathlib import Path
from threading import current_thread, main_thread
from typing import TYPE_CHECKING, Annotated, BinaryIO, TextIO, cast

import typer

from ggmlb.cli import plain
from ggmlb.cli.frame import console, progress_bar
from ggmlb.cli.options import (
    AddressOption,
    CompareOption,
    FailAtOption,
    GithubOption,
    HtmlOption,
    SaveOption,
    baseline_of,
    complete_devices,
    complete_ops,
    count,
    warn_of_differences,
)
from ggmlb.core.errors import ArgumentError, BackendUnavailable, RegistryError

try:
    import fcntl
except ImportError:  # Windows, where a file that is appended to looks like any other
    fcntl = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from ggmlb.testing.about import About
    from ggmlb.testing.baseline import Baseline, Measured
    from ggmlb.testing.results import CaseResult
    from ggmlb.testing.run import FamilyTask


MOST_JOBS = 4
"""Most processes unless the user asks for more: they share a device and its memory."""

MANY = 24
"""Families of cases for which another process is worth its start."""


class Mode(str, Enum):
    """Kind of test."""

    test = "test"
    support = "support"
    grad = "grad"
    perf = "perf"
    behaviour = "behaviour"
    all = "all"


class Format(str, Enum):
    """Format of the results."""

    table = "table"
    json = "json"
    csv = "csv"
    junit = "junit"
    markdown = "markdown"


def test(
    devices: Annotated[
        str | None,
        typer.Option(
            "--devices",
            "-d",
            metavar="NAME,NAME,...",
            autocompletion=complete_devices,
            help="Devices to test, comma-separated (default: all but the CPU, the reference).",
        ),
    ] = None,
    ops: Annotated[
        str | None,
        typer.Option(
            "--ops",
            "-o",
            metavar="OP,OP,...",
            help="Ops to test, as mul_mat, or checks of --mode behaviour, as transfers (default: all).",
            autocompletion=complete_ops,
        ),
    ] = None,
    pattern: Annotated[
        str,
        typer.Option(
            "--pattern",
            "-p",
            metavar="REGEX",
            help="Regular expression on case ids (default: all).",
        ),
    ] = "",
    mode: Annotated[
        Mode,
        typer.Option(
            metavar="MODE",
            help="Kind of test. test: values and memory; support: supports_op is right for supported and "
            "unsupported nodes; grad: gradients; perf: speed; behaviour: order of work, copies, "
            "buffers and plans; all: these five; an estimate of the time is printed first.",
        ),
    ] = Mode.test,
    format: Annotated[
        Format,
        typer.Option(
            "--format", metavar="FORMAT", help="Output format: table, json, csv, junit or markdown."
        ),
    ] = Format.table,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON; same as --format json.")] = False,
    output: Annotated[
        Path | None, typer.Option("--output", metavar="FILE", help="File for the results.")
    ] = None,
    html: HtmlOption = None,
    jobs: Annotated[
        int | None,
        count(
            "--jobs",
            "-j",
            help="Number of processes (default: one per core, at most 4; fewer for few cases; 1 for perf).",
        ),
    ] = None,
    limit: Annotated[int, count("--limit", help="Maximum number of cases per op (0: all).", least=0)] = 0,
    xfail: Annotated[
        Path | None,
        typer.Option(
            "--xfail", metavar="FILE", help="File of cases known to fail: 'REGEX # reason' in each line."
        ),
    ] = None,
    verbose: Annotated[
        bool,
        typer.Option(
            "--verbose",
            "-v",
            help="Show every case; of failures, the traceback, the wrong elements and Python to reproduce.",
        ),
    ] = False,
    only_list: Annotated[
        bool, typer.Option("--list", help="List the case ids without running them.")
    ] = False,
    save: SaveOption = None,
    compare: CompareOption = None,
    fail_at: FailAtOption = None,
    github: GithubOption = False,
    address: AddressOption = None,
) -> None:
    """Test devices against the CPU: values, memory, support, behaviour and speed.

    Exit status:
      0 at least one case ran, and none failed
      1  something failed
      2  wrong usage
      4  no backend has a device of that name
      5 nothing ran, for example without the device
      130, 143 stopped by Ctrl-C or SIGTERM; reports have the results so far

    Examples:
      ggmlb test -d CUDA0
      ggmlb test -d OpenCL0 -o mul_mat,rope -p q4_0 -v
      ggmlb test -d CUDA0 --mode all -j 4 --format junit --output report.xml
      ggmlb test -d CUDA0 --mode all --html report.html
      ggmlb test -d CUDA0 --mode behaviour
      ggmlb test -d node1/CPU --address auto
      ggmlb test -d CUDA0 --mode perf -o mul_mat --json
      ggmlb test -d CUDA0 --mode perf --save before.json
      ggmlb test -d CUDA0 --mode perf --compare before.json --fail-at 10%
    """
    from ggmlb.testing.about import About
    from ggmlb.testing.baseline import save as save_baseline
    from ggmlb.testing.claims import warnings
    from ggmlb.testing.devices import UnknownDeviceError, device_named
    from ggmlb.testing.formats import as_json as as_json_text
    from ggmlb.testing.github import append_summary, failure_annotations, markdown
    from ggmlb.testing.names import device_names as split_names
    from ggmlb.testing.page import write_page
    from ggmlb.testing.perf import measured
    from ggmlb.testing.results import NOTHING_RAN
    from ggmlb.testing.run import ALL, selections, tasks

    verbose = verbose or plain.is_debug()
    if github:
        append_summary("")  # before the work: an error if it cannot be written
    modes = ALL if mode is Mode.all else (mode.value,)
    if address is not None and jobs is not None and jobs > 1:
        raise typer.BadParameter("--address: a connection belongs to one process; leave out --jobs")
    try:
        if "perf" not in modes and (save or compare):
            raise ArgumentError("--save and --compare keep times: give --mode perf or all")
        baseline, allowed = baseline_of(compare, fail_at)
        names = _devices(devices)
        selected = selections(modes, split_names(ops or ""), pattern, limit)
    except UnknownDeviceError:
        raise
    except (RegistryError, BackendUnavailable) as error:
        if plain.is_debug():
            raise
        plain.echo(f"ggmlb: {error}", sys.stderr)
        raise typer.Exit(NOTHING_RAN) from None
    except ArgumentError as error:
        raise typer.BadParameter(str(error)) from None
    if output is not None and (output.is_file() or not output.exists()):
        with _opened(output, "a"):  # before the work, which may take long
            pass
    plain.note_devices(names, devices)
    if mode is Mode.all:
        plain.note(f"ggmlb: listing the cases of {', '.join(modes)}")
    work: list[FamilyTask] = []
    with progress_bar("listing cases", len(names) * len(selected)) as progress:
        for i, (name, one) in enumerate(product(names, selected)):
            work += tasks(device_named(name), one)
            progress(i + 1, len(names) * len(selected))
    if jobs is None:
        jobs = 1 if address is not None else max(1, min(MOST_JOBS, os.cpu_count() or 1, len(work) // MANY))
    if only_list:
        for task in work:
            plain.echo("\n".join(f"{task.mode} {i}" if mode is Mode.all else i for i in task.ids))
        return
    if mode is Mode.all:
        _tell_time(work, names, jobs)
    format = Format.json if as_json else format
    about = About.here(map(device_named, names))
    with _junit_file(output) if format is Format.junit else nullcontext() as file:
        results, about, stopped_by = _run(work, jobs, xfail, about, file, baseline, allowed)
    if save is not None and not stopped_by:
        save_baseline(save, about, _more_rounds([m for r in results if (m := measured(r)) is not None], work))
    if html is not None:
        write_page(html, f"ggmlb test: {', '.join(names)}", as_json_text(results, about))
    _write(results, about, format, output, verbose, is_written=file is not None)
    if baseline is not None:
        warn_of_differences(baseline, about, [m for r in results if (m := measured(r)) is not None])
    if github:
        append_summary(markdown(results, about))
        for line in failure_annotations(results):
            plain.echo(line)
    if stopped_by:
        plain.echo(f"ggmlb: {about.unfinished}", sys.stderr)
        raise typer.Exit(128 + stopped_by)
    whole = not (ops or pattern) and not {"test", "support"}.isdisjoint(modes)
    for line in warnings(map(device_named, names), results, whole=whole):
        plain.echo(f"ggmlb: {line}", sys.stderr)
    raise typer.Exit(_status(results, names, modes))


def _devices(wanted: str | None) -> list[str]:
    """Return the names of the devices to test.

    Raises:
        ArgumentError: The list is empty or invalid. RegistryError, BackendUnavailable: A device is
            missing, or none was named and there is only the CPU.
    """
    import ggmlb
    from ggmlb.testing.devices import device_named
    from ggmlb.testing.names import device_names as split_names

    if wanted is not None:
        names = [device_named(name).name for name in split_names(wanted)]
        if not names:
            raise ArgumentError(f"--devices {wanted} names no device; 'ggmlb devices' lists them")
        return names
    found = [device.name for device in ggmlb.devices() if device.name != "CPU"]
    if not found:
        why = "; ".join(f"{m.name}: {m.reason}" for m in ggmlb.interface.registry.unavailable())
        raise RegistryError(
            "there is no device but the CPU, which is the reference; '-d CPU' tests its memory and behaviour"
            + (f" ({why})" if why else "")
        )
    return found


def _tell_time(work: Sequence[FamilyTask], names: Sequence[str], jobs: int) -> None:
    """Print on standard error the number of cases and the estimated time."""
    from ggmlb.testing.forecast import forecast

    n = Counter[str]()
    for task in work:
        n[task.mode] += len(task.ids)
    if work:
        each = ", ".join(f"{of:,} of mode {mode}" for mode, of in n.items())
        took = forecast(work, jobs)
        plain.note(f"ggmlb: {n.total():,} cases on {', '.join(names)} ({each}): {took}")


def _run(
    work: Sequence[FamilyTask],
    jobs: int,
    xfail: Path | None,
    about: About,
    file: BinaryIO | None,
    baseline: Baseline | None = None,
    allowed: float = math.inf,
) -> tuple[list[CaseResult], About, int]:
    """Run tasks, and write a JUnit report during the run if a file is given.

    Returns:
        The results in the order of the tasks; the facts for reports; the signal that stopped the run, or 0.
    """
    from ggmlb.cli.tables import print_failures
    from ggmlb.testing.devices import device_named
    from ggmlb.testing.formats import JunitReport
    from ggmlb.testing.perf import compared
    from ggmlb.testing.run import Runner, run_as_done
    from ggmlb.testing.xfail import ExpectedFailures

    known = {name: ExpectedFailures.of(device_named(name), xfail) for name in {task.device for task in work}}
    total = sum(len(task.ids) for task in work)
    found: list[tuple[int, CaseResult]] = []
    stopped_by = n_bad = 0
    report = None
    with progress_bar("testing", total) as progress, _Stops() as stops, Runner() as again:
        try:
            if file is not None:
                with _writing():
                    report = JunitReport(file, about, total)
            for i, result in run_as_done(work, jobs):
                if baseline is not None and result.mode == "perf":
                    task = replace(work[i], ids=(result.id,))
                    result = compared(result, baseline, allowed, lambda: next(again.run(task)))  # noqa: B023
                with stops.held(), _writing():
                    found.append((i, known[result.device].judge(result)))
                    n_bad += found[-1][1].outcome.is_bad
                    if n_bad == 1 and found[-1][1].outcome.is_bad and not plain.is_quiet():
                        plain.note("ggmlb: the first failure; the run goes on")
                        print_failures(console(sys.stderr), [found[-1][1]], verbose=True)
                    if report is not None:
                        report.add(found[-1][1])
                progress(len(found), total)
            if report is not None:
                with stops.held(), _writing():
                    report.close()
        except KeyboardInterrupt as stop:
            stopped_by = int(*stop.args) or signal.SIGINT
            about = replace(about, unfinished=f"the run was stopped: {len(found)} of {total} cases were done")
    return [result for _, result in sorted(found, key=lambda of: of[0])], about, stopped_by


def _more_rounds(records: Sequence[Measured], work: Sequence[FamilyTask]) -> list[Measured]:
    """Return measurements with the samples of further rounds, at other times."""
    from ggmlb.testing.baseline import ROUNDS
    from ggmlb.testing.perf import measured
    from ggmlb.testing.run import Runner

    task_of = {(task.device, i): task for task in work if task.mode == "perf" for i in task.ids}
    found = list(records)
    rounds = (ROUNDS - 1) * len(found)
    with progress_bar("measuring again", rounds) as progress, Runner() as runner:
        for n in range(rounds):
            i = n % len(found)
            for other in runner.run(replace(task_of[found[i].device, found[i].name], ids=(found[i].name,))):
                if (more := measured(other)) is not None:
                    found[i] = found[i].together(more)
            progress(n + 1, rounds)
    return found


class _Stops:
    """Context manager that turns Ctrl-C and SIGTERM into KeyboardInterrupt with the signal's number.

    CI systems stop a job by SIGTERM. A signal that the process ignores (as background jobs of a shell do)
    stays ignored.
    """

    def __enter__(self) -> _Stops:
        self._pending, self._is_held = 0, False
        self._before = {}
        if current_thread() is main_thread():
            heard = (s for s in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(s) != signal.SIG_IGN)
            self._before = {s: signal.signal(s, self._stop) for s in heard}
        return self

    def __exit__(self, *error: object) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Delay signals until the end of a block."""
        self._is_held = True
        try:
            yield
        finally:
            self._is_held = False
        if self._pending:
            raise KeyboardInterrupt(self._pending)

    def _stop(self, signum: int, frame: object) -> None:
        self._pending = signum
        if not self._is_held:
            raise KeyboardInterrupt(signum)


@contextmanager
def _junit_file(output: Path | None) -> Iterator[BinaryIO | None]:
    """Open the file for an incremental report; `None` if it is a pipe or a terminal."""
    if output is not None:
        with open(output, "wb") if output.is_file() else nullcontext() as file:
            yield file
        return
    try:
        sys.stdout.flush()
        shared = os.dup(sys.stdout.fileno())
    except (OSError, ValueError):  # no file of the system
        yield None
        return
    with open(shared, "wb") as file:
        appends = fcntl is not None and fcntl.fcntl(shared, fcntl.F_GETFL) & os.O_APPEND
        yield file if stat.S_ISREG(os.fstat(shared).st_mode) and not appends else None


def _write(
    results: Sequence[CaseResult],
    about: About,
    format: Format,
    output: Path | None,
    verbose: bool,
    is_written: bool,
) -> None:
    from ggmlb.cli.tables import print_results
    from ggmlb.testing.formats import FORMATS

    if format is Format.table:
        if output is None:
            print_results(console(), results, verbose)
            return
        with _opened(output) as file:
            print_results(console(file), results, verbose)
        return
    if not is_written:
        text = FORMATS[format.value](results, about)
        if output is None:
            plain.echo(text.removesuffix("\n"))
        else:
            with _writing(), _opened(output) as file:
                file.write(text)
    if output is not None:
        print_results(console(), results, verbose)


@contextmanager
def _writing() -> Iterator[None]:
    """Context manager that turns failures to write a report, as on a full disk, into ArgumentErrors."""
    try:
        yield
    except OSError as error:
        raise ArgumentError(f"cannot write the report: {error.strerror}; give another --output") from error


def _opened(path: Path, mode: str = "w") -> TextIO:
    try:
        return cast("TextIO", path.open(mode, encoding="utf-8"))
    except OSError as error:
        raise ArgumentError(f"cannot write {path}: {error.strerror}; give another --output") from error


def _status(results: Sequence[CaseResult], names: Sequence[str], modes: Sequence[str]) -> int:
    """Return the exit status, and print on standard error if nothing ran."""
    from ggmlb.testing.results import NOTHING_RAN, OK, exit_status

    status = exit_status(results)
    if status == NOTHING_RAN:
        why = f"{', '.join(names)} supports none of the {len(results)} cases" if results else ""
        why = why or "no case is of these ops and contains the pattern"
        console(sys.stderr).print(f"ggmlb: nothing ran: {why}", markup=False)
        return status
    for mode in modes:
        of = [result for result in results if result.mode == mode]
        if of and exit_status(of) == NOTHING_RAN:
            why = f"nothing ran in mode {mode}: none of its {len(of)} cases is supported"
            plain.echo(f"ggmlb: {why}", sys.stderr)
            status = NOTHING_RAN if status == OK and mode != "perf" else status
    return status
