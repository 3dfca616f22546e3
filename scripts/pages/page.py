"""A page of the documentation that is made when it is built."""

from __future__ import annotations

from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).parents[2]


class Page(NamedTuple):
    """A page, or a file beside one.

    Attributes:
        path: Its place below docs/.
        title: Its name in the navigation; empty for a file that is no page.
        content: Markdown, or the bytes of the file.
    """

    path: str
    title: str
    content: str | bytes
