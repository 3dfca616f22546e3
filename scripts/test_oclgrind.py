"""Run the golden programs on Oclgrind, a simulator of an OpenCL GPU that finds data races.

    python scripts/test_oclgrind.py [-k REGEX] [-j N]

All programs that the device claims run with the work split of GPUs, where the work-items of a group share
rows and local memory: each gives what ggml computed, and Oclgrind's log stays empty (it tells of races
between work-items, and of accesses outside of a buffer). It exits with 0 if so, with 1 if not or if nothing
ran, with 2 if Oclgrind is missing.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ggmlb
from tests.support.golden import CASES, wrong
from tests.support.outcomes import FAILED, OK, UNSUPPORTED, Outcome, Progress, run

REPORT = Path(__file__).parents[1] / "build/oclgrind.jsonl"

RACE = """
__kernel void race(__global int *out) {
    __local int shared[2];
    shared[get_local_id(0)] = get_local_id(0);
    out[get_local_id(0)] = shared[1 - get_local_id(0)]; // no barrier before it
}
"""
"""A race that must be found before anything else is believed."""

SHOWN = 1500
"""Characters of the log that are shown of a program."""


def work(log: Path) -> None:
    """Run, in Oclgrind, the programs whose ids come on stdin; print a line of JSON for each."""
    device: Any = ggmlb.device_by_name("OpenCL0")
    if "Oclgrind" not in device.description:
        sys.exit(f"OpenCL0 is {device.description}, not Oclgrind's simulator")
    if "race" not in (said := planted_race(device, log)):
        sys.exit(f"Oclgrind does not find a planted race, so its silence says nothing; its log: {said!r}")
    cases = {case.id: case for case in CASES}
    with device.init_backend({"work_split": "gpu"}) as stream:
        for line in sys.stdin:
            case, before = cases[line.strip()], log.stat().st_size
            nodes = case.build().graph.nodes
            why = "; ".join(f"{n.op}: {r}" for n in nodes if (r := device.declines(n)))
            bad = "" if why else wrong([case], stream)
            said = since(log, before)
            status = UNSUPPORTED if why else FAILED if bad or said else OK
            outcome = Outcome(case.id, status, why or f"{bad}\n{said[:SHOWN]}".strip())
            print(json.dumps(asdict(outcome)), flush=True)


def since(log: Path, position: int) -> str:
    """Return what was written to a log from a position [bytes] on."""
    return log.read_bytes()[position:].decode(errors="replace")


def planted_race(device: Any, log: Path) -> str:
    """Compute something with a race, and return what Oclgrind says of it."""
    import pyopencl as cl

    queue, before = device.transfers, log.stat().st_size
    out = cl.Buffer(device.context, cl.mem_flags.READ_WRITE, 8)
    kernel = cl.Kernel(cl.Program(device.context, RACE).build(), "race")
    kernel(queue, (2,), (2,), out)
    queue.finish()
    return since(log, before)


class Simulator:
    """A process in Oclgrind that runs programs."""

    def __init__(self) -> None:
        handle, name = tempfile.mkstemp(suffix=".oclgrind")
        os.close(handle)
        self._log = Path(name)
        self._process = self._start()

    def _start(self) -> subprocess.Popen[str]:
        # One thread for its work-groups, as processes share the cores.
        simulator = ["oclgrind", "--data-races", "--num-threads", "1", "--log", str(self._log)]
        return subprocess.Popen(
            [*simulator, sys.executable, __file__, "--work", str(self._log)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "PYOPENCL_NO_CACHE": "1", "PYOPENCL_COMPILER_OUTPUT": "0"},
        )  # fmt: skip

    def run(self, case: str) -> Iterator[Outcome]:
        """Give what happened to a program."""
        assert self._process.stdin and self._process.stdout
        try:
            self._process.stdin.write(f"{case}\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if line:
            yield Outcome(**json.loads(line))
            return
        status, said = self._process.wait(), self._log.read_text(encoding="utf-8", errors="replace")
        self._process = self._start()
        yield Outcome(case, FAILED, f"the process ended with {status}\n{said[:SHOWN]}")

    def close(self) -> None:
        """End the process, and take its log away."""
        self._process.kill()
        self._process.communicate()
        self._log.unlink()


def main() -> int:
    """Run what the options choose."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "-k", "--cases", default="", help="only programs with this regular expression in their ids"
    )
    parser.add_argument(
        "-j", "--jobs", type=int, default=os.cpu_count(), help="processes (default: one a core)"
    )
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options.work)
        return 0
    if shutil.which("oclgrind") is None:
        print("make test-oclgrind needs the program oclgrind, and does not find it: apt-get install oclgrind")
        return 2
    chosen = [case.id for case in CASES if re.search(options.cases, case.id)]
    progress = Progress("Oclgrind", len(chosen), REPORT)
    failed = [o.case for o in run(Simulator, chosen, options.jobs, progress) if o.status == FAILED]
    for case in failed:
        print(f"FAILED {case}")
    print(f"{progress}, with the work split of GPUs")
    return 1 if failed or not progress.counts[OK] else 0


if __name__ == "__main__":
    sys.exit(main())
