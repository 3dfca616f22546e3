"""Run the tests that need a CUDA card, and say at the end what ran, and on what.

    PYTHONPATH=. python scripts/test_gpu.py [pytest's options]

Nothing is installed: CuPy, pytest and hypothesis must be there. It fails where no test ran.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TESTS = ("tests/gpu", "tests/conformance")


class Summary:
    """Counts outcomes, and keeps why tests were skipped or failed."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.outcomes: Counter[str] = Counter()
        self.skipped: Counter[str] = Counter()
        self.failed: list[str] = []

    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        """Leave other backends' tests alone: they import what a machine with a card need not have."""
        return True if collection_path.name.startswith(("test_opencl", "test_numba")) else None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count a test when it was called, or when it failed or was skipped before."""
        if report.when != "call" and report.outcome == "passed":
            return
        self.outcomes[report.outcome] += 1
        if report.outcome == "skipped":
            reason = report.longrepr[-1] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            self.skipped[str(reason)] += 1
        elif report.outcome == "failed":
            self.failed.append(report.nodeid)

    def text(self) -> str:
        """Return the summary."""
        lines = ["", "== CUDA tests ".ljust(80, "="), *cards()]
        lines += [f"skipped {n}: {why}" for why, n in self.skipped.most_common()]
        lines += [f"FAILED {name}" for name in self.failed]
        n_passed = self.outcomes["passed"]
        lines.append(
            f"{n_passed} passed, {len(self.failed)} failed, {self.outcomes['skipped']} skipped in "
            f"{time.monotonic() - self.started:.0f} s"
        )
        return "\n".join(lines)


def cards() -> list[str]:
    """Return a line for each card and for the libraries, or why there is none."""
    try:
        import cupy

        from ggmlb.backends.cuda import backend_reg

        found = [f"{d.name}: {d.description}, {d.device_id}" for d in backend_reg().devices]
        driver, runtime = cupy.cuda.runtime.driverGetVersion(), cupy.cuda.runtime.runtimeGetVersion()
        return [*found, f"CuPy {cupy.__version__}, CUDA runtime {runtime}, driver {driver}"]
    except Exception as error:
        return [f"no card: {error}"]


def main() -> int:
    """Run them."""
    summary = Summary()
    tests = [str(ROOT / folder) for folder in TESTS]
    # What CuPy itself warns of is no failure of ours.
    calm = [w for kind in ("User", "Deprecation", "Future") for w in ("-W", f"default::{kind}Warning")]
    chosen = ["-m", "gpu and not slow", "-q", "-p", "no:cacheprovider"]
    args = [*chosen, *calm, *tests, *sys.argv[1:]]
    status = int(pytest.main(args, plugins=[summary]))
    print(summary.text())
    if not summary.outcomes["passed"]:
        print("no test passed: that is a failure")
        return status or 1
    return status


if __name__ == "__main__":
    sys.exit(main())
