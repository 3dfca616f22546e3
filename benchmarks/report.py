"""Tables of figures, with what is needed to read them later: date, machine, versions, revision."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Iterable
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
ZEN = {", family 25 model 17": "Zen 4", ", family 26 model 2": "Zen 5"}
"""Classes of AMD's processors that tables are of."""


class Table:
    """Rows of text in columns, written as Markdown."""

    def __init__(self, *columns: str) -> None:
        self.columns = columns
        self.rows: list[tuple[str, ...]] = []

    def row(self, *cells: object) -> None:
        """Add a row, and show it at once."""
        self.rows.append(tuple(map(str, cells)))
        print(
            "  ".join(f"{name}: {cell}" for name, cell in zip(self.columns, cells, strict=True)), flush=True
        )

    def __str__(self) -> str:
        lines = [self.columns, tuple("---" for _ in self.columns), *self.rows]
        return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def processor() -> str:
    """The processor's name, family and instruction sets, as Linux tells them."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or platform.machine()
    facts = {}
    for line in text.splitlines():
        key, _, value = line.partition(":")
        facts.setdefault(key.strip(), value.strip())
    name = facts.get("model name", platform.machine())
    if "cpu family" not in facts:
        return name
    flags = facts.get("flags", "").split()
    sets = [s for s in ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile") if s in flags]
    return f"{name}, family {facts['cpu family']} model {facts['model']} ({', '.join(sets)})"


def revision() -> str:
    """The code's revision, and whether it was changed since."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        run = subprocess.run(
            [*git, "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
        )
    except FileNotFoundError:  # a machine to run on need not have git
        return "unknown"
    return run.stdout.strip() or "unknown"


def conditions(packages: Iterable[str] = ("numpy",)) -> str:
    """One paragraph: date, revision, machine and versions."""
    versions, machine = [], processor()
    for model, zen in ZEN.items():
        machine = machine.replace(model, f" ({zen}){model}")
    for package in packages:
        try:
            versions.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            versions.append(f"{package} not installed")
    return (
        f"{datetime.date.today().isoformat()}, revision {revision()}; {machine}, {os.cpu_count()} cores; "
        f"Python {platform.python_version()}, {', '.join(versions)}."
    )


def save(
    name: str, about: str, *tables: Table, packages: Iterable[str] = ("numpy",), folder: Path = RESULTS
) -> Path:
    """Write `results/<name>.md`: what was measured, under which conditions, and the tables."""
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}.md"
    title, _, text = about.strip().partition("\n")
    body = "\n\n".join(map(str, tables))
    path.write_text(f"# {title}\n\n{conditions(packages)}\n\n{body}\n\n{text.strip()}\n")
    print(f"written to {path}")
    return path
