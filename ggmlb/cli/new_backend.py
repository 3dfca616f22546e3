"""`ggmlb new-backend`: a package with the least backend, its tests and a workflow."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Final

import typer

from ggmlb.cli import plain
from ggmlb.core.errors import ArgumentError

FILES: Final = {
    "pyproject.toml": "pyproject.toml",
    "README.md": "README.md",
    "__init__.py": "ggmlb_abacus/__init__.py",
    "tests.py": "tests/test_conformance.py",
    "workflow.yml": ".github/workflows/conformance.yml",
}
"""Files of `ggmlb.testing.template`, and where they are in a package."""

NAME: Final = re.compile(r"[A-Za-z]\w*[A-Za-z]", re.ASCII)


def new_backend(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the backend; its device is NAME0.")],
    output: Annotated[
        Path | None,
        typer.Option("--output", metavar="DIR", help="Folder to create (default: ggmlb-NAME, lower case)."),
    ] = None,
) -> None:
    """Write a package with a backend: pyproject, the least device, tests by pytest, a GitHub workflow.

    The device adds, multiplies and squares float32, and passes the conformance kit.

    Examples:
      ggmlb new-backend MyChip
      ggmlb new-backend MyChip --output ~/src/mychip
    """
    from importlib.resources import files

    from ggmlb.interface.registry import regs, unavailable

    if not NAME.fullmatch(name):
        raise ArgumentError(
            f"{name!r} cannot be a backend's name: it must begin and end with a letter, "
            "with letters, digits and _ between them, as in MyChip"
        )
    taken = {of.casefold() for of in (*(r.name for r in regs()), *(m.name for m in unavailable()))}
    if name.casefold() in taken:
        raise ArgumentError(f"there is a backend {name} already; give another name")
    folder = Path(f"ggmlb-{name.lower()}") if output is None else output
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ArgumentError(f"{folder} exists; give another folder by --output")
    template = files("ggmlb.testing.template")
    for file, place in FILES.items():
        text = template.joinpath(file).read_text("utf-8")
        path = folder / place.replace("abacus", name.lower())
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.replace("Abacus", name).replace("abacus", name.lower()), encoding="utf-8")
    plain.echo(f"{folder} has the backend {name}. Next:")
    plain.echo(f"  cd {folder}\n  pip install --no-build-isolation --no-deps -e .\n  python -m pytest")
    plain.echo(f"  ggmlb test -d {name}0 --mode all")
