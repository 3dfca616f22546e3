"""One self-contained HTML page of results: facts of the machine, charts, and a table with filters.

The page holds the data as JSON and draws it with its own script. It loads nothing from elsewhere, so it can
be kept as a CI artifact or put on a dashboard.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from ggmlb.core.errors import ArgumentError
from ggmlb.inspect.html import escape


def page(title: str, data: str) -> str:
    """Return a self-contained HTML page of results, from a heading and JSON `data`.

    Args:
        title: The heading.
        data: JSON with the facts of `About` as `run`; and either `results`, as `formats.as_json` writes them,
            or `devices`, each with `name` and `figures`.
    """
    template = files("ggmlb.testing").joinpath("page.html").read_text("utf-8")
    # "</script>" in a string would end the element; JSON has "<" in strings only.
    return template.replace("{{title}}", escape(title)).replace("{{data}}", data.replace("<", "\\u003c"))


def write_page(path: Path, title: str, data: str) -> None:
    """Write the HTML page of results to a file.

    Raises:
        ArgumentError: The file cannot be written.
    """
    try:
        path.write_text(page(title, data), encoding="utf-8")
    except OSError as error:
        raise ArgumentError(f"cannot write {path}: {error.strerror}; give another --html") from error
