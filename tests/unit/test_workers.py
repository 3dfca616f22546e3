"""Workers of pytest-xdist have nothing in common that they write, but compiled kernels as PTX."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.processes import python

pytest.importorskip("xdist", reason="needs pytest-xdist: pip install 'ggmlb[test]'")

TELLS = """
import json, os, tempfile
from pathlib import Path

def test_it():
    told = {name: os.environ.get(name) for name in NAMES}
    told["tempfile"] = tempfile.gettempdir()
    assert all(Path(folder).is_dir() for folder in told.values())
    Path(os.environ["PYTEST_XDIST_WORKER"] + ".json").write_text(json.dumps(told))
"""
NAMES = ("GGMLB_CACHE_DIR", "POCL_CACHE_DIR", "CUPY_CACHE_DIR", "XDG_CACHE_HOME", "TMPDIR")


@pytest.mark.parametrize("args", [(), ("-p", "no:cacheprovider")], ids=["kept", "not kept"])
def test_each_has_folders_of_its_own(args: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "test_tells.py").write_text(f"NAMES = {NAMES}\n{TELLS}")
    path = {"GGMLB_CACHE_DIR": "/ours", "TMPDIR": str(tmp_path)}
    command = ("-m", "pytest", "-p", "tests.conftest", "-n", "2", "--dist", "each", *args, "test_tells.py")
    done = python(*command, cwd=tmp_path, **path)
    assert done.returncode == 0, done.stdout
    told = [json.loads((tmp_path / f"gw{i}.json").read_text()) for i in range(2)]
    folders = [folder for of in told for name, folder in of.items() if name != "tempfile"]
    assert len(set(folders)) == len(folders) == 2 * len(NAMES)
    assert all(Path(folder).is_relative_to(tmp_path) for folder in folders)
    assert [of["tempfile"] for of in told] == [of["TMPDIR"] for of in told]
