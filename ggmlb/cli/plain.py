"""Plain-text and JSON output of commands, and the properties of devices in it."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TextIO

from ggmlb.core.errors import one_line, readable_size, shown
from ggmlb.system import env

if TYPE_CHECKING:
    from ggmlb.interface import DeviceProps
    from ggmlb.interface.registry import Unavailable

Found = tuple[str, "DeviceProps"]
"""The backend's name, and a device of it."""


def echo(text: str, stream: TextIO | None = None, end: str = "\n") -> None:
    """Print lines with escaped control characters, by default on standard output; flush if `end` is empty."""
    print(shown(text), file=stream, end=end, flush=not end)


def note(text: str) -> None:
    """Print a note on standard error, unless `--quiet` is given."""
    if not is_quiet():
        echo(text, sys.stderr)


def note_devices(names: Iterable[str], asked: object = None) -> None:
    """Print the devices of a command on standard error, unless they were `asked` for."""
    if asked is None:
        note(f"computes on {', '.join(names)}; --devices chooses others")


def be_quiet() -> None:
    """Show neither progress nor notes from now on."""
    env.put("GGMLB_PROGRESS", "0")


def is_quiet() -> bool:
    """Whether neither progress nor notes are wanted."""
    return not env.flag("GGMLB_PROGRESS", default=True)


def show_tracebacks() -> None:
    """Show the traceback of errors from now on, in this process and its workers."""
    env.put("GGMLB_DEBUG", "1")


def is_debug() -> bool:
    """Whether tracebacks of errors are wanted."""
    return env.flag("GGMLB_DEBUG", default=False)


def drop_output() -> None:
    """Redirect a broken standard output to null, so that Python does not flush it again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def finite(item: Any) -> dict[str, Any]:
    """Return the fields of a dataclass or named tuple for JSON, which has no infinity and NaN: null."""
    fields = item._asdict() if hasattr(item, "_asdict") else asdict(item)
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in fields.items()
    }


def devices_and_reasons() -> tuple[list[Found], list[Unavailable]]:
    """Return the devices and the unavailable backends."""
    import ggmlb
    from ggmlb.interface.registry import Unavailable

    found, missing = list[Found](), ggmlb.interface.registry.unavailable()
    for device in ggmlb.devices():
        try:
            found.append((device.reg.name, device.props))
        except Exception as error:  # of another package's code: the other devices are listed all the same
            missing.append(Unavailable(device.name, f"its properties: {one_line(error)}", "broken"))
    return found, missing


def as_json(found: Sequence[Found], missing: Sequence[Unavailable]) -> str:
    """Return the devices and unavailable backends as JSON."""
    devices: list[dict[str, Any]] = [
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
    ]
    reasons = [{"name": m.name, "kind": m.kind, "reason": m.reason} for m in missing]
    return json.dumps({"devices": devices, "unavailable": reasons}, indent=2)


def notes() -> list[str]:
    """Return a line per backend whose devices have lower priority than others of their type, with why."""
    import ggmlb

    return [
        f"{reg.name} comes after other devices of its type: {reg.unproven}"
        for reg in ggmlb.regs()
        if reg.unproven
    ]


def memory(props: DeviceProps) -> str:
    """Format free and total memory."""
    if not props.memory_total:
        return "unknown"
    return f"{readable_size(props.memory_free)} / {readable_size(props.memory_total)}"


def reason(missing: Unavailable) -> str:
    """Return the reason why a backend is unavailable, to follow its name."""
    return f" {'is not available' if missing.kind == 'absent' else 'is broken'}: {missing.reason}"
