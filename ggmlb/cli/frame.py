"""Consoles, tables and progress bars of the commands.

Names and messages come from files, drivers and other packages: their control characters are escaped
(`shown`). Tables and styled text go through a `console`, other text through `plain.echo`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from time import monotonic
from typing import TYPE_CHECKING, Literal, NamedTuple, TextIO

from ggmlb.cli import plain
from ggmlb.core.errors import shown

if TYPE_CHECKING:
    from rich.console import Console

_UNLIMITED = 10_000
"""Columns of a console that is not a terminal: lines to a pipe or file are not wrapped."""

GOOD = 24
"""Width from which on a column of text reads well; a frame is left out for it."""

LINE_S = 30.0
"""Time between lines of progress [s]."""


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


class Column(NamedTuple):
    """A column of a table.

    Attributes:
        name: Its head.
        right: Whether cells are aligned to the right, as figures are.
        wraps: Whether cells may be broken between words; others stay whole.
        drop: In a table that is too wide, columns are left out, the greatest `drop` first; 0: never.
        style: Of its cells.
    """

    name: str
    right: bool = False
    wraps: bool = False
    drop: int = 0
    style: str = ""


class Row(NamedTuple):
    """A row of a table; `style` is rich's, for the whole row."""

    cells: Sequence[str]
    style: str = ""


def print_table(
    out: Console, title: str, columns: Sequence[Column], rows: Iterable[Sequence[str] | Row]
) -> None:
    """Print a table without cutting words: if too wide, without a frame, then with fewer columns.

    A note names the columns that are left out.

    Args:
        out: The console.
        title: A line above it.
        columns: From left to right.
        rows: Cells of each row, plain text; missing ones at the end are empty.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    body = [row if isinstance(row, Row) else Row(row) for row in rows]
    texts = [
        [shown(c.name), *(shown(row.cells[i]) for row in body if i < len(row.cells))]
        for i, c in enumerate(columns)
    ]
    most = [max(map(len, column)) for column in texts]
    parts = (
        [p for t in of for p in t.split()] if c.wraps else of for c, of in zip(columns, texts, strict=True)
    )
    widths = [max(map(len, of), default=0) for of in parts]  # the least, so that no word is cut
    kept = list(range(len(columns)))
    good = [max(width, min(m, GOOD)) for width, m in zip(widths, most, strict=True)]
    is_framed = sum(good) + 3 * len(kept) + 1 <= out.width
    while not is_framed and sum(widths[i] + 1 for i in kept) - 1 > out.width:
        last = max(kept, key=lambda i: (columns[i].drop, i))
        if not columns[last].drop:
            break
        kept.remove(last)
    room = out.width - sum(widths[i] for i in kept) - (3 * len(kept) + 1 if is_framed else len(kept) - 1)
    while room > 0 and (narrow := [i for i in kept if widths[i] < most[i]]):
        widths[min(narrow, key=lambda i: widths[i] / most[i])] += 1
        room -= 1
    table = Table(
        title=Text(shown(title)),
        title_justify="left",
        box=box.HEAVY_HEAD if is_framed else box.SIMPLE_HEAD,
        padding=(0, 1) if is_framed else 0,
        show_edge=is_framed,
    )
    for i in kept:
        justify: Literal["left", "right"] = "right" if columns[i].right else "left"
        head = Text(shown(columns[i].name))
        table.add_column(head, justify=justify, style=columns[i].style, overflow="fold", width=widths[i])
    for row in body:
        cells = (Text(shown(row.cells[i])) if i < len(row.cells) else "" for i in kept)
        table.add_row(*cells, style=row.style)
    out.print(table)
    if len(kept) < len(columns):
        names = ", ".join(c.name for i, c in enumerate(columns) if i not in kept)
        out.print(Text(f"no room for {names}: take a wider terminal, or --json", style="dim"))


@contextmanager
def progress_bar(what: str, total: int) -> Iterator[Callable[[int, int], None]]:
    """Show progress on standard error: a bar on a terminal, elsewhere a line every 30 s.

    Yields:
        `progress(done, total)`.
    """
    if plain.is_quiet():
        yield lambda done, total: None
        return
    if not sys.stderr.isatty():
        yield _Lines(what)
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console(sys.stderr), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done, total: bar.update(task, completed=done, total=total)


class _Lines:
    """Progress in a log: a line every 30 s, with the estimated time left."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._start = self._last = monotonic()

    def __call__(self, done: int, total: int) -> None:
        now = monotonic()
        if now - self._last >= LINE_S and done:
            self._last = now
            left_s = (now - self._start) * (total - done) / done
            plain.note(f"{self._what}: {done:,} of {total:,}, {left_s:.0f} s left")
