"""A golden program for each kernel on OpenCL runtimes beside PoCL, with the work split of GPUs."""

from __future__ import annotations

import sys

import pytest

from tests.support.processes import ROOT, python

pytest.importorskip("pyopencl", reason="needs pyopencl: pip install 'ggmlb[opencl]'")
pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the runtimes are Linux's"),
]


@pytest.mark.parametrize("name", ["intel", "rusticl", "oclgrind"])
def test_each_kernel_runs(name: str) -> None:
    done = python("-m", "scripts.test_opencl", name, "--sample", "-j", "1", cwd=ROOT)
    if done.returncode == 2 and "cannot be installed" in done.stdout:
        pytest.skip(done.stdout.splitlines()[-1])
    assert done.returncode == 0, done.stdout + done.stderr
