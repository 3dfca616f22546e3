"""`ggmlb bench`: measured speed of devices, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ggmlb.cli import plain
from ggmlb.cli.frame import console, progress_bar
from ggmlb.cli.options import HtmlOption, JsonOption, SomeDevicesOption, device_names

if TYPE_CHECKING:
    from ggmlb.interface import Device
    from ggmlb.testing.speed import Figure


def bench(devices: SomeDevicesOption = None, as_json: JsonOption = False, html: HtmlOption = None) -> None:
    """Measure devices: memory, transfers, products, and the cost of a small op.

    Products are those of a language model: 512 columns for a prompt, and one
    column for each token, in bytes of weights read. 'ggmlb test --mode perf' measures each op.

    Examples:
      ggmlb bench
      ggmlb bench -d OpenCL0,CPU
      ggmlb bench -d CUDA0 --json > cuda0.json
      ggmlb bench --html report.html
    """
    import json

    import ggmlb
    from ggmlb.testing.about import About
    from ggmlb.testing.page import write_page
    from ggmlb.testing.speed import figures

    found = ggmlb.devices() if devices is None else [ggmlb.device_by_name(n) for n in device_names(devices)]
    measured: list[tuple[Device, list[Figure]]] = []
    with progress_bar("measuring", len(found) * N_FIGURES) as progress:
        for device in found:
            of: list[Figure] = []
            measured.append((device, of))
            for figure in figures(device):
                of.append(figure)
                if progress is not None:
                    progress(sum(len(f) for _, f in measured), len(found) * N_FIGURES)
    run = About.here(found).as_dict()
    data = json.dumps({"run": run, "devices": [_as_data(device, of) for device, of in measured]}, indent=1)
    if html is not None:
        write_page(html, "ggmlb bench", data)
    if as_json:
        plain.echo(data)
    else:
        _print_table(measured)


N_FIGURES = 16
"""Figures of a device, for the progress bar."""


def _as_data(device: Device, figures: Sequence[Figure]) -> dict[str, Any]:
    told = [{"name": f.name, "unit": f.unit, "value": f.value} for f in figures]
    return {"name": device.name, "description": device.description, "figures": told}


def _print_table(measured: Sequence[tuple[Device, Sequence[Figure]]]) -> None:
    from rich.table import Table
    from rich.text import Text

    from ggmlb.cli.tables import three_digits

    table = Table(title="Measured speed of devices", title_justify="left")
    table.add_column("Measured", no_wrap=True)
    table.add_column("Unit", no_wrap=True)
    for device, _ in measured:
        table.add_column(Text(device.name, style="bold"), justify="right", no_wrap=True)
    for row in zip(*(figures for _, figures in measured), strict=True):
        cells = [three_digits(f.value) if f.value is not None else "-" for f in row]
        table.add_row(row[0].name, row[0].unit, *cells)
    out = console()
    out.print(table)
    for device, _ in measured:
        out.print(Text.assemble((device.name, "bold"), f": {device.description}"), soft_wrap=True)
