"""Laziness, proved in a fresh process: what an import or a look-up pulls in, and what it must not."""

from __future__ import annotations

import json
import platform
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import ggmlb
from tests.support.processes import python

HEAVY = {
    "cupy",
    "gguf",
    "hypothesis",
    "llvmlite",
    "ml_dtypes",
    "pyopencl",
    "rich",
    "safetensors",
    "tokenizers",
    "typer",
}


def modules_after(program: str) -> dict[str, Any]:
    """Run a program in a fresh interpreter; return the modules it loaded, and its time [s]."""
    code = f"""
import json, sys, time
import numpy
start = time.perf_counter()
{program}
took_s = time.perf_counter() - start
top = sorted({{name.partition(".")[0] for name in sys.modules}})
print(json.dumps({{"top": top, "all": sorted(sys.modules), "took_s": took_s}}))
"""
    done = python("-c", code)
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told


def test_import_loads_numpy_and_nothing_heavier(record_property: pytest.RecordProperty) -> None:
    told = modules_after("import ggmlb")
    assert not HEAVY & set(told["top"])
    assert not [m for m in told["all"] if m.startswith("ggmlb.backends.")]
    assert "importlib.metadata" not in told["all"]  # reading entry points waits for the first look-up
    record_property("import_s", told["took_s"])


def test_the_cpu_needs_no_other_backend() -> None:
    told = modules_after("import ggmlb; ggmlb.init_by_name('CPU').free()")
    assert not {"cupy", "pyopencl"} & set(told["top"])
    assert "ggmlb.backends.cpu" in told["all"]
    assert "ggmlb.backends.opencl" not in told["all"]
    assert "ggmlb.backends.cuda" not in told["all"]


def test_opening_llvm_imports_little_else() -> None:
    pytest.importorskip("llvmlite")
    told = modules_after("import ggmlb; ggmlb.init_by_name('LLVM').free()")
    for late in ("importlib.metadata", "ggmlb.backends.cpu.ops", "ggmlb.inspect.draw", "ggmlb.parallel.meta"):
        assert late not in told["all"]


def test_what_is_imported_late_is_there_when_asked_for() -> None:
    modules_after("""
import sys, ggmlb
assert "ggmlb.parallel.meta" not in sys.modules and "split_evenly" in dir(ggmlb)
assert ggmlb.split_evenly is sys.modules["ggmlb.parallel.meta"].split_evenly
assert "<table" in ggmlb.Context()._repr_html_()
try:
    ggmlb.nothing
except AttributeError as error:
    assert "nothing" in str(error)
else:
    raise AssertionError
""")


@pytest.mark.skipif(
    platform.machine() != "x86_64" or sys.platform != "linux", reason="LLVM loads the code of others"
)
def test_kernels_on_disk_need_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("llvmlite")
    monkeypatch.setenv("GGMLB_CACHE_DIR", str(tmp_path))
    program = """
import ggmlb
ctx = ggmlb.Context()
x = ctx.new_tensor("f32", (64, 4))
with ggmlb.init_by_name("LLVM") as backend, ggmlb.alloc_ctx_tensors(ctx, backend):
    x.set_array(numpy.ones((4, 64), "f"))
    assert (ggmlb.evaluate(ctx.silu(x), devices=["LLVM", "CPU"]) > 0.7).all()
"""
    compiled, found = (set(modules_after(program)["all"]) for _ in range(2))
    assert "llvmlite.binding" in compiled - found


def test_help_needs_no_library() -> None:
    told = modules_after("from ggmlb.cli import main; main(['--help']); main(['devices', '--help'])")
    assert not {"cupy", "gguf", "pyopencl", "safetensors", "tokenizers"} & set(told["top"])


def test_a_command_imports_no_other() -> None:
    told = set(modules_after("from ggmlb.cli import main; main(['generate', '--help'])")["all"])
    assert "ggmlb.cli.generate" in told
    assert not {"ggmlb.cli.bench", "ggmlb.cli.show", "ggmlb.models", "jinja2", "ggmlb.backends.llvm"} & told


def test_public_names() -> None:
    assert ggmlb.__all__ == sorted(ggmlb.__all__)
    assert all(hasattr(ggmlb, name) for name in ggmlb.__all__)
    hidden = {n for n, v in vars(ggmlb).items() if not n.startswith("_") and not isinstance(v, ModuleType)}
    assert hidden <= set(ggmlb.__all__)
