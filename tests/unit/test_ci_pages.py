"""Workflow files, ours and those of docs/conformance.md: valid by their schemas, and their lines run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("check_jsonschema", reason="needs check-jsonschema: pip install 'ggmlb[dev]'")

from ruamel.yaml import YAML

import ggmlb

ROOT = Path(__file__).parents[2]
GITHUB, GITLAB = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs/conformance.md").read_text(), re.DOTALL)
SCHEMAS = {"github": ("vendor.github-workflows", GITHUB), "gitlab": ("vendor.gitlab-ci", GITLAB)}

PROGRAMS = {
    # What installs is not run, but noted: extras must exist. A card is one that the environment names.
    "pip": 'echo "$@" >> "$NOTES"',
    "apt-get": ":",
    "python3": "mkdir -p .venv/bin; : > .venv/bin/activate",
    "ggmlb": f"""
args=$(printf '%s\\n' "$@" | sed "s/^CUDA0$/$CARD/; s/^4$/2/") # of its processes too, fewer
case "$*" in *all*) few='--limit 1 -o add,plans' ;; test*) few='-p ^add.f32' ;; *) few= ;; esac
exec {sys.executable} -m ggmlb $args $few""",
}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A checkout's root, with programs in `bin`."""
    (tmp_path / "bin").mkdir()
    for name, text in PROGRAMS.items():
        program = tmp_path / "bin" / name
        program.write_text(f"#!/bin/sh\n{text}\n")
        program.chmod(0o755)
    return tmp_path


def status(place: Path, lines: list[str], card: str) -> int:
    """Run lines as the platforms do, in one shell that ends at the first that fails."""
    env = {
        **os.environ, "PYTHONPATH": str(ROOT), "PATH": f"{place / 'bin'}:{os.environ['PATH']}",
        "NOTES": str(place / "notes"), "CARD": card,
    }  # fmt: skip
    script = "set -eo pipefail\n" + "\n".join(lines)
    done = subprocess.run(["bash", "-c", script], cwd=place, env=env, capture_output=True, text=True)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode


def github(job: str) -> list[str]:
    steps: list[dict[str, Any]] = YAML(typ="safe").load(GITHUB)["jobs"][job]["steps"]
    return [step["run"] for step in steps if "run" in step]


def gitlab() -> dict[str, Any]:
    job: dict[str, Any] = YAML(typ="safe").load(GITLAB)["conformance"]
    return job


def n_tests(report: Path) -> int:
    """The cases of a JUnit report; its counts must be right."""
    root = ElementTree.parse(report).getroot()
    assert root.tag == "testsuites"
    for suite in root:
        cases = suite.findall("testcase")
        assert all(case.get("name") and case.get("classname") and case.get("time") for case in cases)
        assert int(suite.attrib["tests"]) == len(cases)
        assert int(suite.attrib["failures"]) == len(suite.findall("testcase/failure")) == 0
    return len(root.findall("testsuite/testcase"))


@pytest.mark.parametrize("platform", SCHEMAS)
def test_they_are_valid(platform: str, tmp_path: Path) -> None:
    schema, text = SCHEMAS[platform]
    for name, content, valid in (("good.yml", text, True), ("bad.yml", text + "\nstages: 7\non: 7\n", False)):
        (tmp_path / name).write_text(content)
        command = ["-m", "check_jsonschema", "--builtin-schema", schema, str(tmp_path / name)]
        done = subprocess.run([sys.executable, *command], capture_output=True, text=True)
        assert (done.returncode == 0) == valid, done.stdout


def test_github_with_a_card(place: Path) -> None:
    assert status(place, github("cuda"), "CPU") == 0
    assert n_tests(place / "report.xml") >= 5


def test_github_without_a_card(place: Path) -> None:
    lines = github("cuda")
    assert status(place, lines, "CUDA99") == 5
    assert status(place, lines[:2], "CUDA99") == 0, "only what needs the card fails"
    assert not list(place.glob("*.xml"))


def test_github_on_any_runner(place: Path) -> None:
    assert status(place, github("any"), "CUDA99") == 0, "no card is no failure"
    broken = [line.replace("CUDA0", "CUDA0 --mode nonsense") for line in github("any")]
    assert status(place, broken, "CPU") == 1, "what fails otherwise does"


def test_a_mistyped_card_is_a_failure_everywhere(place: Path) -> None:
    for lines in (github("cuda"), github("any"), [*gitlab()["before_script"], *gitlab()["script"]]):
        found = status(place, lines, "CDUA0")
        assert found not in (0, 5, *gitlab()["allow_failure"]["exit_codes"])


def test_gitlab(place: Path) -> None:
    job = gitlab()
    lines = [*job["before_script"], *job["script"]]
    assert status(place, lines, "CUDA99") in job["allow_failure"]["exit_codes"]
    assert status(place, lines, "CPU") == 0
    assert n_tests(place / job["artifacts"]["reports"]["junit"]) >= 2


def test_what_they_install_exists(place: Path) -> None:
    job = gitlab()
    status(place, [*job["before_script"], github("cuda")[0], github("any")[0]], "CUDA99")
    wanted = re.findall(r"\.\[(.*?)\]", (place / "notes").read_text())
    extras = re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert len(wanted) == 3
    assert {extra for names in wanted for extra in names.split(",")} <= set(extras)


# -- the project's own -----------------------------------------------------------------------------

OWN = {
    "vendor.github-workflows": [*(ROOT / ".github/workflows").glob("*.yml")],
    "vendor.github-issue-forms": [
        ROOT / f".github/ISSUE_TEMPLATE/{name}.yml" for name in ("fault", "device")
    ],
    "vendor.github-issue-config": [ROOT / ".github/ISSUE_TEMPLATE/config.yml"],
    "vendor.citation-file-format": [ROOT / "CITATION.cff"],
}


@pytest.mark.parametrize("schema", OWN)
def test_our_own_are_valid(schema: str) -> None:
    command = ["-m", "check_jsonschema", "--builtin-schema", schema, *map(str, OWN[schema])]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True)
    assert OWN[schema] and done.returncode == 0, done.stdout


def test_our_workflows_call_what_there_is() -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    lines = [
        step["run"]
        for path in OWN["vendor.github-workflows"]
        for job in YAML(typ="safe").load(path)["jobs"].values()
        for step in job["steps"]
        if "run" in step
    ]
    assert ".ci/run" in lines
    assert {line.split()[1] for line in lines if line.startswith("make ")} <= {*targets}


def test_versions_and_requirements_are_those_of_the_project() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    recipe = (ROOT / "conda/meta.yaml").read_text()
    (block,) = re.findall(r"^dependencies = \[(.*?)^\]", project, re.MULTILINE | re.DOTALL)
    needed = {line.replace("-", "_") for line in re.findall(r'"(.*?)"', block)}
    (run,) = re.findall(r"^  run:\n(.*?)^  run_constrained", recipe, re.MULTILINE | re.DOTALL)
    told = {line.replace(" ", "") for line in re.findall(r"- (.*)", run)}
    assert told == {*needed, *(f"python{v}" for v in re.findall(r'requires-python = "(.*)"', project))}
    assert f'set version = "{ggmlb.__version__}"' in recipe
    assert f"\nversion: {ggmlb.__version__}\n" in (ROOT / "CITATION.cff").read_text()
