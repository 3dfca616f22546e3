"""`ggmlb devices`: what there is to compute on, and why something is not there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ggmlb.cli.frame import console
from ggmlb.cli.options import JsonOption  # noqa: TC001 (typer reads the annotations)
from ggmlb.errors import readable_size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ggmlb.interface import DeviceProps
    from ggmlb.registry import Unavailable


def devices(
    as_json: JsonOption = False,
) -> None:
    """List the devices: name, type, memory, capabilities, or why a backend is unavailable.

    Examples:
      ggmlb devices
      ggmlb devices --json
    """
    import ggmlb

    found = [(device.reg.name, device.props) for device in ggmlb.devices()]
    missing = ggmlb.registry.unavailable()
    if as_json:
        import json

        print(json.dumps(_as_data(found, missing), indent=2))
    else:
        _print_table(found, missing)


def _as_data(
    found: Sequence[tuple[str, DeviceProps]], missing: Sequence[Unavailable]
) -> dict[str, list[dict[str, Any]]]:
    return {
        "devices": [
            {
                "name": props.name,
                "backend": backend,
                "type": props.type.value,
                "description": props.description,
                "memory_free": props.memory_free,
                "memory_total": props.memory_total,
                "device_id": props.device_id,
                "caps": props.caps.as_dict(),
            }
            for backend, props in found
        ],
        "unavailable": [{"name": m.name, "kind": m.kind, "reason": m.reason} for m in missing],
    }


def _print_table(found: Sequence[tuple[str, DeviceProps]], missing: Sequence[Unavailable]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(title="Devices", title_justify="left")
    table.add_column("Name", style="bold", no_wrap=True)
    table.add_column("Type", no_wrap=True)
    table.add_column("Memory free / total", justify="right", no_wrap=True)
    table.add_column("Capabilities")
    table.add_column("Description")
    for _, props in found:
        caps = ", ".join(name for name, has in props.caps.as_dict().items() if has)
        cells = (props.name, props.type.value, _memory(props), caps or "-", props.description)
        table.add_row(*map(Text, cells))  # as they are: a name may hold what rich takes for markup
    out = console()
    out.print(table)
    for m in missing:
        what = "is not available" if m.kind == "absent" else "is broken"
        out.print(Text.assemble((m.name, "bold yellow"), f" {what}: {m.reason}"), soft_wrap=True)


def _memory(props: DeviceProps) -> str:
    if not props.memory_total:
        return "unknown"
    return f"{readable_size(props.memory_free)} / {readable_size(props.memory_total)}"
