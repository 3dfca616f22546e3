"""Access to the environment variables `GGMLB_*`; each is documented in the module that uses it."""

from __future__ import annotations

import os
from collections.abc import Mapping


def text(name: str) -> str | None:
    """Return the value of an environment variable; `None` if it is unset or empty."""
    return os.environ.get(name) or None


def flag(name: str, default: bool) -> bool:
    """Return whether an environment variable is not `0`; the default if it is unset or empty."""
    value = text(name)
    return default if value is None else value != "0"


def paths(name: str) -> list[str]:
    """Return the paths in an environment variable, separated as in PATH."""
    return [path for path in (text(name) or "").split(os.pathsep) if path]


def put(name: str, value: str) -> None:
    """Set an environment variable, for this process and its children."""
    os.environ[name] = value


def extended(more: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables of this process with `more` added, for a child process."""
    return {**os.environ, **more}
