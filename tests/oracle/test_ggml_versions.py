"""ggml of other versions, as PyPI ships them in xllamacpp: each is probed, trusted, and computes rightly."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from ggmlb.system import env

pytestmark = [pytest.mark.oracle, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build/xllamacpp"

VERSIONS = {"0.2.14": "0.9.7", "2026.4.8672": "0.9.11", "2026.7.10068": "0.17.0"}
"""Of the package, and of its ggml; one with `GGML_BACKEND_API_VERSION` 3 is installed."""

COMPUTE = """
import ggmlb
from tests.support.golden import claimed, wrong
device = ggmlb.device_by_name("ggml:CPU")
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


@pytest.mark.parametrize("version", VERSIONS)
def test_it_computes(version: str, tmp_path: Path) -> None:
    variables = {"GGMLB_GGML_PATH": str(library(version)), "GGMLB_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", COMPUTE], cwd=ROOT, env=env.extended(variables), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == VERSIONS[version]
