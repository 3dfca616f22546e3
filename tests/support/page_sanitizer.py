"""What JupyterLab leaves of the HTML of outputs that it does not trust.

It knows the tags, attributes and styles that the package uses, out of the list of JupyterLab 4.6
(`sanitizer.ts` of its `apputils`, for the library `sanitize-html`): a smaller list is a stricter judge. Names
and inline SVG are not on that list.
"""

from __future__ import annotations

import re
from html import escape
from html.parser import HTMLParser
from typing import Final

TAGS: Final = frozenset(("b", "div", "img", "pre", "span", "table", "td", "th", "tr"))
WITHOUT_TEXT: Final = frozenset(("option", "script", "style", "textarea"))
"""Their content goes with them; of other tags it stays."""

ATTRIBUTES: Final = {
    "img": ("alt", "height", "src", "usemap", "width"),
}
EVERYWHERE: Final = ("style", "title")

_LENGTH = r"(0|\d*\.?\d+(px|em|%))"
_FRACTION = r"(1(\.0+)?|0(\.\d+)?)"  # not `.5`, which CSS allows
_COLOUR = rf"(#[0-9a-f]+|rgba\(\d+,\d+,\d+,{_FRACTION}\))"
STYLES: Final = {
    "background": rf"none|{_COLOUR}",
    "border-bottom": rf"{_LENGTH} solid {_COLOUR}",
    "border-collapse": "collapse",
    "border-radius": _LENGTH,
    "display": "block|inline|inline-block",
    "float": "left|right",
    "font-family": r"[\w-]+(,[\w-]+)*",
    "font-size": _LENGTH,
    "font-weight": "normal|bold",
    "height": _LENGTH,
    "left": _LENGTH,
    "line-height": r"\d+(\.\d+)?",
    "margin": rf"{_LENGTH}( {_LENGTH}){{0,3}}",
    "margin-right": _LENGTH,
    "max-width": rf"none|{_LENGTH}",
    "opacity": _FRACTION,
    "position": "absolute|relative|static",
    "overflow-x": "auto|scroll|hidden|visible",
    "padding": rf"{_LENGTH}( {_LENGTH}){{0,3}}",
    "text-align": "left|right|center",
    "top": _LENGTH,
    "vertical-align": "top|middle|bottom|baseline",
    "white-space": "normal|nowrap|pre|pre-wrap",
    "width": _LENGTH,
}


class _Sanitizer(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.kept: list[str] = []
        self._dropped: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in WITHOUT_TEXT:
            self._dropped.append(tag)
        if tag in TAGS and not self._dropped:
            names = (*ATTRIBUTES.get(tag, ()), *EVERYWHERE)
            kept = ((n, _style(v or "") if n == "style" else v or "") for n, v in attrs if n in names)
            self.kept.append(f"<{tag}" + "".join(f' {n}="{escape(v)}"' for n, v in kept) + ">")

    def handle_endtag(self, tag: str) -> None:
        if tag in TAGS and not self._dropped:
            self.kept.append(f"</{tag}>")
        elif self._dropped and self._dropped[-1] == tag:
            self._dropped.pop()

    def handle_data(self, data: str) -> None:
        if not self._dropped:
            self.kept.append(escape(data))


def _style(style: str) -> str:
    rules = (rule.partition(":") for rule in style.split(";"))
    return ";".join(f"{n}:{v}" for n, _, v in rules if n in STYLES and re.fullmatch(STYLES[n], v, re.I))


def sanitized(html: str) -> str:
    """Return what is left of a notebook's output."""
    sanitizer = _Sanitizer()
    sanitizer.feed(html)
    sanitizer.close()
    return "".join(sanitizer.kept)
