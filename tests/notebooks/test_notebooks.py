"""Every notebook runs from top to bottom, and is committed with the outputs of such a run."""

from __future__ import annotations

import json
import re
from pathlib import Path

import nbformat
import pytest
from page_sanitizer import sanitized

from scripts.run_notebooks import run

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(path.parents[1]))
    assert said(run(path)) == said(nbformat.read(path, 4))


def said(notebook: nbformat.NotebookNode) -> list[str]:
    """What each cell prints, without figures, which are of the machine and the day."""
    printed = [
        "".join(output.text for output in cell.get("outputs", ()) if output.output_type == "stream")
        for cell in notebook.cells
    ]
    return [re.sub(r"\s+", " ", re.sub(r"-?\d+(\.\d*)?(e-?\d+)?", "0", text)) for text in printed]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_its_outputs_are_committed(path: Path) -> None:
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    assert all(cell["execution_count"] for cell in cells)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    kinds = [output["output_type"] for cell in cells for output in cell["outputs"]]
    assert kinds and "error" not in kinds
    html = [
        "".join(output["data"]["text/html"])
        for cell in cells
        for output in cell["outputs"]
        if "text/html" in output.get("data", ())
    ]
    assert [sanitized(text) for text in html] == html  # a fresh clone is not trusted
