"""HTML for notebooks: tables and drawings that are readable in light and dark themes.

Colours are the page's, with transparency; there are no scripts and no external resources. JupyterLab passes
outputs that the user has not run (as in a fresh clone) through a sanitizer. This HTML passes it unchanged: no
inline SVG, fractions with leading zero (`0.3`), and only allowed tags, attributes and styles.
"""

from __future__ import annotations

import html
import re
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from ggmlb.interface.memory_table import MemoryReport

_LINE = "border-bottom:1px solid rgba(128,128,128,0.3)"
_CELL = f"text-align:left;padding:.15em .8em .15em 0;vertical-align:top;{_LINE}"
_PALE = "opacity:0.65"
_SHELL = "font-family:ui-monospace,Menlo,Consolas,monospace;font-size:.9em;line-height:1.45"
LINES: Final = ("#2f6db5", "#c0731a", "#3f8f35", "#98408a", "#20837f", "#b53a3a")
"""Colours of devices in drawings, readable on light and dark pages; repeated for more devices."""

MAX_ROWS = 30
"""Maximum rows of a table; of further rows, only the number is shown."""


_NO_TEXT = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff\ufffe\uffff]")
"""Characters not allowed in XML or not encodable."""


def escape(text: str) -> str:
    """Escape a text for HTML and SVG."""
    return html.escape(_NO_TEXT.sub("\N{REPLACEMENT CHARACTER}", text))


class Raw(str):
    """Text that is already HTML."""

    __slots__ = ()


def card(title: str, facts: Mapping[str, object], *bodies: str) -> str:
    """Return HTML: a title, a table of `facts`, then the `bodies`, which are HTML already."""
    rows = "".join(
        f'<tr><td style="{_CELL};{_PALE}">{escape(name)}</td><td style="{_CELL}">{_text(value)}</td></tr>'
        for name, value in facts.items()
        if value not in ("", None)
    )
    table = f'<table style="border-collapse:collapse">{rows}</table>' if rows else ""
    return f'<div style="{_SHELL}"><b>{escape(title)}</b>{table}{"".join(bodies)}</div>'


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], n_rows: int = MAX_ROWS) -> str:
    """Return an HTML table with a header; rows beyond `n_rows` are omitted, but counted."""
    lines = list(rows)
    head = "".join(f'<th style="{_CELL};{_PALE};font-weight:normal">{escape(c)}</th>' for c in columns)
    body = "".join(
        "<tr>" + "".join(f'<td style="{_CELL}">{_text(value)}</td>' for value in line) + "</tr>"
        for line in lines[:n_rows]
    )
    rest = len(lines) - n_rows
    more = f'<div style="{_PALE}">and {rest} more</div>' if rest > 0 else ""
    return f'<table style="{_SHELL};border-collapse:collapse"><tr>{head}</tr>{body}</table>{more}'


def memory_table(report: MemoryReport) -> str:
    """Return an HTML table of a scheduler's memory: planned (forecast) and allocated bytes."""
    rows = [(a.device, a.memory, a.kind, f"{a.nbytes:,}", f"{b.nbytes:,}") for a, b in report.rows()]
    rows.append(("all", "", "", f"{report.forecast.total():,}", f"{report.allocated.total():,}"))
    return table(("device", "memory", "contents", "forecast", "allocated"), rows)


def bar(part: float, label: str) -> Raw:
    """Return a bar filled to `part` (0 to 1), with a label beside it."""
    percent = round(100 * min(max(part, 0.0), 1.0))
    box = "display:inline-block;vertical-align:middle;height:.7em;border-radius:.2em"
    return Raw(
        f'<span style="white-space:nowrap"><span style="{box};width:8em;margin-right:.6em;'
        'background:rgba(128,128,128,0.25)">'
        f'<span style="{box};width:{percent}%;background:rgba(64,128,224,0.8);float:left"></span></span>'
        f"{escape(label)}</span>"
    )


def pre(text: str) -> str:
    """Return preformatted text."""
    return f'<pre style="margin:.4em 0 0;background:none">{escape(text)}</pre>'


@dataclass(slots=True)
class Picture:
    """An SVG drawing with tooltips.

    A notebook shows it as an image under transparent elements with titles, because sanitizers remove
    inline SVG and image maps, and an SVG in an image shows no `<title>`. An image does not inherit the
    page's colours: use tones that are readable on light and dark pages.

    Attributes:
        width: Width [pixels].
        height: Height [pixels].
        parts: SVG elements, in drawing order.
        tips: Left, top, width and height [pixels] of an area, and its text; the first that matches is shown.
    """

    width: float
    height: float
    parts: list[str] = field(default_factory=list)
    tips: list[tuple[float, float, float, float, str]] = field(default_factory=list)

    def svg(self) -> str:
        """Return the drawing as an SVG file; its tooltips are titles of transparent areas."""
        areas = [
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" height="{h:.1f}" fill="none" '
            f'pointer-events="all"><title>{escape(text)}</title></rect>'
            for x, y, w, h, text in reversed(self.tips)  # the pointer gets the last that is drawn
        ]
        return self._svg(areas)

    def html(self, description: str) -> str:
        """Return the drawing for a notebook; the description is the image's alternative text."""
        image = b64encode(self._svg([]).encode()).decode()
        areas = "".join(
            f'<span title="{escape(text)}" style="position:absolute;left:{x:.1f}px;top:{y:.1f}px;'
            f'width:{max(w, 2):.1f}px;height:{h:.1f}px"></span>'
            for x, y, w, h, text in reversed(self.tips)
        )
        # Not scaled to the page's width, because the areas would not scale with it.
        return (
            '<div style="overflow-x:auto"><div style="position:relative">'
            f'<img src="data:image/svg+xml;base64,{image}" alt="{escape(description)}" '
            f'style="display:block;max-width:none;margin:0">{areas}</div></div>'
        )

    def _svg(self, areas: list[str]) -> str:
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width:.0f} {self.height:.0f}" '
                f'width="{self.width:.0f}" height="{self.height:.0f}" '
                f'font-family="ui-monospace, Menlo, Consolas, monospace" font-size="11">',
                *self.parts,
                *areas,
                "</svg>",
            ]
        )


def _text(value: object) -> str:
    return value if isinstance(value, Raw) else escape(str(value))
