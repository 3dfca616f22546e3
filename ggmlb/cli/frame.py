"""What the commands share: where and how they print."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import TextIO

    from rich.console import Console

_UNLIMITED = 10_000
"""Columns of a console that is no terminal: a pipe or a file must get whole lines."""


def console(stream: TextIO | None = None) -> Console:
    """Return a console on `stream` (stdout by default): colours on a terminal only, whole lines elsewhere."""
    from rich.console import Console

    stream = sys.stdout if stream is None else stream
    fixed = None if stream.isatty() or "COLUMNS" in os.environ else _UNLIMITED
    return Console(file=stream, width=fixed, highlight=False)
