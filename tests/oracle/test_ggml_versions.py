"""ggml of other versions, as PyPI ships them: each is probed, trusted, and computes rightly."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from ggmlb.backends.ggml.find import PACKAGES, libraries
from ggmlb.system import env

pytestmark = [pytest.mark.oracle, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build/xllamacpp"

VERSIONS = {"0.2.14": "0.9.7", "2026.4.8672": "0.9.11", "2026.7.10068": "0.17.0"}
"""Of the package, and of its ggml; one with `GGML_BACKEND_API_VERSION` 3 is installed."""

COMPUTE = """
import sys
import ggmlb
from tests.support.golden import claimed, wrong
of = sys.argv[1]
device = next(d for d in ggmlb.devices() if d.name.startswith("ggml") and d.is_cpu and of in d.description)
print(device.library.version)
with device.init_backend() as stream:
    for family in ("norm", "rope", "softmax", "unary", "flash_attn", "mul_mat_id"):
        cases = claimed(device, family)
        assert len(cases) >= 12, family
        assert not (why := wrong(cases, stream)), why
"""


def library(version: str) -> Path:
    """Return the file of a version, downloaded once."""
    folder = FOLDER / version
    if not list(folder.glob("xllamacpp/*.so")):
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--no-deps",
            "--only-binary",
            ":all:",
            "-d",
            str(folder),
        ]
        done = subprocess.run([*command, f"xllamacpp=={version}"], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"xllamacpp {version} cannot be downloaded: {done.stderr[-300:]}")
        for wheel in folder.glob("*.whl"):
            zipfile.ZipFile(wheel).extractall(folder)
    return next(folder.glob("xllamacpp/*.so"))


def run(code: str, of: str, **variables: str) -> str:
    """Return what code prints in a process of its own."""
    command = [sys.executable, "-c", code, of]
    done = subprocess.run(command, cwd=ROOT, env=env.extended(variables), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


@pytest.mark.parametrize("version", VERSIONS)
def test_it_computes(version: str, tmp_path: Path) -> None:
    path = str(library(version))
    assert run(COMPUTE, path, GGMLB_GGML_PATH=path, GGMLB_CACHE_DIR=str(tmp_path)) == VERSIONS[version]


@pytest.mark.parametrize("package", [name for name, *_ in PACKAGES])
def test_a_package_computes(package: str, tmp_path: Path) -> None:
    if not any(found.origin.startswith(package) for found in libraries()):
        pytest.skip(f"{package} is not installed")
    assert run(COMPUTE, f"({package} ", GGMLB_CACHE_DIR=str(tmp_path))


MIXED = """
import numpy as np
import ggmlb
devices = [d for d in ggmlb.devices() if d.name.startswith("ggml") and d.is_cpu][:2]
first, second, cpu = (d.init_backend() for d in (*devices, ggmlb.device_by_name("CPU")))
ctx = ggmlb.Context()
x = ctx.new_tensor("f32", (64, 4))
steps = [x]
for i in range(6):
    steps.append(ctx.silu(steps[-1]) if i % 2 else ctx.rms_norm(steps[-1], 1e-5))
graph = ggmlb.Graph().build_forward_expand(steps[-1])
found = []
with ggmlb.alloc_ctx_tensors(ctx, cpu):
    x.set_array(np.random.default_rng(0).standard_normal((4, 64)))
    for home in ((first, second), (cpu, cpu)):
        for i in range(len(graph.nodes)):
            home[i % 2].graph_compute(graph.view(i, i + 1))
        found.append(steps[-1].to_numpy().copy())
np.testing.assert_allclose(*found, rtol=1e-3, atol=1e-4)
print(*(d.library.version for d in devices))
"""


def test_two_libraries_compute_one_graph(tmp_path: Path) -> None:
    """By turns, in memory that each of them reads and writes."""
    if len(libraries()) < 2:
        pytest.skip("one library is installed")
    first, second = run(MIXED, "", GGMLB_CACHE_DIR=str(tmp_path)).split()
    assert first != second
