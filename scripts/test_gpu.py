"""Run the tests that need a CUDA card, and say at the end what the card answered, what ran, and on what.

    PYTHONPATH=. python scripts/test_gpu.py [pytest's options]

Nothing is installed: CuPy, pytest, pytest-timeout and hypothesis must be there. It exits with 0 if all tests
passed, with 1 if one failed, was left out for time, or none ran, and with 2, at once, if there is no card.

A kernel that fails breaks CUDA for its whole process, and one that hangs ends it. So the tests run in a
process of their own: where it breaks or ends, the next one goes on with the test after that.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
TESTS = ("tests/gpu/test_card_answers.py", "tests/gpu", "tests/conformance")
"""In this order: what is in doubt comes first, and is answered even if time runs out."""
BUDGET_S = 400
"""Tests that have not begun by then are left out, and counted."""
LIMIT_S = 460
"""Whatever runs then is ended, and counted as failed."""
TIMEOUT_S = 120
"""For one test; its process ends then. Tests with a limit of their own may take all the time there is."""
SHOWN = 2000
"""Characters of a failure that are shown of its beginning, and of its end."""


class Journal:
    """What happened to each test, in a file that outlives the process that ran it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.touch()

    def add(self, **facts: Any) -> None:
        """Note facts of a test."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(facts) + "\n")

    def read(self) -> dict[str, dict[str, Any]]:
        """Return the last facts of each test by its name; one that began and did not end has no outcome."""
        found: dict[str, dict[str, Any]] = {}
        for line in self._path.read_text(encoding="utf-8").splitlines():
            facts = json.loads(line)
            found.setdefault(facts["test"], {}).update(facts)
        return found


class Recorder:
    """A plugin of pytest: runs what no process ran before, and tells of failures as they come."""

    def __init__(self, journal: Journal, deadline: float) -> None:
        self._journal = journal
        self._deadline = deadline
        self._failed = False

    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        """Leave other backends' tests alone: they import what a machine with a card need not have."""
        return True if collection_path.name.startswith(("test_opencl", "test_llvm")) else None

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Leave out what has run."""
        known = self._journal.read()
        for item in items:
            if item.nodeid not in known:
                self._journal.add(test=item.nodeid)
        items[:] = [item for item in items if not known.get(item.nodeid, {}).get("began")]

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Note that a test begins, or that there is no time for more."""
        if time.time() > self._deadline:
            pytest.exit("out of time", 0)
        self._journal.add(test=item.nodeid, began=True)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a test's outcome when it was called, or when it failed or was skipped before or after."""
        if report.when != "call" and report.outcome == "passed":
            return
        why = ""
        if report.outcome == "skipped":
            why = str(report.longrepr[-1] if isinstance(report.longrepr, tuple) else report.longrepr)
        if report.outcome == "failed":
            self._failed = True
            print(f"\n-- FAILED {report.nodeid}\n{shortened(report.longreprtext)}", flush=True)
        answers = [str(text) for name, text in report.user_properties if name == "answer"]
        self._journal.add(test=report.nodeid, outcome=report.outcome, why=why, answers=answers)

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        """End the process after a failure that broke CUDA for it."""
        self._failed = False
        yield
        if self._failed and not cuda_works():
            print("\n-- CUDA is broken in this process; the next one goes on", flush=True)
            sys.stdout.flush()
            os._exit(3)


def shortened(text: str) -> str:
    """Leave out the middle of a long text: after a card is lost, the first failure tells why."""
    n_left_out = len(text) - 2 * SHOWN
    return text if n_left_out <= 0 else f"{text[:SHOWN]}\n[... {n_left_out} characters ...]\n{text[-SHOWN:]}"


def cuda_works() -> bool:
    """Whether the card still answers this process."""
    try:
        import cupy

        cupy.cuda.runtime.deviceSynchronize()
    except Exception:
        return False
    return True


def cards() -> list[str]:
    """Return a line for each card, and for the libraries.

    Raises:
        BackendError: There is none; it says why.
    """
    from ggmlb.backends.cuda import backend_reg

    found = [f"{d.name}: {d.description}, {d.device_id}" for d in backend_reg().devices]
    import cupy

    driver, runtime = cupy.cuda.runtime.driverGetVersion(), cupy.cuda.runtime.runtimeGetVersion()
    return [
        *found,
        f"Python {sys.version.split()[0]}, CuPy {cupy.__version__}, CUDA {runtime}, driver {driver}",
    ]


def run_some(journal: Path, deadline: float, options: Sequence[str]) -> int:
    """Run the tests that have not run yet, in this process."""
    # What CuPy itself warns of is no failure of ours.
    calm = [w for kind in ("User", "Deprecation", "Future") for w in ("-W", f"default::{kind}Warning")]
    limits = ["-o", f"timeout={TIMEOUT_S}", "-o", "timeout_method=thread"]
    chosen = ["-m", "gpu and not slow", "-q", "--tb=no", "--no-summary", "-p", "no:cacheprovider"]
    tests = [str(ROOT / folder) for folder in TESTS]
    recorder = Recorder(Journal(journal), deadline)
    return int(pytest.main([*chosen, *limits, *calm, *tests, *options], plugins=[recorder]))


def summary(found: dict[str, dict[str, Any]], about: list[str], seconds: float) -> tuple[str, bool]:
    """Return what to say at the end, and whether all is well."""
    failed = [name for name, facts in found.items() if facts.get("outcome") == "failed"]
    ended = [name for name, facts in found.items() if facts.get("began") and "outcome" not in facts]
    left = sum(not facts.get("began") for facts in found.values())
    outcomes = Counter(facts.get("outcome") for facts in found.values())
    skipped = Counter(facts["why"] for facts in found.values() if facts.get("outcome") == "skipped")
    answers = [text for facts in found.values() for text in facts.get("answers", ())]
    lines = ["", "== The card's answers ".ljust(80, "="), *answers] if answers else []
    lines += ["", "== CUDA tests ".ljust(80, "="), *about]
    lines += [f"skipped {n}: {why}" for why, n in skipped.most_common()]
    lines += [f"FAILED {name}" for name in failed]
    lines += [f"FAILED {name} (its process ended: it hung, or crashed)" for name in ended]
    if left:
        lines.append(f"{left} tests were left out: {BUDGET_S} s had passed, or pytest could not run")
    n_failed = len(failed) + len(ended)
    lines.append(
        f"{outcomes['passed']} passed, {n_failed} failed, {outcomes['skipped']} skipped in {seconds:.0f} s"
    )
    return "\n".join(lines), bool(outcomes["passed"]) and not n_failed and not left


def main(options: Sequence[str]) -> int:
    """Run all tests, in as many processes as that takes."""
    started = time.time()
    try:
        about = cards()
    except Exception as error:
        print(f"== CUDA tests: nothing ran, there is no card: {error}")
        return 2
    print(*about, sep="\n", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "journal"
        journal, n_before = Journal(path), -1
        while True:
            command = [sys.executable, __file__, "--some", str(path), str(started + BUDGET_S), *options]
            with contextlib.suppress(subprocess.TimeoutExpired):
                subprocess.run(command, check=False, timeout=max(1.0, started + LIMIT_S - time.time()))
            found = journal.read()
            n_run = sum(bool(facts.get("began")) for facts in found.values())
            if n_run in (n_before, len(found)) or time.time() > started + BUDGET_S:
                break
            n_before = n_run
    text, is_well = summary(found, about, time.time() - started)
    print(text)
    return 0 if is_well else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["--some"]:
        sys.exit(run_some(Path(sys.argv[2]), float(sys.argv[3]), sys.argv[4:]))
    sys.exit(main(sys.argv[1:]))
