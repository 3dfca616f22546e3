"""`ggmlb bench`: measured speed of devices, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ggmlb.cli import plain
from ggmlb.cli.frame import Column, console, print_table, progress_bar
from ggmlb.cli.options import HtmlOption, JsonOption, SomeDevicesOption, device_names

if TYPE_CHECKING:
    from ggmlb.interface import Device
    from ggmlb.testing.speed import Figure


def bench(devices: SomeDevicesOption = None, as_json: JsonOption = False, html: HtmlOption = None) -> None:
    """Measure devices: bandwidth of memory and transfers, matrix products, and the latency of a small op.

    Products are those of a language model: 512 columns for a prompt, and one column for each generated token,
    given as the bandwidth of weights read. 'ggmlb test --mode perf' measures each op.

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
    plain.note_devices((device.name for device in found), devices)
    measured: list[tuple[Device, list[Figure]]] = []
    is_stopped = False
    with progress_bar("measuring", len(found) * N_FIGURES) as progress:
        for device in found:
            of: list[Figure] = []
            try:
                for figure in figures(device):
                    of.append(figure)
                    progress(len(measured) * N_FIGURES + len(of), len(found) * N_FIGURES)
            except KeyboardInterrupt:
                is_stopped = True
                break
            measured.append((device, of))
    run = About.here(found).as_dict()
    data = json.dumps({"run": run, "devices": [_as_data(device, of) for device, of in measured]}, indent=1)
    if html is not None:
        write_page(html, "ggmlb bench", data)
    if as_json:
        plain.echo(data)
    elif measured:
        _print_table(measured)
    if is_stopped:
        raise KeyboardInterrupt


N_FIGURES = 16
"""Figures of a device, for the progress bar."""


def _as_data(device: Device, figures: Sequence[Figure]) -> dict[str, Any]:
    told = [{"name": f.name, "unit": f.unit, "value": f.value} for f in figures]
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
