"""`ggmlb ops`: the ops and data types that each device supports."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ggmlb.cli import plain
from ggmlb.cli.frame import Column, console, print_table
from ggmlb.cli.options import JsonOption, SomeDevicesOption, device_names

if TYPE_CHECKING:
    from ggmlb.interface import Device


def ops(
    devices: SomeDevicesOption = None,
    as_json: JsonOption = False,
    markdown: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Markdown file for the table, with one column per backend."),
    ] = None,
) -> None:
    """Show the data types that each device supports in each op.

    The type is that of the main operand: the weight of a product, the KV cache of an attention.

    Examples:
      ggmlb ops -d CPU,OpenCL0
      ggmlb ops --json
    """
    import ggmlb

    chosen = [ggmlb.device_by_name(n) for n in device_names(devices)] if devices else ggmlb.devices()
    if markdown is not None:
        first = {device.reg.name: device for device in reversed(chosen)}
        markdown.write_text(as_markdown([first[name] for name in sorted(first)]), encoding="utf-8")
        console().print(f"written to {markdown}", markup=False)
    elif as_json:
        import json

        from ggmlb.testing.claims import SAMPLES, supported_types

        plain.echo(
            json.dumps(
                {d.name: {op: _names(supported_types(d, op)) for op in SAMPLES} for d in chosen}, indent=1
            )
        )
    else:
        _print_table(chosen)


def _names(types: Sequence[object]) -> list[str]:
    return [t.name.lower() for t in types]  # type: ignore[attr-defined]


def _print_table(devices: Sequence[Device]) -> None:
    columns = [Column("Op", style="bold")]
    columns += [Column(device.name, wraps=True, drop=i) for i, device in enumerate(devices)]
    rows = ((op, *cells) for op, cells in _rows(devices))
    print_table(console(), "Supported types of the main operand", columns, rows)


def _rows(devices: Sequence[Device]) -> list[tuple[str, list[str]]]:
    from ggmlb.testing.claims import SAMPLES, brief, supported_types

    return [(op, [brief(supported_types(d, op)) for d in devices]) for op in SAMPLES]


def as_markdown(devices: Sequence[Device]) -> str:
    """Return the page `docs/ops.md`: the table and its abbreviations."""
    from ggmlb.testing.claims import TYPE_FAMILIES

    names = [device.reg.name for device in devices]
    lines = [
        "# What runs where",
        "",
        "For each op and backend: the types of the op's main operand that the backend takes, as its",
        "`supports_op` answers for a small contiguous node. The main operand is the weight of a product, the",
        "tensor that is copied or looked up, the KV cache of an attention. `Device.declines(node)` says why",
        "a node is refused. Made by `python -m ggmlb ops --markdown docs/ops.md`; a test checks that it is",
        "current.",
        "",
        "Custom ops (`map_custom1` to `map_custom3`, `custom_4d`) call a Python function with NumPy arrays:",
        "only the CPU has them. `flash_attn_back` is on no device: ggml ends the process where it is built.",
        "",
        f"| op | {' | '.join(names)} |",
        f"|---|{'---|' * len(names)}",
        *(f"| {op} | {' | '.join(cells)} |" for op, cells in _rows(devices)),
        "",
        *(
            f"- **{word}**: {', '.join(sorted(t.name.lower() for t in family))}"
            for word, family in TYPE_FAMILIES.items()
        ),
    ]
    return "\n".join(lines) + "\n"
