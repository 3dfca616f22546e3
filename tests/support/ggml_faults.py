"""The reports of docs/ggml-faults.md, each to be run on a library of ggml's, and what each shows."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from ggmlb.backends.ggml.find import Found
from ggmlb.backends.ggml.library import QUIET
from ggmlb.system import env

PAGE = (Path(__file__).parents[2] / "docs/ggml-faults.md").read_text()
PREAMBLE = PAGE.partition("```python\n")[2].partition("```")[0]
REPORTS = {
    name: (code, shown.splitlines())
    for name, code, shown in re.findall(
        r"^## `(.*?)`$.*?```python\n(.*?)```\n+```text\n(.*?)```", PAGE, re.DOTALL | re.MULTILINE
    )
}
"""By name: the lines that show it, and what is to be found in what they print."""


def what_it_lacks(name: str, library: Found, folder: Path) -> str:
    """Return what a report does not show on a library; empty if all."""
    code, shown = REPORTS[name]
    report = folder / "report.py"
    report.write_text(PREAMBLE + code)
    command = [sys.executable, str(report), library.folder, *library.parts]
    done = subprocess.run(
        command, env=env.extended(QUIET), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        errors="replace", timeout=300, check=False,
    )  # fmt: skip
    missing = [line for line in shown if line not in done.stdout]
    return f"{missing} is not in:\n{done.stdout}" if missing else ""
