"""Pages of the gallery: each program of docs/gallery, and what it prints."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from scripts.pages.page import ROOT, Page


def pages() -> Iterator[Page]:
    """The list of programs, then a page for each."""
    found, rows = [], []
    for path in sorted((ROOT / "docs/gallery").glob("*.py")):
        program = path.read_text()
        tree = ast.parse(program)
        title, _, about = str(ast.get_docstring(tree)).partition("\n")
        title = title.rstrip(".")
        code = "\n".join(program.splitlines()[tree.body[0].end_lineno :]).strip()
        printed = path.with_suffix(".txt").read_text().rstrip()
        text = (
            f"# {title}\n\n{about.strip()}\n\n```python\n{code}\n```\n\nIt prints:\n\n"
            f"``` {{ .text .output }}\n{printed}\n```\n\n[Download {path.name}]({path.name})\n"
        )
        found.append(Page(f"gallery/{path.stem}.md", title, text))
        rows.append(f"- [{title}]({path.stem}.md)")
    about = "Short programs, each run by the tests, which compare what it prints with its page."
    yield Page("gallery/index.md", "All programs", f"# Gallery\n\n{about}\n\n" + "\n".join(rows) + "\n")
    yield from found
