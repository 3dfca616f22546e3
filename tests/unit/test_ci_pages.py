"""Workflow files, ours, those of docs/ci.md, and the action: valid by their schemas, and their lines run."""

from __future__ import annotations

import json
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
from ggmlb.cli.new_backend import FILES
from tests.support.processes import python

ROOT = Path(__file__).parents[2]
GITHUB, GITLAB = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs/ci.md").read_text(), re.DOTALL)
ACTION = (ROOT / "action.yml").read_text()
TEMPLATE = (ROOT / "ggmlb/testing/template/workflow.yml").read_text()
SCHEMAS = {
    "github": ("vendor.github-workflows", GITHUB),
    "gitlab": ("vendor.gitlab-ci", GITLAB),
    "action": ("vendor.github-actions", ACTION),
    "template": ("vendor.github-workflows", TEMPLATE),
}

PROGRAMS = {
    # What installs is not run, but noted: extras must exist. A card is one that the environment names.
    "pip": 'echo "$@" >> "$NOTES"',
    "python": f"""
case "$*" in '-m pip '*) echo "$@" >> "$NOTES" ;; *) exec {sys.executable} "$@" ;; esac""",
    "apt-get": ":",
    "python3": "mkdir -p .venv/bin; : > .venv/bin/activate",
    "ggmlb": f"""
args=$(printf '%s\\n' "$@" | sed "s/^CUDA0$/$CARD/; s/^4$/2/") # of its processes too, fewer
case "$*" in test*all*) few='--limit 1 -o add,plans' ;; test*) few='-p ^add.f32' ;; *) few= ;; esac
exec {sys.executable} -m ggmlb $args $few""",
}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A stranger's repository, with programs in `bin`."""
    (tmp_path / "bin").mkdir()
    for name, text in PROGRAMS.items():
        program = tmp_path / "bin" / name
        program.write_text(f"#!/bin/sh\n{text}\n")
        program.chmod(0o755)
    return tmp_path


def status(place: Path, lines: list[str], card: str, **more: str) -> int:
    """Run lines as the platforms do, in one shell that ends at the first that fails."""
    env = {
        **os.environ, "PYTHONPATH": str(ROOT), "PATH": f"{place / 'bin'}:{os.environ['PATH']}",
        "NOTES": str(place / "notes"), "CARD": card, "GITHUB_STEP_SUMMARY": str(place / "summary.md"),
        "GITHUB_OUTPUT": str(place / "outputs"), "GGMLB": "somewhere", **more,
    }  # fmt: skip
    script = "set -eo pipefail\n" + "\n".join(lines)
    done = subprocess.run(["bash", "-c", script], cwd=place, env=env, capture_output=True, text=True)
    assert "Traceback" not in done.stderr, done.stderr
    (place / "output").write_text(done.stdout)
    return done.returncode


def filled(text: str, values: dict[str, str]) -> str:
    """A text with its `${{ expressions }}` evaluated, of which `a || b` is all that they compute."""

    def value(match: re.Match[str]) -> str:
        return next(filter(None, (values.get(of.strip(), "") for of in match[1].split("||"))), "")

    return re.sub(r"\$\{\{(.*?)\}\}", value, text)


def act(place: Path, job: str, card: str = "CPU", **changes: str) -> int:
    """Run the steps of the action as a job of the page uses it (the first of its matrix)."""
    of = YAML(typ="safe").load(GITHUB)["jobs"][job]
    matrix = of.get("strategy", {}).get("matrix", {}).get("include", [{}])[0]
    facts = {f"matrix.{name}": value for name, value in matrix.items()}
    (step,) = (s for s in of["steps"] if s.get("uses", "").startswith("OWNER/ggmlb@"))
    action = YAML(typ="safe").load(ACTION)
    assert {*step["with"], *changes} <= {*action["inputs"]}
    inputs = {name: of.get("default", "") for name, of in action["inputs"].items()}
    inputs |= {
        name: filled(str(value), {**facts, "runner.name": "mine"}) for name, value in step["with"].items()
    }
    values = {f"inputs.{name}": value for name, value in {**inputs, **changes}.items()}
    values |= {"github.action_path": str(ROOT), "runner.temp": str(place / "temp")}
    for part in action["runs"]["steps"]:
        if "run" in part:
            env = {name: filled(value, values) for name, value in part["env"].items()}
            if (found := status(place, [part["run"]], card, **env)) != 0:
                return found
    return 0


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
    bad = text + "\nstages: 7\non: 7\nruns: 7\n"
    for name, content, valid in (("good.yml", text, True), ("bad.yml", bad, False)):
        (tmp_path / name).write_text(content)
        command = ["-m", "check_jsonschema", "--builtin-schema", schema, str(tmp_path / name)]
        done = subprocess.run([sys.executable, *command], capture_output=True, text=True)
        assert (done.returncode == 0) == valid, done.stdout


def test_the_action_with_a_card(place: Path) -> None:
    """The first run writes the baseline; a later one, on a machine that was faster then, fails."""
    assert act(place, "card") == 0
    assert n_tests(place / "report.xml") >= 5
    assert "| CPU | test |" in (place / "summary.md").read_text()
    assert "<html" in (place / "report.html").read_text()
    assert f"install {ROOT}[cuda]" in (place / "notes").read_text()
    times = place / "times-mine.json"
    data = json.loads(times.read_text())
    for record in data["measured"]:
        record["samples"] = [1e-9]
    times.write_text(json.dumps(data))
    assert act(place, "card") == 1
    assert "::error title=CPU perf%3A add(" in (place / "output").read_text()


def test_the_action_without_a_card(place: Path) -> None:
    assert act(place, "card", card="CUDA99") == 0
    assert "::notice title=ggmlb::CUDA0 is missing" in (place / "output").read_text()
    assert act(place, "card", card="CUDA99", absent="fail") == 5
    assert not list(place.glob("*.xml"))


def test_the_action_on_any_runner(place: Path) -> None:
    assert act(place, "runtimes", devices="CPU", jobs="2") == 0
    assert n_tests(place / "report.xml") >= 2
    assert act(place, "runtimes", devices="CPU", mode="nonsense") == 2


def test_the_action_installs_a_backend_and_a_wheel(place: Path) -> None:
    assert act(place, "card", card="CUDA99", packages=". other", ggmlb="ggmlb.whl", extras="") == 0
    assert (place / "notes").read_text().splitlines() == [
        "-m pip install ggmlb.whl",
        "-m pip install . other",
    ]


def test_the_cache_of_several_devices_has_a_key_without_commas(place: Path) -> None:
    """GitHub's cache refuses other keys, and the job fails."""
    steps = YAML(typ="safe").load(ACTION)["runs"]["steps"]
    (names,) = (step for step in steps if step.get("id") == "cache")
    (cache,) = (step for step in steps if step.get("uses", "").startswith("actions/cache@"))
    keys = set()
    for devices in ("OpenCL0, LLVM", "OpenCL0", "ggml:CPU"):
        (place / "outputs").write_text("")
        asked = filled(names["env"]["DEVICES"], {"inputs.devices": devices})
        assert status(place, [names["run"]], "", DEVICES=asked) == 0
        name, _, value = (place / "outputs").read_text().rstrip().partition("=")
        values = {f"steps.cache.outputs.{name}": value, "runner.os": "Linux", "runner.arch": "X64"}
        assert filled(cache["with"]["key"], {**values, "github.sha": "1"}) == f"ggmlb-Linux-X64-{value}-1"
        keys.add(filled(cache["with"]["restore-keys"], values))
    assert len(keys) == 3 and not any("," in key for key in keys)


def test_a_mistyped_card_is_a_failure_everywhere(place: Path) -> None:
    assert act(place, "card", card="CDUA0") == 4
    found = status(place, [*gitlab()["before_script"], *gitlab()["script"]], "CDUA0")
    assert found not in (0, 5, *gitlab()["allow_failure"]["exit_codes"])


def test_gitlab(place: Path) -> None:
    job = gitlab()
    lines = [*job["before_script"], *job["script"]]
    assert status(place, lines, "CUDA99") in job["allow_failure"]["exit_codes"]
    assert status(place, lines, "CPU") == 0
    assert n_tests(place / job["artifacts"]["reports"]["junit"]) >= 2


def test_the_workflow_of_a_new_backend(place: Path) -> None:
    package = place / "ggmlb-mychip"
    assert python("-m", "ggmlb", "new-backend", "MyChip", cwd=place).returncode == 0
    assert all((package / file.replace("abacus", "mychip")).is_file() for file in FILES.values())
    text = (package / ".github/workflows/conformance.yml").read_text()
    steps = YAML(typ="safe").load(text)["jobs"]["conformance"]["steps"]
    lines = [
        step["run"].replace("python -m pytest", "python -m pytest --co") for step in steps if "run" in step
    ]
    paths = os.pathsep.join([str(ROOT), str(package)])
    env = {
        "PYTHONPATH": paths,
        "GGMLB_BACKEND_PATH": str(package / "ggmlb_mychip"),
        "PYTEST_ADDOPTS": "-q -p no:cacheprovider",
    }
    assert status(place, ["cd ggmlb-mychip", *lines], "CPU", **env) == 0
    assert "MyChip0 support: " in (place / "output").read_text()
    assert (place / "notes").read_text() == "install somewhere pytest .\n"


def test_what_they_install_exists(place: Path) -> None:
    extras = re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    page = (ROOT / "docs/ci.md").read_text()
    wanted = {*re.findall(r"ggmlb\[(\w+)\]", page), *re.findall(r"extras: (\w+)", page)}
    assert {"cuda", "opencl", "llvm", "ggml"} <= wanted <= {*extras}
    assert f"OWNER/ggmlb@v{ggmlb.__version__}" in GITHUB


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
