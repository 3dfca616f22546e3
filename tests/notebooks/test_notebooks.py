"""Every notebook runs from top to bottom, and is committed with the outputs of such a run."""

from __future__ import annotations

import json
import re
import tempfile
from importlib.util import find_spec
from pathlib import Path

import nbformat
import pytest

from scripts.run_notebooks import run
from tests.support.page_sanitizer import sanitized

SAFE = {"text/plain", "text/html", "image/png"}
"""What JupyterLab shows of a notebook that it does not trust, the HTML sanitized; not SVG, nor scripts."""

PICTURE = '<img src="data:image/svg+xml;base64,'

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(path.parents[1]))
    with tempfile.TemporaryDirectory(dir="/tmp", ignore_cleanup_errors=True) as folder:
        monkeypatch.setenv("RAY_TMPDIR", folder)  # a short path, as sockets lie in it
        ran, committed = run(path), nbformat.read(path, 4)
    if find_spec("ray") is None:
        for ours, theirs in zip(ran.cells, committed.cells, strict=True):
            if "ggmlb.connect" in ours.source:
                (output,) = ours.outputs
                assert "pip install 'ggmlb[ray]'" in output.text
                ours.outputs = theirs.outputs
    assert said(ran) == said(committed)
    assert shown(ran) == shown(committed)


def said(notebook: nbformat.NotebookNode) -> list[str]:
    """What each cell prints, without figures, which are of the machine and the day."""
    printed = [
        "".join(output.text for output in cell.get("outputs", ()) if output.output_type == "stream")
        for cell in notebook.cells
    ]
    return [re.sub(r"\s+", " ", re.sub(r"-?\d+(\.\d*)?(e-?\d+)?", "0", text)) for text in printed]


def shown(notebook: nbformat.NotebookNode) -> list[list[tuple[set[str], int]]]:
    """The forms that each cell's values are shown in, and how many pictures are in their HTML."""
    return [
        [
            (set(output.data), output.data.get("text/html", "").count(PICTURE))
            for output in cell.get("outputs", ())
            if "data" in output
        ]
        for cell in notebook.cells
    ]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_its_outputs_are_committed(path: Path) -> None:
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    assert all(cell["execution_count"] for cell in cells)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    kinds = [output["output_type"] for cell in cells for output in cell["outputs"]]
    assert kinds and "error" not in kinds
    values = [output["data"] for cell in cells for output in cell["outputs"] if "data" in output]
    assert {form for data in values for form in data} <= SAFE
    html = ["".join(data["text/html"]) for data in values if "text/html" in data]
    assert [sanitized(text) for text in html] == html  # a fresh clone is not trusted


def test_the_notebooks_show_pictures() -> None:
    """The split graphs and timelines, which an untrusted page once showed as a paragraph of words."""
    n_pictures = {p.stem: sum(n for cell in shown(nbformat.read(p, 4)) for _, n in cell) for p in NOTEBOOKS}
    expected = {"quickstart": 1, "scheduler": 3, "split_model": 1}
    assert {stem: n for stem, n in n_pictures.items() if n} == expected
