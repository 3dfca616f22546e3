"""The wheel and the sdist: whole, with nothing else, and usable where only they are."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import ggmlb
from ggmlb.system.env import extended

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The wheel and the sdist."""
    folder = tmp_path_factory.mktemp("dist")
    run("-m", "hatchling", "build", "-d", str(folder))
    return next(folder.glob("*.whl")), next(folder.glob("*.tar.gz"))


def run(*args: str, cwd: Path = ROOT, path: str = "") -> str:
    env = extended({"PYTHONPATH": path})
    return subprocess.run(
        [sys.executable, *args], cwd=cwd, capture_output=True, text=True, check=True, env=env
    ).stdout


def tracked(*folders: str) -> set[str]:
    """The files of the checkout that belong in a package."""
    found = (path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file())
    return {str(path.relative_to(ROOT)) for path in found if "__pycache__" not in path.parts}


def test_the_wheel_has_all_files_of_the_package_and_no_others(built: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(built[0]) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert names == tracked("ggmlb") | {"ggmlb_pytest.py"}


def test_the_sdist_can_be_tested_and_documented(built: tuple[Path, Path]) -> None:
    with tarfile.open(built[1]) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    assert tracked("ggmlb", "tests", "docs", "scripts") <= names
    assert {"LICENSE", "Makefile", "README.md", "ggmlb_pytest.py", "pyproject.toml"} <= names
    assert not any(name.startswith((".venv", "benchmarks", "notebooks", "build")) for name in names)


def test_the_metadata(built: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(built[0]) as wheel:
        (name,) = (n for n in wheel.namelist() if n.endswith("/METADATA"))
        told = Parser().parsestr(wheel.read(name).decode())
        entry = wheel.read(name.replace("METADATA", "entry_points.txt")).decode()
    assert (told["Name"], told["Version"]) == ("ggmlb", ggmlb.__version__)
    assert told["Description-Content-Type"] == "text/markdown"
    assert {"cuda", "cuda12", "opencl", "llvm", "ggml", "ray", "models"} <= set(
        told.get_all("Provides-Extra", [])
    )
    base = [line for line in told.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert sorted(line.partition(">")[0] for line in base) == [
        "ml-dtypes", "numpy", "platformdirs", "rich", "threadpoolctl", "typer",
    ]  # fmt: skip
    assert "ggmlb = ggmlb.cli:main" in entry


def test_it_works_from_the_wheel_alone(built: tuple[Path, Path], tmp_path: Path) -> None:
    with zipfile.ZipFile(built[0]) as wheel:
        wheel.extractall(tmp_path / "lib")
    path = str(tmp_path / "lib")
    where = run("-c", "import ggmlb; print(ggmlb.__file__)", cwd=tmp_path, path=path)
    assert where.startswith(path)
    assert run("-m", "ggmlb", "--version", cwd=tmp_path, path=path) == f"ggmlb {ggmlb.__version__}\n"
    run("-m", "ggmlb", "test", "-d", "OpenCL0", "-o", "sqr", "--html", "report.html", cwd=tmp_path, path=path)
    assert "<!doctype html>" in (tmp_path / "report.html").read_text()
