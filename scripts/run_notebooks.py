"""Run the notebooks of a folder from top to bottom, each in a fresh kernel; fail at the first error.

    python scripts/run_notebooks.py notebooks [--save]

With `--save`, their outputs are written into them, to be looked at and committed.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient


def run(path: Path) -> nbformat.NotebookNode:
    """Return a notebook with the outputs of its run, without what differs from run to run for no reason."""
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(path.parent)}})
    client.execute(env={**os.environ, "GGMLB_PROGRESS": "0"})  # told where compiling is slow, or anew
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # when each cell ran
    return notebook


def main() -> None:
    """Read the arguments, and run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--save", action="store_true", help="write the outputs into the notebooks")
    args = parser.parse_args()
    paths = sorted(args.folder.glob("*.ipynb"))
    if not paths:
        parser.error(f"there is no notebook in {args.folder}")
    for path in paths:
        start = time.perf_counter()
        notebook = run(path)
        if args.save:
            nbformat.write(notebook, path)
        print(f"{path}: {len(notebook.cells)} cells in {time.perf_counter() - start:.1f} s")


if __name__ == "__main__":
    main()
