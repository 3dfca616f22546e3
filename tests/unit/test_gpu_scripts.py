"""What runs unattended on a machine with a card runs from end to end on the played CuPy."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from processes import python

ROOT = Path(__file__).parents[2]
PLAYED = f"{ROOT / 'tests/support/played'}{os.pathsep}{ROOT}"


def run(script: str, *args: str) -> subprocess.CompletedProcess[str]:
    return python(str(ROOT / script), *args, PYTHONPATH=PLAYED)


def test_the_tests_of_a_card_run_and_what_fails_or_ends_its_process_is_told(tmp_path: Path) -> None:
    pytest.importorskip("pyopencl")
    program = tmp_path / "test_some.py"
    program.write_text(
        "import os, pytest\npytestmark = pytest.mark.gpu\n"
        "def test_first(): pytest.fail('why' + 9000 * 'x')\n"
        "def test_second(): os._exit(1)\n"
        "def test_third(): pass\n"
    )
    chosen = "test_some or test_card_arrays or test_cuda_graphs or test_cuda_reuse or test_gpu_streams"
    done = run("scripts/test_gpu.py", "-k", chosen, str(program))
    assert done.returncode == 1
    assert re.search(r"^CUDA0: Host .*, 0000:00:00.0$", done.stdout, re.M)
    assert re.search(r"^FAILED .*test_first$", done.stdout, re.M)
    assert re.search(r"^FAILED .*test_second \(its process ended", done.stdout, re.M)
    assert "why" in done.stdout
    assert "characters ...]" in done.stdout
    told = re.search(r"^(\d+) passed, 2 failed, \d+ skipped in \d+ s$", done.stdout, re.M)
    assert told, done.stdout
    assert int(told[1]) > 25


def test_the_benchmark_of_a_card_runs_every_section(tmp_path: Path) -> None:
    pytest.importorskip("pyopencl")
    sections = "copies,elementwise,products,matmul,attention,decode"
    done = run("benchmarks/gpu.py", "--smoke", "--only", sections, "--folder", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 sections failed, 0 left out" in done.stdout


def test_the_sanitizers_tests_are_there() -> None:
    text = (ROOT / "scripts/sanitize_gpu.sh").read_text(encoding="utf-8")
    files = re.findall(r"tests/\S+\.py", text)
    assert files
    assert all((ROOT / file).is_file() for file in files)
