"""An install with each extra alone: links to the packages that it brings, and none of the others."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.support.processes import ROOT, python

if sys.version_info < (3, 11):
    pytest.skip("reading pyproject.toml needs Python 3.11", allow_module_level=True)

import tomllib

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
BACKENDS = {"cuda": "CUDA", "ggml": "ggml", "llvm": "LLVM", "opencl": "OpenCL", "ray": "Ray"}
"""The backend of each extra."""

PROGRAM = """
import json
import ggmlb, ggmlb.models, ggmlb.optimize, ggmlb.testing, ggmlb.cli.app
found = {device.reg.name for device in ggmlb.devices()}
with ggmlb.init_best():
    pass
print(json.dumps([sorted(found), [missing[:] for missing in ggmlb.interface.registry.unavailable()]]))
"""


def closure(requirements: list[str], found: dict[str, Distribution]) -> Iterator[str]:
    """Find the installed distributions of requirements; yield the names of others."""
    for requirement in map(Requirement, requirements):
        extras = requirement.extras or {""}
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            dist = distribution(requirement.name)
        except PackageNotFoundError:
            yield requirement.name
            continue
        if requirement.name not in found or requirement.extras:
            found[requirement.name] = dist
            needed = [Requirement(each) for each in dist.requires or ()]
            wanted = [
                r for r in needed if not r.marker or any(r.marker.evaluate({"extra": e}) for e in extras)
            ]
            for each in wanted:
                each.marker = None
            yield from closure(list(map(str, wanted)), found)


@pytest.mark.parametrize("extra", ["", "models", "onnx", *BACKENDS])
def test_an_extra_alone_lists_devices_without_warnings(extra: str, tmp_path: Path) -> None:
    base: dict[str, Distribution] = {}
    found: dict[str, Distribution] = {}
    assert not [*closure(PROJECT["dependencies"], base)]
    missing = {*closure(PROJECT["optional-dependencies"].get(extra, []), found)}
    if missing & {Requirement(each).name for each in PROJECT["optional-dependencies"].get(extra, [])}:
        pytest.skip(f"needs {', '.join(missing)}: pip install 'ggmlb[{extra}]'")
    for dist in {**base, **found}.values():
        for top in {file.parts[0] for file in dist.files or ()} - {"..", "__pycache__"}:
            link = tmp_path / top
            if not link.exists():
                link.symlink_to(Path(str(dist.locate_file(top))))
    done = python("-S", "-W", "error", "-c", PROGRAM, PYTHONPATH=os.pathsep.join([str(tmp_path), str(ROOT)]))
    assert (done.returncode, done.stderr) == (0, "")
    backends, unavailable = json.loads(done.stdout)
    assert "CPU" in backends
    assert not [reason for _, reason, kind in unavailable if kind == "broken"]
    told = {name.casefold(): reason for name, reason, _ in unavailable}
    assert extra in (*told, "", "models", "onnx", "cuda") or BACKENDS[extra] in backends
    for other in {*BACKENDS} - {extra}:
        assert re.search(rf"ggmlb\[{other}\]|the extra '{other}'", told[other]), other
