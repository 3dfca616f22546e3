"""HTML for notebooks: small tables that are readable in light and in dark themes.

Colours are those of the page, more or less transparent; nothing is loaded, and nothing runs.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

_LINE = "border-bottom:1px solid rgba(128,128,128,.3)"
_CELL = f"text-align:left;padding:.15em .8em .15em 0;vertical-align:top;{_LINE}"
_SHELL = "font-family:ui-monospace,Menlo,Consolas,monospace;font-size:.9em;line-height:1.45"
LINES: Final = ("#2f6db5", "#c0731a", "#3f8f35", "#98408a", "#20837f", "#b53a3a")
"""Colours of devices in pictures, readable on light and on dark pages; they repeat."""

MAX_ROWS = 30
"""Rows of a table before the rest is counted."""


_NO_TEXT = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff\ufffe\uffff]")
"""Characters that no XML may hold, or no file."""


def escape(text: str) -> str:
    """Return any text as it stands in HTML and SVG."""
    return html.escape(_NO_TEXT.sub("\N{REPLACEMENT CHARACTER}", text))


class Raw(str):
    """Text that is HTML already."""

    __slots__ = ()


def card(title: str, facts: Mapping[str, object], *bodies: str) -> str:
    """Return a title line, facts by name, and what follows as HTML."""
    rows = "".join(
        f'<tr><td style="{_CELL};opacity:.65">{escape(name)}</td><td style="{_CELL}">{_text(value)}</td></tr>'
        for name, value in facts.items()
        if value not in ("", None)
    )
    table = f'<table style="border-collapse:collapse">{rows}</table>' if rows else ""
    return f'<div style="{_SHELL}"><b>{escape(title)}</b>{table}{"".join(bodies)}</div>'


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], n_rows: int = MAX_ROWS) -> str:
    """Return a table with a head; beyond `n_rows` rows are only counted."""
    lines = list(rows)
    head = "".join(f'<th style="{_CELL};opacity:.65;font-weight:normal">{escape(c)}</th>' for c in columns)
    body = "".join(
        "<tr>" + "".join(f'<td style="{_CELL}">{_text(value)}</td>' for value in line) + "</tr>"
        for line in lines[:n_rows]
    )
    rest = len(lines) - n_rows
    more = f'<div style="opacity:.65">and {rest} more</div>' if rest > 0 else ""
    return f'<table style="{_SHELL};border-collapse:collapse"><tr>{head}</tr>{body}</table>{more}'


def bar(part: float, label: str) -> Raw:
    """Return a bar that is filled from 0 to 1, with a label beside it."""
    percent = round(100 * min(max(part, 0.0), 1.0))
    box = "display:inline-block;vertical-align:middle;height:.7em;border-radius:.2em"
    return Raw(
        f'<span style="white-space:nowrap"><span style="{box};width:8em;margin-right:.6em;'
        'background:rgba(128,128,128,.25)">'
        f'<span style="{box};width:{percent}%;background:rgba(64,128,224,.8);float:left"></span></span>'
        f"{escape(label)}</span>"
    )


def pre(text: str) -> str:
    """Return text as it stands, in lines."""
    return f'<pre style="margin:.4em 0 0;background:none;color:inherit">{escape(text)}</pre>'


def _text(value: object) -> str:
    return value if isinstance(value, Raw) else escape(str(value))
