"""Pages of the project itself: files of the root, with their links as they are among the pages."""

from __future__ import annotations

import re
from collections.abc import Iterator

from scripts.pages.page import ROOT, Page

FILES = {"CHANGELOG.md": "Changelog", "CONTRIBUTING.md": "Contributing", "SECURITY.md": "Security"}


def pages() -> Iterator[Page]:
    """A page for each file."""
    for name, title in FILES.items():
        text = re.sub(r"\]\(docs/", "](../", (ROOT / name).read_text())
        for other in FILES:
            text = text.replace(f"]({other})", f"]({other.lower()})")
        yield Page(f"project/{name.lower()}", title, text)
