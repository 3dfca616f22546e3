"""README.md keeps its word: its Python runs as it stands, and the commands it shows are real."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from ggmlb.cli import main
from tests.support.processes import python

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
SMOOTH = " ".join(README.split())
RESULTS = ROOT / "benchmarks/results"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


SHELL = [line.split("#")[0] for block in blocks("sh") for line in block.replace("\\\n", " ").splitlines()]
PYTHON = blocks("python")


def test_the_first_example_prints_what_it_says(tmp_path: Path) -> None:
    told = run(PYTHON[0], tmp_path)
    assert told.startswith("(8, 1024)\n")
    assert "MUL_MAT" in told.upper()


def test_the_short_way_gives_the_same_values(tmp_path: Path) -> None:
    assert "graph_compute" in PYTHON[0]
    told = run(
        f"{PYTHON[0]}\n            long_way = y.to_numpy()\n{PYTHON[1].replace('print', 'short_way = ')}\n"
        "print(np.abs(long_way - short_way).max() < 1e-3)",
        tmp_path,
    )
    assert told.endswith("True\n")


def test_the_text_example_runs(tmp_path: Path) -> None:
    assert len(run(PYTHON[2], tmp_path).split()) >= 4


def test_the_embedding_example_runs(tmp_path: Path) -> None:
    similar = [float(number) for number in re.findall(r"-?\d+\.\d*", run(PYTHON[3], tmp_path))]
    assert similar[0] == pytest.approx(1, abs=1e-5)
    assert similar[1] > 0.5 > similar[2]


def test_there_is_no_other_python() -> None:
    assert len(PYTHON) == 4


def run(program: str, folder: Path) -> str:
    done = python("-W", "error", "-c", program, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("line", [line for line in SHELL if line.startswith("ggmlb ")])
def test_commands_and_their_options_exist(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    _, command, *rest = shlex.split(line)
    assert main([command, "--help"]) == 0
    shown = capsys.readouterr().out
    assert all(option in shown for option in rest if option.startswith("--"))


def test_make_targets_and_extras_exist() -> None:
    makefile, project = (ROOT / "Makefile").read_text(), (ROOT / "pyproject.toml").read_text()
    targets = [line.split()[1] for line in SHELL if line.startswith("make ")]
    assert targets
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)
    (extras,) = re.findall(r"Extras add the rest: (.*?)A missing extra", README, re.DOTALL)
    assert all(
        re.search(rf"^{extra} = \[", project, re.MULTILINE)
        for extra in re.findall(r"`(\w+)`", extras)
        if extra != "ggmlb"
    )


@pytest.mark.parametrize("link", re.findall(r"\]\(([^)]+)\)", README))
def test_links_lead_somewhere(link: str) -> None:
    assert (ROOT / link).exists()


def ratios(page: str, column: str = "ratio", among: str = "") -> list[float]:
    """The first such column of a page of benchmarks/results, of the rows that tell of something."""
    lines = [line for line in (RESULTS / page).read_text().splitlines() if column in line or among in line]
    rows = [[cell.strip() for cell in line.split("|")] for line in lines]
    at = next(row.index(column) for row in rows if column in row)
    return [float(row[at]) for row in rows if len(row) > at and re.fullmatch(r"[\d.]+", row[at])]


def test_figures_are_those_of_the_results() -> None:
    """Whoever records anew corrects the README as well."""
    for peer in ("PyTorch", "ONNX Runtime"):
        llvm, numpy = (ratios(page, f"ggmlb to {peer}") for page in ("embed_llvm_cpu.md", "embed.md"))
        (row,) = re.findall(rf"^\| .*{peer}.*MiniLM.*$", README, re.MULTILINE)
        assert f"{llvm[0]:.1f} and {llvm[1]:.1f} times as fast with the `LLVM` device" in row
        assert f"{numpy[0]:.1f} and {numpy[1]:.1f} times [with NumPy alone]" in row
    one, many = (ratios("llvm.md", among=f"n = {n}, LLVM_Repacked beside") for n in (1, 512))
    assert f"is {min(one):.1f} to {max(one):.1f} times as fast with one column" in SMOOTH
    assert f"{min(many):.1f} to {max(many):.1f} times with 512" in SMOOTH
    decode = ratios("llvm_decode.md")
    assert README.count(f"{min(decode):.1f} to {max(decode):.1f} times") == 2
