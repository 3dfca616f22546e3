"""Run every notebook of a folder from top to bottom, in a fresh kernel, and fail at the first error."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient

paths = sorted(Path(sys.argv[1]).glob("*.ipynb"))
if not paths:
    sys.exit(f"there is no notebook in {sys.argv[1]}")
for path in paths:
    start = time.perf_counter()
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(path.parent)}}).execute()
    print(f"{path}: {len(notebook.cells)} cells in {time.perf_counter() - start:.1f} s")
