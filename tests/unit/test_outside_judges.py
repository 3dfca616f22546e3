"""`make test-ggml` and `make test-opencl` say what is missing, before they do anything."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support.processes import ROOT, python

NEEDS_TOOLS = "import build_ggml_tests; build_ggml_tests.need_tools()"


@pytest.fixture
def bare(tmp_path: Path) -> str:
    """A PATH on which nothing is found."""
    return str(tmp_path)


def test_what_the_build_of_ggml_needs_is_told(bare: str) -> None:
    done = python("-c", NEEDS_TOOLS, cwd=ROOT / "scripts", PATH=bare, CXX="")
    assert done.returncode == 2
    assert "needs cmake, g++, make: apt-get install cmake g++ make" in done.stdout


@pytest.mark.skipif(shutil.which("cmake") is None, reason="needs cmake, to be the tool that is there")
def test_only_what_is_missing_is_told(bare: str) -> None:
    (Path(bare) / "cmake").symlink_to(shutil.which("cmake") or "")
    done = python("-c", NEEDS_TOOLS, cwd=ROOT / "scripts", PATH=bare, CXX="")
    assert "needs g++, make: apt-get install g++ make" in done.stdout


def test_a_source_that_cannot_be_had_is_told(tmp_path: Path) -> None:
    code = f"""
from pathlib import Path
import build_ggml_tests
build_ggml_tests.FOLDER = Path({str(tmp_path)!r})
build_ggml_tests.download()
"""
    unreachable = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": "/dev/null"}
    done = python("-c", code, cwd=ROOT / "scripts", **unreachable)
    assert done.returncode == 2
    assert "could not download ggml's source from PyPI" in done.stdout


def test_what_an_opencl_runtime_is_made_of_is_told(bare: str, tmp_path: Path) -> None:
    code = f"""
import sys
from pathlib import Path
from scripts import test_opencl
from tests.support import opencl_runtimes
opencl_runtimes.FOLDER = Path({str(tmp_path)!r}) / "runtimes"
sys.argv = ["", "oclgrind"]
sys.exit(test_opencl.main())
"""
    done = python("-c", code, PATH=bare)
    assert done.returncode == 2, done.stderr
    assert "cannot be installed" in done.stdout and "needs apt-get" in done.stdout


def test_a_device_that_is_not_there_is_told(tmp_path: Path) -> None:
    code = f"""
import sys
sys.path.insert(0, {str(ROOT / "scripts")!r})
from pathlib import Path
from tests.support.ggml_bridge import suite
suite.FOLDER = Path({str(tmp_path)!r})
import test_ggml
sys.argv[1:] = ["-d", "LLLVM"]
print(test_ggml.main())
(suite.FOLDER / "libtest-backend-ops.so").touch()
print(test_ggml.main())
"""
    done = python("-c", code)
    assert done.returncode == 0, done.stderr
    assert "holds no test: run scripts/build_ggml_tests.py" in done.stdout
    assert "LLLVM" in done.stdout
    assert done.stdout.splitlines()[-1] == "2"
