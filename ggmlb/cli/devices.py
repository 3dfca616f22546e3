"""`ggmlb devices`: the devices, and why backends are unavailable."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from ggmlb.cli import plain
from ggmlb.cli.frame import Column, console, print_table
from ggmlb.cli.options import AddressOption, JsonOption

if TYPE_CHECKING:
    from ggmlb.cli.plain import Found
    from ggmlb.interface.registry import Unavailable

COLUMNS = (
    Column("Name", style="bold"), Column("Type"), Column("Memory free / total", right=True, drop=1),
    Column("Capabilities", wraps=True, drop=2), Column("Description", wraps=True),
)  # fmt: skip


def devices(
    as_json: JsonOption = False,
    address: AddressOption = None,
    verbose: Annotated[
        bool,
        typer.Option("--verbose", "-v", help="Also print the features of each backend."),
    ] = False,
) -> None:
    """List the devices: name, type, memory, capabilities, or why a backend is unavailable.

    Examples:
      ggmlb devices
      ggmlb devices -v
      ggmlb devices --json
      ggmlb devices --address auto
    """
    found, missing = plain.devices_and_reasons()
    if as_json:
        plain.echo(plain.as_json(found, missing))
    else:
        _print_table(found, missing)
        if verbose:
            _print_features()


def _print_table(found: Sequence[Found], missing: Sequence[Unavailable]) -> None:
    from rich.text import Text

    rows = (
        (
            props.name,
            props.type.value,
            plain.memory(props),
            ", ".join(name for name, has in props.caps.as_dict().items() if has) or "-",
            props.description,
        )
        for _, props in found
    )
    out = console()
    print_table(out, "Devices", COLUMNS, rows)
    for m in missing:
        out.print(Text.assemble((m.name, "bold yellow"), plain.reason(m)), soft_wrap=True)
    for note in plain.notes():
        out.print(Text(note), soft_wrap=True)


def _print_features() -> None:
    """Print the features of each backend that has a device (`get_features`)."""
    import ggmlb

    for reg in dict.fromkeys(device.reg for device in ggmlb.devices()):
        get_features = reg.get_proc_address("get_features")
        if get_features is not None:
            plain.echo(f"{reg.name}: {', '.join(f'{key} = {value}' for key, value in get_features(reg))}")
