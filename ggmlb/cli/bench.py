"""`ggmlb bench`: measured speed of devices, side by side."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

import typer

from ggmlb.cli import plain
from ggmlb.cli.frame import Column, Row, console, print_table, progress_bar
from ggmlb.cli.options import (
    CompareOption,
    FailAtOption,
    GithubOption,
    HtmlOption,
    JsonOption,
    SaveOption,
    SomeDevicesOption,
    baseline_of,
    device_names,
    warn_of_differences,
)

if TYPE_CHECKING:
    from ggmlb.interface import Device
    from ggmlb.testing.baseline import Measured, SpeedChange
    from ggmlb.testing.speed import Figure


def bench(
    devices: SomeDevicesOption = None,
    as_json: JsonOption = False,
    html: HtmlOption = None,
    save: SaveOption = None,
    compare: CompareOption = None,
    fail_at: FailAtOption = None,
    github: GithubOption = False,
) -> None:
    """Measure devices: bandwidth of memory and transfers, matrix products, and the latency of a small op.

    Products are those of a language model: 512 columns for a prompt, and one column for each generated token,
    given as the bandwidth of weights read. 'ggmlb test --mode perf' measures each op.

    Values are medians. --save measures three times; with --compare, what seems slower is measured up to twice
    more, and the exit status is 1 if something is slower by more than --fail-at and the noise.

    Examples:
      ggmlb bench
      ggmlb bench -d OpenCL0,CPU
      ggmlb bench -d CUDA0 --json > cuda0.json
      ggmlb bench --html report.html
      ggmlb bench -d CUDA0 --save before.json
      ggmlb bench -d CUDA0 --compare before.json --fail-at 10%
    """
    import json

    import ggmlb
    from ggmlb.testing import speed
    from ggmlb.testing.about import About
    from ggmlb.testing.baseline import ROUNDS
    from ggmlb.testing.baseline import save as save_baseline
    from ggmlb.testing.github import annotation, append_summary, table
    from ggmlb.testing.page import write_page

    if github:
        append_summary("")  # before the work: an error if it cannot be written
    baseline, allowed = baseline_of(compare, fail_at)
    found = ggmlb.devices() if devices is None else [ggmlb.device_by_name(n) for n in device_names(devices)]
    plain.note_devices((device.name for device in found), devices)
    measured: list[tuple[Device, list[Figure]]] = []
    records: dict[tuple[str, str], Measured] = {}
    changes: list[SpeedChange] = []
    is_stopped, names = False, speed.names()
    n_more = ROUNDS - 1 if save is not None else 0
    total = len(found) * len(names) * (1 + n_more)
    with progress_bar("measuring", total) as progress:
        try:
            for device in found:
                of: list[Figure] = []
                for name in names:
                    of.append(speed.figure(device, name))
                    record = _record(device, of[-1])
                    if record is not None and baseline is not None:
                        record, change = baseline.measured_again(
                            record, allowed, partial(_again, device, name)
                        )
                        of[-1] = replace(of[-1], value=record.value, samples=record.samples)
                        changes += [change] if change is not None else []
                    if record is not None:
                        records[device.name, name] = record
                    progress(len(measured) * len(names) + len(of), total)
                measured.append((device, of))
            for i, (device, name) in enumerate(product(n_more * found, names)):  # rounds at other times
                if (device.name, name) in records and (other := _again(device, name)) is not None:
                    records[device.name, name] = records[device.name, name].together(other)
                progress(len(found) * len(names) + i + 1, total)
        except KeyboardInterrupt:
            is_stopped = True
    about = About.here(found)
    told: dict[str, Any] = {"devices": [_as_data(device, of) for device, of in measured]}
    if baseline is not None:
        told["changes"] = [_change_as_data(change) for change in changes]
    data = json.dumps({"run": about.as_dict(), **told}, indent=1)
    if html is not None:
        write_page(html, "ggmlb bench", data)
    if save is not None and not is_stopped:
        save_baseline(save, about, [*records.values()])
    if as_json:
        plain.echo(data)
    elif measured:
        _print_table(measured)
    if baseline is not None:
        warn_of_differences(baseline, about, [*records.values()])
        if not as_json:
            _print_changes(changes)
    if github:
        heads = ("device", "measured", "unit", "value", "baseline", "change", "noise", "")
        append_summary(table("ggmlb bench", heads, _rows([*records.values()], changes)))
    if is_stopped:
        raise KeyboardInterrupt
    slower = [c for c in changes if c.verdict == "slower"]
    for c in slower:
        line = f"{c.now.device}: {c.now.name}: {c.text}; {allowed:.0%} is allowed"
        plain.echo(f"ggmlb: {line}", sys.stderr)
        if github:
            plain.echo(annotation("ggmlb bench", line))
    if slower:
        raise typer.Exit(1)


def _again(device: Device, name: str) -> Measured | None:
    from ggmlb.testing.speed import figure

    return _record(device, figure(device, name))


def _record(device: Device, figure: Figure) -> Measured | None:
    from ggmlb.testing.baseline import Measured

    return Measured(device.name, figure.name, figure.unit, figure.samples) if figure.samples else None


def _change_as_data(change: SpeedChange) -> dict[str, Any]:
    return {
        "device": change.now.device,
        "name": change.now.name,
        "unit": change.now.unit,
        "value": change.now.value,
        "baseline": change.before.value,
        "slowdown": change.slowdown,
        "noise": change.noise,
        "verdict": change.verdict,
    }


def _rows(records: Sequence[Measured], changes: Sequence[SpeedChange]) -> list[tuple[str, ...]]:
    from ggmlb.cli.tables import three_digits

    by_name = {(c.now.device, c.now.name): c for c in changes}
    rows: list[tuple[str, ...]] = []
    for m in records:
        change = by_name.get((m.device, m.name))
        rest = (
            (
                three_digits(change.before.value),
                f"{change.slowdown:+.1%}",
                f"{change.noise:.1%}",
                change.verdict,
            )
            if change is not None
            else ("-", "-", f"{m.noise:.1%}", "")
        )
        rows.append((m.device, m.name, m.unit, three_digits(m.value), *rest))
    return rows


def _print_changes(changes: Sequence[SpeedChange]) -> None:
    columns = (
        Column("Device"), Column("Measured", wraps=True), Column("Unit"), Column("Now", right=True),
        Column("Baseline", right=True), Column("Time", right=True), Column("Noise", right=True), Column("Is"),
    )  # fmt: skip
    styles = {"slower": "bold red", "unclear": "yellow", "faster": "green"}
    rows = [Row(row, styles.get(row[-1], "")) for row in _rows([change.now for change in changes], changes)]
    print_table(console(), "Change since the baseline", columns, rows)


def _as_data(device: Device, figures: Sequence[Figure]) -> dict[str, Any]:
    told = [{"name": f.name, "unit": f.unit, "value": f.value, "samples": f.samples} for f in figures]
    return {"name": device.name, "description": device.description, "figures": told}


def _print_table(measured: Sequence[tuple[Device, Sequence[Figure]]]) -> None:
    from rich.text import Text

    from ggmlb.cli.tables import three_digits

    columns = [Column("Measured", wraps=True), Column("Unit")]
    columns += [Column(device.name, right=True, drop=i) for i, (device, _) in enumerate(measured)]
    rows = (
        (of[0].name, of[0].unit, *(three_digits(f.value) if f.value is not None else "-" for f in of))
        for of in zip(*(figures for _, figures in measured), strict=True)
    )
    out = console()
    print_table(out, "Measured speed of devices", columns, rows)
    for device, _ in measured:
        out.print(Text.assemble((device.name, "bold"), f": {device.description}"), soft_wrap=True)
