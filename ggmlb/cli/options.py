"""Options that several commands share: model, devices, layers by device, and their parsers."""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ggmlb.cli import plain
from ggmlb.core.errors import ArgumentError
from ggmlb.testing import names

if TYPE_CHECKING:
    from ggmlb.testing.about import About
    from ggmlb.testing.baseline import Baseline, Measured


def device_names(text: str) -> list[str]:
    """Split a list of device names, and check them before the work.

    Raises:
        Error: As `ggmlb.testing.devices.device_named`.
    """
    from ggmlb.testing.devices import device_named

    found = names.device_names(text)
    for name in found:
        device_named(name)
    return found


def complete_devices(incomplete: str) -> list[str]:
    """Complete a list of devices, for the shell."""
    import ggmlb

    before, comma, last = incomplete.rpartition(",")
    known = [d.name for d in ggmlb.devices() if d.name not in before.split(",")]
    return [before + comma + name for name in known if name.lower().startswith(last.lower())]


def complete_ops(incomplete: str) -> list[str]:
    """Complete a list of ops, for the shell."""
    from ggmlb.testing.run import MODES, known_ops

    before, comma, last = incomplete.rpartition(",")
    known = sorted({name for mode in MODES for name in known_ops(mode)})
    return [before + comma + name for name in known if name.startswith(last.lower())]


def _connect(ctx: typer.Context, address: str | None) -> str | None:
    """Connect to a cluster until the command ends."""
    if address is not None and not ctx.resilient_parsing:
        import ggmlb

        ctx.call_on_close(ggmlb.connect(address).close)
    return address


def baseline_of(compare: Path | None, fail_at: str | None) -> tuple[Baseline | None, float]:
    """Return the baseline of `--compare`, and the allowed slowdown of `--fail-at`.

    Raises:
        ArgumentError: The file is no baseline, or the share is none; `--fail-at` without `--compare`.
    """
    from ggmlb.testing.baseline import Baseline, share

    if compare is None and fail_at is not None:
        raise ArgumentError("--fail-at needs a baseline: give --compare FILE, as --save wrote it")
    allowed = math.inf if fail_at is None else share(fail_at)
    return (None if compare is None else Baseline.load(compare)), allowed


def warn_of_differences(baseline: Baseline, about: About, measured: Sequence[Measured]) -> None:
    """Print how this run differs from the baseline's, and the measurements that it lacks."""
    for line in (*baseline.differences(about), *(f"not measured: {m}" for m in baseline.missing(measured))):
        plain.echo(f"ggmlb: {line}", sys.stderr)


def _writable(path: Path | None) -> Path | None:
    """Check that a file can be written, before the work, which may take long; do not create it."""
    if path is not None and (path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK)):
        raise typer.BadParameter(f"cannot write {path}; give a file in a folder that exists")
    return path


def count(*flags: str, help: str, least: int = 1) -> Any:
    """Return an option whose value is an integer of at least `least`."""
    return typer.Option(*flags, metavar="N", help=help, min=least)


AddressOption = Annotated[
    str | None,
    typer.Option(
        "--address",
        metavar="HOST:PORT",
        callback=_connect,
        is_eager=True,
        help="Ray cluster whose devices are added, as node0/CPU; 'auto' finds a running one.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON, sizes in bytes.")]
HtmlOption = Annotated[
    Path | None,
    typer.Option(
        "--html",
        metavar="FILE",
        callback=_writable,
        help="HTML file for an additional report: machine, charts, tables with filters.",
    ),
]
SaveOption = Annotated[
    Path | None,
    typer.Option(
        "--save", metavar="FILE", callback=_writable, help="File for the measurements, for a later --compare."
    ),
]
CompareOption = Annotated[
    Path | None,
    typer.Option("--compare", metavar="FILE", help="Baseline, a file of --save: show the change of each."),
]
FailAtOption = Annotated[
    str | None,
    typer.Option(
        "--fail-at",
        metavar="SHARE",
        help="Fail if anything is slower than the baseline by more than SHARE (as 10%) plus the noise.",
    ),
]
GithubOption = Annotated[
    bool,
    typer.Option(
        "--github",
        help="Append a Markdown summary to $GITHUB_STEP_SUMMARY, and print annotations of failures.",
    ),
]
SomeDevicesOption = Annotated[
    str | None,
    typer.Option(
        "--devices",
        "-d",
        metavar="NAME,NAME,...",
        envvar="GGMLB_DEVICES",
        help="Devices, comma-separated (default: all).",
        autocompletion=complete_devices,
    ),
]
DevicesOption = Annotated[
    str | None,
    typer.Option(
        "--devices",
        "-d",
        autocompletion=complete_devices,
        metavar="NAME,NAME,...",
        envvar="GGMLB_DEVICES",
        help="Devices, highest priority first; the last one runs the ops that no other supports "
        "(default: the best device and the CPU).",
    ),
]
LayersOption = Annotated[
    list[str] | None,
    typer.Option(
        "--layers-on",
        metavar="NAME=RANGE",
        help="Layers of a device, as OpenCL0=0-2 or CPU=3,5; also 'all', 'embeddings' and 'output'; "
        "repeatable.",
    ),
]
ModelOption = Annotated[
    Path | None,
    typer.Option(
        "--model",
        "-m",
        metavar="PATH",
        help="Model folder or GGUF file (default: the installed all-MiniLM-L6-v2).",
    ),
]


def text_of(file: Path) -> str:
    """Return the text of a file.

    Raises:
        ArgumentError: The file cannot be read, is not UTF-8, or is empty.
    """
    try:
        text = file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(f"cannot read {file}: {error}; give a text file in UTF-8") from None
    if not text:
        raise ArgumentError(f"{file} is empty; give a text")
    return text


SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(i?)B?|B)?", re.IGNORECASE)
"""A size with a unit, as 200MiB or 1.5G (the same as 1.5GiB), or in bytes, as 1000000."""


def size_of(text: str, option: str) -> int:
    """Parse a size as `"200MiB"` into bytes.

    Raises:
        ArgumentError: It is no size; the message names the option.
    """
    read = SIZE.fullmatch(text.strip())
    if read is None:
        raise ArgumentError(f"{option} {text}: give a size, as 200MiB or 6G")
    power: int = "KMGT".index(read[2].upper()) + 1 if read[2] else 0
    return int(float(read[1]) * 1024**power)


def sizes_by_device(options: list[str] | None, option: str = "--memory") -> dict[str, int]:
    """Parse `["OpenCL0=200MiB"]` into bytes by device, given by an option.

    Raises:
        ArgumentError: An option is not `NAME=SIZE`.
    """
    found: dict[str, int] = {}
    for given in options or ():
        name, equals, size = given.partition("=")
        if not (name and equals):
            raise ArgumentError(f"{option} {given}: give NAME=SIZE, as OpenCL0=200MiB or CUDA0=6G")
        found[name] = size_of(size, f"{option} {name}=")
    return found


def layers_by_device(options: list[str] | None) -> dict[str, list[str]] | None:
    """Parse `["OpenCL0=0-2", "CPU=3-5"]` into layers by device; `None` if not given.

    Raises:
        ArgumentError: An option is not `NAME=RANGE`.
    """
    found: dict[str, list[str]] = {}
    for option in options or ():
        name, equals, layers = option.partition("=")
        if not (name and equals and layers):
            raise ArgumentError(f"--layers-on {option}: give NAME=RANGE, as OpenCL0=0-2")
        found.setdefault(name, []).extend(layers.split(","))
    return found or None
