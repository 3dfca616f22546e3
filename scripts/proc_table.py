"""Write the columns of the table of optional functions in docs/c-api.md: which backend has which.

python scripts/proc_table.py
"""

from __future__ import annotations

import re
import sys
from importlib import import_module
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs/c-api.md"
BACKENDS = ("cpu", "llvm", "opencl", "cuda", "ggml", "ray")
HEAD = "| name | function |"


def with_columns(page: str) -> str:
    """Return the page with a column for each backend, from what its registration exports."""
    regs = [import_module(f"ggmlb.backends.{name}").backend_reg() for name in BACKENDS]
    start = page.index(HEAD)
    table, rest = page[start:].split("\n\n", 1)
    names: list[str] = []
    lines = [f"{HEAD} {' | '.join(reg.name for reg in regs)} |", "|---" * (2 + len(regs)) + "|"]
    for row in table.splitlines()[2:]:
        _, functions, text, *_ = re.split(r"(?<!\\)\|", row)
        found = re.findall(r"`(\w+)`", functions)
        names += found
        has = [all(reg.get_proc_address(name) is not None for name in found) for reg in regs]
        lines.append(f"|{functions}|{text}| {' | '.join('yes' if x else '-' for x in has)} |")
    missing = {name for reg in regs for name in reg._procs()} - {*names}
    if missing:
        sys.exit(f"docs/c-api.md has no row for {', '.join(sorted(missing))}")
    return page[:start] + "\n".join(lines) + "\n\n" + rest


if __name__ == "__main__":
    PAGE.write_text(with_columns(PAGE.read_text()))
