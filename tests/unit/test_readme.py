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
RESULTS = ROOT / "benchmarks/results"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


SHELL = [line.split("#")[0] for block in blocks("sh") for line in block.replace("\\\n", " ").splitlines()]
PYTHON = blocks("python")


def test_the_program_prints_what_is_shown(tmp_path: Path) -> None:
    """Text, whose words may differ where two are as likely, and the lines shown, in their order."""
    text, *printed = run(PYTHON[0], tmp_path).splitlines()
    assert len(text.split()) >= 4
    lines = iter(printed)
    shown = [line for line in blocks("text")[0].splitlines()[1:] if line.strip() != "..."]
    assert all(line in lines for line in shown)
    assert len(PYTHON) == 1 and len(README.split()) <= 900


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


@pytest.mark.parametrize("link", re.findall(r"\]\(([^)#]+)", README))
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
    peers = (ratios("embed_llvm_cpu.md", f"ggmlb to {peer}") for peer in ("PyTorch", "ONNX Runtime"))
    sentences = "; ".join("{:.1f}, {:.1f} and {:.1f}".format(*found) for found in peers)
    assert f"| {sentences} |" in row_of("embed_llvm_cpu.md", 3)
    steps = "; ".join(map(str, bold_ratios("train.md", "speed")))
    assert f"| {steps} |" in row_of("train.md", 3)
    decode = ratios("llvm_decode.md")
    assert f"| {min(decode):.1f} to {max(decode):.1f} |" in row_of("llvm_decode.md", 3)
    columns = ("prefill", "decode at 32")
    ((prompt,), (token,)) = (bold_ratios("generate_1.md", column) for column in columns)
    assert f"| {prompt} times as fast; {token} |" in row_of("Zen 4", 1)
    for simd, machine in (("best", "Zen 5 (AVX-512)"), ("avx2", "AVX2")):
        prompt, token = (bold_ratios("generate.md", column, simd) for column in columns)
        told = rf"\| {min(prompt)} to {max(prompt)}( times as fast)?; {min(token)} to {max(token)} \|"
        assert re.search(told, row_of(machine, 1))


def row_of(name: str, column: int) -> str:
    """The row of the README's table with a name in a column, from 1."""
    rows = [line for line in README.splitlines() if line.startswith("| ")]
    (row,) = [row for row in rows if name in row.split("|")[column] and "---" not in row]
    return row


def bold_ratios(page: str, column: str, simd: str = "") -> list[float]:
    """Ratios in bold on a page, of rows with kernels of a class."""
    lines = (RESULTS / page).read_text().splitlines()
    rows = [[cell.strip() for cell in line.split("|")] for line in lines if line[:1] == "|"]
    at = [i for i, cell in enumerate(rows[0]) if cell == column][-1]
    found = [re.findall(r"\*\*([\d.]+)", row[at]) for row in rows if simd in row]
    return [round(float(ratio), 1) for ratios in found for ratio in ratios]
