"""`ggmlb test`: the conformance kit, for a person or for a CI runner."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO, cast

import typer

from ggmlb.cli import plain
from ggmlb.cli.frame import console, progress_bar
from ggmlb.cli.options import complete_devices, complete_ops, device_names
from ggmlb.core.errors import ArgumentError, BackendUnavailable, RegistryError

if TYPE_CHECKING:
    from ggmlb.testing.results import Result
    from ggmlb.testing.run import Task


class Mode(str, Enum):
    """What is looked at."""

    test = "test"
    support = "support"
    perf = "perf"
    behaviour = "behaviour"


class Format(str, Enum):
    """How the results are written."""

    table = "table"
    json = "json"
    csv = "csv"
    junit = "junit"


def test(
    devices: Annotated[
        str | None,
        typer.Option(
            "--devices",
            "-d",
            metavar="NAME,NAME,...",
            autocompletion=complete_devices,
            help="Devices to test; by default all but the CPU, which is the reference.",
        ),
    ] = None,
    ops: Annotated[
        str | None,
        typer.Option(
            "--ops",
            "-o",
            metavar="OP,OP,...",
            help="Only these ops, or kinds of behaviour.",
            autocompletion=complete_ops,
        ),
    ] = None,
    pattern: Annotated[
        str, typer.Option("--pattern", "-p", metavar="REGEX", help="Only cases whose id holds this.")
    ] = "",
    mode: Annotated[
        Mode,
        typer.Option(
            help="test: values and memory; support: supports_op lies neither way; perf: speed; "
            "behaviour: order, copies, buffers, plans."
        ),
    ] = Mode.test,
    format: Annotated[Format, typer.Option("--format", help="How to write the results.")] = Format.table,
    as_json: Annotated[bool, typer.Option("--json", help="The same as --format json.")] = False,
    output: Annotated[
        Path | None, typer.Option("--output", metavar="FILE", help="Write the results to a file.")
    ] = None,
    jobs: Annotated[
        int, typer.Option("--jobs", "-j", min=1, help="Processes that share the work; not for perf.")
    ] = 1,
    limit: Annotated[
        int, typer.Option("--limit", min=0, help="Most cases of an op; 0 for all. The first differ most.")
    ] = 0,
    xfail: Annotated[
        Path | None,
        typer.Option("--xfail", metavar="FILE", help="Cases known to fail: 'REGEX # reason' in each line."),
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show every case in the table.")] = False,
    only_list: Annotated[bool, typer.Option("--list", help="Show the ids, and run none.")] = False,
) -> None:
    """Test devices against the CPU: values, memory, support, behaviour and speed.

    Exit status:
      0  something ran, and nothing failed
      1  something failed
      2  wrong usage
      4  no backend has a device of that name
      5  nothing ran, as where the device is not there

    Examples:
      ggmlb test -d CUDA0
      ggmlb test -d OpenCL0 -o mul_mat,rope -p q4_0 -v
      ggmlb test -d CUDA0 --mode behaviour
      ggmlb test -d CUDA0 --format junit --output report.xml -j 4
      ggmlb test -d CUDA0 --mode perf -o mul_mat --json
    """
    from ggmlb.testing.claims import warnings
    from ggmlb.testing.devices import UnknownDeviceError, device_named
    from ggmlb.testing.results import NOTHING_RAN, UNKNOWN_DEVICE, exit_status
    from ggmlb.testing.run import Selection, tasks

    try:
        names = _devices(devices)
        selection = Selection(mode.value, tuple(device_names(ops or "")), pattern, limit)
    except UnknownDeviceError as error:
        plain.echo(f"ggmlb: {error}", sys.stderr)
        raise typer.Exit(UNKNOWN_DEVICE) from None
    except (RegistryError, BackendUnavailable) as error:
        plain.echo(f"ggmlb: {error}", sys.stderr)
        raise typer.Exit(NOTHING_RAN) from None
    except ArgumentError as error:
        raise typer.BadParameter(str(error)) from None
    if output is not None:
        with _opened(output, "a"):  # before the work, which may take long
            pass
    work = [task for name in names for task in tasks(device_named(name), selection)]
    if only_list:
        for task in work:
            plain.echo("\n".join(task.ids))
        return
    results = _run(work, 1 if mode is Mode.perf else jobs, xfail)
    _write(results, Format.json if as_json else format, output, verbose)
    for line in warnings(map(device_named, names), results):
        plain.echo(f"ggmlb: {line}", sys.stderr)
    status = exit_status(results)
    if status == NOTHING_RAN:
        console(sys.stderr).print(f"ggmlb: nothing ran: {_why_nothing(results, names)}", markup=False)
    raise typer.Exit(status)


def _devices(wanted: str | None) -> list[str]:
    """Return the names of the devices to test.

    Raises:
        ArgumentError: The list is empty, or no list of names.
        RegistryError, BackendUnavailable: One is not there, or there is none but the CPU and none was named.
    """
    import ggmlb
    from ggmlb.testing.devices import device_named

    if wanted is not None:
        names = [device_named(name).name for name in device_names(wanted)]
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


def _run(work: Sequence[Task], jobs: int, xfail: Path | None) -> list[Result]:
    from ggmlb.testing.devices import device_named
    from ggmlb.testing.run import run_all
    from ggmlb.testing.xfail import ExpectedFailures

    known = {name: ExpectedFailures.of(device_named(name), xfail) for name in {task.device for task in work}}
    total = sum(len(task.ids) for task in work)
    results: list[Result] = []
    with progress_bar("testing", total) as progress:
        for result in run_all(work, jobs):
            results.append(known[result.device].judge(result))
            if progress is not None:
                progress(len(results), total)
    return results


def _write(results: Sequence[Result], format: Format, output: Path | None, verbose: bool) -> None:
    from ggmlb.cli.tables import print_results
    from ggmlb.testing.formats import FORMATS

    if format is Format.table:
        if output is None:
            print_results(console(), results, verbose)
            return
        with _opened(output) as file:
            print_results(console(file), results, verbose)
        return
    text = FORMATS[format.value](results)
    if output is None:
        plain.echo(text.removesuffix("\n"))
        return
    with _opened(output) as file:
        file.write(text)
    print_results(console(), results, verbose)


def _opened(path: Path, mode: str = "w") -> TextIO:
    try:
        return cast("TextIO", path.open(mode, encoding="utf-8"))
    except OSError as error:
        raise ArgumentError(f"cannot write {path}: {error.strerror}; give another --output") from error


def _why_nothing(results: Sequence[Result], names: Sequence[str]) -> str:
    if not results:
        return "no case is of these ops and holds the pattern"
    return f"{', '.join(names)} supports none of the {len(results)} cases"
