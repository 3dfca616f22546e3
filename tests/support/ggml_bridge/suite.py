"""The cases of ggml's `test-backend-ops`, shared among processes, and the failures that are ggml's own."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ggmlb.backends.ggml.registration import PREFIX
from tests.support import outcomes
from tests.support.ggml_bridge import END, FAULT
from tests.support.outcomes import FAILED, OK, UNJUDGED, UNSUPPORTED, Outcome

FOLDER = Path(__file__).parents[3] / "build/ggml/lib"
"""Where `scripts/build_ggml_tests.py` puts the libraries."""

FAULTS = Path(__file__).with_name("ggml_faults.json")
"""Failures that are ggml's own, each with its reason."""

UNIT = 200
"""Cases that a worker is given at a time: the test builds all its graphs anew for each such list."""

_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_LINE = re.compile(r"^(.*?) {2}(\w+\([^()]*\)): (OK|FAIL|not supported.*)$")


def parse(line: str) -> Outcome | None:
    """Return the outcome that a line of the test tells, or `None`.

    A case during which a callback of ours raised has failed, even where ggml found the values right.
    """
    found = _LINE.match(_ANSI.sub("", line.rstrip()))
    if found is None:
        return None
    detail, case, said = found.groups()
    if said.startswith("not supported"):
        return Outcome(case, UNSUPPORTED if PREFIX in said else UNJUDGED)
    return Outcome(case, OK if said == "OK" and FAULT not in detail else FAILED, detail.strip())


class Worker:
    """A process that runs cases on a device, and is started anew when a case ends it."""

    def __init__(self, device: str, seed: int = 0, timeout_s: float = 600) -> None:
        self._device = device
        self._seed = seed
        self._timeout_s = timeout_s
        self._process: subprocess.Popen[str] | None = None

    def run(self, cases: Sequence[str]) -> Iterator[Outcome]:
        """Run cases, and give the outcomes as they come; a case that ends the process has failed."""
        left = list(cases)
        while left:
            lines: list[str] = []
            done: set[str] = set()
            for line in self._answer(",".join(left)):
                lines.append(line)
                outcome = parse(line)
                if outcome and (outcome.case not in done or outcome.status == FAILED):  # some have one name
                    done.add(outcome.case)
                    yield outcome
            if lines and lines[-1].startswith(END):
                for case in left:
                    if case not in done:
                        yield Outcome(case, FAILED, "the test did not run it")
                return
            left = [case for case in left if case not in done]
            if left:
                said = "; ".join(line.strip() for line in lines[-2:])
                yield Outcome(left.pop(0), FAILED, f"ended the process: {said}")

    def names(self) -> list[str]:
        """Return the names of all cases, each once, in the test's order."""
        process = self._start("--list")
        said, _ = process.communicate("\n")
        found = [outcome.case for line in said.splitlines() if (outcome := parse(line))]
        if END not in said or not found:
            raise RuntimeError(f"the worker for {self._device} named no cases:\n{said[-2000:]}")
        return list(dict.fromkeys(found))

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _start(self, *options: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.support.ggml_bridge.worker",
                FOLDER,
                self._device,
                str(self._seed),
                *options,
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            cwd=Path(__file__).parents[3],
            env={**os.environ, "GGML_NO_BACKTRACE": "1", "PYOPENCL_COMPILER_OUTPUT": "0"},
        )

    def _answer(self, request: str) -> Iterator[str]:
        """Send a line, and give what comes back, up to the end or the process's death."""
        if self._process is None:
            self._process = self._start()
        process = self._process
        assert process.stdin and process.stdout
        process.stdin.write(f"{request}\n")
        process.stdin.flush()
        while True:
            watch = threading.Timer(self._timeout_s, process.kill)
            watch.start()
            line = process.stdout.readline()
            watch.cancel()
            if not line:
                status = process.wait()
                self.close()
                yield f"signal {-status}" if status < 0 else f"status {status}"
                return
            yield line
            if line.startswith(END):
                return


def run(
    device: str,
    cases: Sequence[str],
    n_workers: int,
    tell: Callable[[Outcome], None] = lambda outcome: None,
    seed: int = 0,
    timeout_s: float = 600,
) -> list[Outcome]:
    """Run cases on a device in several processes.

    Args:
        device: Its name.
        cases: Names, as `Worker.names` gives them.
        n_workers: Processes.
        tell: Called with each outcome as it comes, by one thread at a time.
        seed: Of the data; a case has the same in each run with the same seed.
        timeout_s: A process that says nothing for so long is ended, and its case has failed [s].
    """
    size = min(UNIT, math.ceil(len(cases) / n_workers))
    units = [cases[i : i + size] for i in range(0, len(cases), size)]
    return outcomes.run(lambda: Worker(device, seed, timeout_s), units, n_workers, tell)


# -- faults of ggml's own --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault of ggml's: cases, as a regular expression for the whole name, and why they fail."""

    cases: str
    reason: str


def load_faults(path: Path = FAULTS) -> list[Fault]:
    """Return the faults of a data file."""
    return [Fault(**entry) for entry in json.loads(path.read_text(encoding="utf-8"))]


def judge(judged: Iterable[Outcome], faults: Sequence[Fault]) -> tuple[list[Outcome], list[str]]:
    """Return the failures that no fault explains, and what is wrong with the faults: those that have gone.

    A fault that explains a case which passes has gone, at least there, and must be taken out of the file.
    """
    unexplained, gone = [], []
    for outcome in judged:
        known = [fault for fault in faults if re.fullmatch(fault.cases, outcome.case)]
        if outcome.status == FAILED and not known:
            unexplained.append(outcome)
        if outcome.status == OK:
            gone += [f"{outcome.case} passes, which {fault.cases!r} says fails" for fault in known]
    return unexplained, gone


def unmatched(cases: Sequence[str], faults: Sequence[Fault]) -> list[str]:
    """Return a complaint for each fault that no case of the test has: its expression is out of date."""
    return [f"no case is {f.cases!r}" for f in faults if not any(re.fullmatch(f.cases, c) for c in cases)]
