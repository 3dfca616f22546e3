"""About: machine, software versions and devices of a run, for its report."""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import ggmlb
from ggmlb.core.errors import one_line
from ggmlb.interface import BackendReg, Device

DRIVER = "driver_version"
"""Optional function of `BackendReg.get_proc_address`: a device's driver and version."""


@dataclass(frozen=True, slots=True)
class About:
    """The machine, software and devices of a run.

    Attributes:
        hostname: The machine's name.
        date: When the run began, as `2026-11-23T04:05:06+00:00`.
        software: Versions, by name: of ggmlb with its revision, of Python and of the system.
        devices: Facts of each device, by its name: `description`, `driver`, `backend`, ...
        unfinished: The progress of a run that was stopped.
    """

    hostname: str = ""
    date: str = ""
    software: dict[str, str] = field(default_factory=dict)
    devices: dict[str, dict[str, str]] = field(default_factory=dict)
    unfinished: str = ""

    @classmethod
    def here(cls, devices: Iterable[Device] = ()) -> About:
        """Return the facts of a run on this machine (host, date, software) and on `devices`."""
        software = {
            "version": ggmlb.__version__,
            "revision": revision(),
            "python": platform.python_version(),
            "platform": platform.platform(),
        }
        date = datetime.now(timezone.utc).isoformat(timespec="seconds")
        return cls(platform.node(), date, software, {device.name: facts_of(device) for device in devices})

    def of(self, device: str) -> dict[str, str]:
        """Return the software versions of the run, and the facts of the device named `device`."""
        return {**self.software, **self.devices.get(device, {})}

    def as_dict(self) -> dict[str, Any]:
        """Return all facts of the run as a dictionary, for JSON."""
        stopped = {"unfinished": self.unfinished} if self.unfinished else {}
        return {
            "hostname": self.hostname,
            "date": self.date,
            **self.software,
            **stopped,
            "devices": self.devices,
        }


def facts_of(device: Device) -> dict[str, str]:
    """Return a device's name, description, type, backend, driver and features, as texts."""
    reg = device.reg
    return {
        "device": device.name,
        "description": _text_of(lambda: device.description),
        "type": device.type.value,
        "backend": f"{reg.name} {_version_of(type(reg).__module__)}".strip(),
        "driver": _text_of(lambda: _answer(reg, DRIVER, device)) or "none",
        "features": _text_of(
            lambda: ", ".join(" ".join(of) for of in _answer(reg, "get_features", reg) or ())
        ),
    }


def _answer(reg: BackendReg, name: str, of: object) -> Any:
    """Return the result of an optional function of a backend; `None` if there is none."""
    ask = reg.get_proc_address(name)
    return None if ask is None else ask(of)


def _text_of(ask: Callable[[], Any]) -> str:
    """Return an answer as text, or the error's message, so that a faulty backend can still be tested."""
    try:
        return str(ask() or "")
    except Exception as error:
        return f"unknown: {one_line(error)}"


@cache
def revision() -> str:
    """Return ggmlb's commit from pip or git; `"unknown"` if neither has it."""
    try:
        origin = json.loads(metadata.distribution("ggmlb").read_text("direct_url.json") or "{}")
        if commit := origin.get("vcs_info", {}).get("commit_id"):
            return str(commit)
    except (metadata.PackageNotFoundError, ValueError, AttributeError):
        pass
    root = Path(ggmlb.__file__).parents[1]
    if not (root / ".git").exists():  # a git repository further up is another project's
        return "unknown"
    git = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip() or "unknown"
    except OSError:
        return "unknown"


@cache
def _version_of(module: str) -> str:
    """Return the version of a module's package; empty if it is in none."""
    package = module.partition(".")[0]
    if package == "ggmlb":
        return ggmlb.__version__
    for name in metadata.packages_distributions().get(package, ()):
        return metadata.version(name)
    return ""
