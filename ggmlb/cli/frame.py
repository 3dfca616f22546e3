"""Consoles and progress bars of the commands.

Names and messages come from files, drivers and other packages: their control characters are escaped
(`shown`). Tables and styled text go through a `console`, other text through `plain.echo`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

from ggmlb.core.errors import shown

if TYPE_CHECKING:
    from rich.console import Console

_UNLIMITED = 10_000
"""Columns of a console that is not a terminal: lines to a pipe or file are not wrapped."""


def console(stream: TextIO | None = None) -> Console:
    """Return a console on `stream` (stdout by default): colours on a terminal only, whole lines elsewhere."""
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment

    class SafeConsole(Console):
        """Console that escapes control characters in text, which rich does not."""

        def render(
            self, renderable: RenderableType, options: ConsoleOptions | None = None
        ) -> Iterator[Segment]:
            for segment in super().render(renderable, options):
                yield segment if segment.control else Segment(shown(segment.text), segment.style)

    stream = sys.stdout if stream is None else stream
    fixed = None if stream.isatty() or "COLUMNS" in os.environ else _UNLIMITED
    return SafeConsole(file=stream, width=fixed, highlight=False)


@contextmanager
def progress_bar(what: str, total: int) -> Iterator[Callable[[int, int], None] | None]:
    """Show a bar on standard error, if that is a terminal; yields `progress(done, total)`, or `None`."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console(sys.stderr), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done, total: bar.update(task, completed=done, total=total)
