"""`ggmlb devices`: the devices, and why backends are unavailable."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ggmlb.cli import plain
from ggmlb.cli.frame import console
from ggmlb.cli.options import AddressOption, JsonOption

if TYPE_CHECKING:
    from ggmlb.cli.plain import Found
    from ggmlb.interface.registry import Unavailable


def devices(
    as_json: JsonOption = False,
    address: AddressOption = None,
) -> None:
    """List the devices: name, type, memory, capabilities, or why a backend is unavailable.

    Examples:
      ggmlb devices
      ggmlb devices --json
      ggmlb devices --address auto
    """
    found, missing = plain.devices_and_reasons()
    if as_json:
        plain.echo(plain.as_json(found, missing))
    else:
        _print_table(found, missing)


def _print_table(found: Sequence[Found], missing: Sequence[Unavailable]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(title="Devices", title_justify="left")
    table.add_column("Name", style="bold", no_wrap=True)
    table.add_column("Type", no_wrap=True)
    table.add_column("Memory free / total", justify="right", no_wrap=True)
    table.add_column("Capabilities", overflow="fold")
    table.add_column("Description", overflow="fold")
    for _, props in found:
        caps = ", ".join(name for name, has in props.caps.as_dict().items() if has)
        cells = (props.name, props.type.value, plain.memory(props), caps or "-", props.description)
        table.add_row(*map(Text, cells))  # as they are: a name may hold what rich takes for markup
    out = console()
    out.print(table)
    for m in missing:
        out.print(Text.assemble((m.name, "bold yellow"), plain.reason(m)), soft_wrap=True)
    for note in plain.notes():
        out.print(Text(note), soft_wrap=True)
