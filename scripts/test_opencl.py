"""Run ggmlb on an OpenCL runtime: golden programs, the conformance kit's behaviour, and a text embedder.

    python -m scripts.test_opencl pocl|pocl6|intel|rusticl|rusticl25|oclgrind [-k REGEX] [-j N] [--sample]

The runtime is installed in `build/opencl`, and no other program sees it. All programs that the device claims
run with the work split of GPUs, where the work-items of a group share rows and local memory, and with that of
CPUs: each gives what ggml computed. Oclgrind is a simulator of a GPU; its log must stay empty, too (it tells
of races between work-items, and of accesses outside of a buffer). With `--sample`, the programs run that
reach a kernel for the first time, with the work split of GPUs, and nothing else. It exits with 0 if all went
well, with 1 if not or if nothing ran, with 2 if the runtime cannot be installed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import ggmlb
from ggmlb.testing.perf import flops, moved_nbytes
from ggmlb.testing.programs import Case
from tests.support.golden import CASES, first_of_their_kind, wrong
from tests.support.opencl_runtimes import FOLDER, ROOT, RUNTIMES, environment, interpreter
from tests.support.outcomes import FAILED, OK, UNSUPPORTED, Outcome, Progress, run

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

TEXTS = ["a cat sat on a mat", "OpenCL runs on many machines", "x", "one two three " * 40]
LEAST_COSINE = 0.9999


def work(name: str, split: str, log: Path) -> None:
    """Run, with a runtime, the programs whose ids come on stdin; print a line of JSON for each."""
    device: Any = ggmlb.device_by_name("OpenCL0")
    if RUNTIMES[name].says not in device.description:
        sys.exit(f"OpenCL0 is {device.description}, not {name}'s")
    if RUNTIMES[name].finds_races and "race" not in (said := planted_race(device, log)):
        sys.exit(f"{name} does not find a planted race, so its silence says nothing; its log: {said!r}")
    cases = {case.id: case for case in CASES}
    with device.init_backend({"work_split": split}) as stream:
        for line in sys.stdin:
            case, before = cases[line.strip()], log.stat().st_size
            nodes = case.build().graph.nodes
            why = "; ".join(f"{n.op}: {r}" for n in nodes if (r := device.declines(n)))
            try:
                bad = "" if why else wrong([case], stream)
            except ggmlb.Error as error:
                bad = str(error)
            said = since(log, before)
            status = UNSUPPORTED if why else FAILED if bad or said else OK
            outcome = Outcome(case.id, status, why or f"{bad}\n{said[:SHOWN]}".strip())
            print(json.dumps(asdict(outcome)), flush=True)


def since(log: Path, position: int) -> str:
    """Return what was written to a log from a position [bytes] on."""
    return log.read_bytes()[position:].decode(errors="replace")


def planted_race(device: Any, log: Path) -> str:
    """Compute something with a race, and return what the runtime says of it."""
    import pyopencl as cl

    queue, before = device.transfers, log.stat().st_size
    out = cl.Buffer(device.context, cl.mem_flags.READ_WRITE, 8)
    kernel = cl.Kernel(cl.Program(device.context, RACE).build(), "race")
    kernel(queue, (2,), (2,), out)
    queue.finish()
    return since(log, before)


class Worker:
    """A process that runs programs with a runtime."""

    def __init__(self, name: str, split: str, env: dict[str, str]) -> None:
        handle, log = tempfile.mkstemp(suffix=f".{name}")
        os.close(handle)
        self._log = Path(log)
        self._command = [interpreter(name), __file__, name, "--work", split, log]
        self._env = {**env, "OCLGRIND_LOG": log}
        self._process = self._start()

    def _start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=self._env
        )

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


def cost(case: Case) -> int:
    """Return a measure of what a program computes."""
    return sum(flops(node) + moved_nbytes(node) for node in case.build().graph.nodes)


def kernels(graph: ggmlb.Graph) -> set[Any]:
    """Return the kernels that compute a graph on a GPU of OpenCL."""
    from ggmlb.backends.gpu import RULES, Target, lower

    if any(map(RULES.declines, graph.nodes)):
        return set()
    return {launch.kernel.name for node in graph.nodes for launch in lower(node, Target(False, 2, 128))}


def golden(name: str, split: str, chosen: list[str], jobs: int, env: dict[str, str]) -> bool:
    """Run programs; return whether all went well, and some ran."""
    progress = Progress(f"{name}, {split} split", len(chosen), FOLDER / f"{name}-{split}.jsonl")
    failed = [
        o.case for o in run(partial(Worker, name, split, env), chosen, jobs, progress) if o.status == FAILED
    ]
    known = {case for case in chosen if f"{split} {case}" in RUNTIMES[name].faults}
    wrong = {*failed} ^ known  # a fault that is gone is to be taken off the list
    for case in sorted(wrong):
        print(f"FAILED {case}" if case in failed else f"FAILED {case}: it passes, but is listed as a fault")
    print(f"{progress}, with the work split of {split.upper()}s; known faults: {len(known)}", flush=True)
    return not wrong and progress.counts[OK] > 0


def behaviour(name: str, env: dict[str, str]) -> bool:
    """Run the kit's mode; return whether it passed."""
    kit = [interpreter(name), "-m", "ggmlb", "test", "-d", "OpenCL0", "--mode", "behaviour", "-j", "1"]
    return subprocess.run(kit, env=env).returncode == 0


def embeds() -> bool:
    """Embed texts on OpenCL and on the CPU; return whether they are alike."""
    from ggmlb.models import BertEmbedder

    with BertEmbedder(devices=["OpenCL0"]) as ours, BertEmbedder(devices=["CPU"]) as reference:
        cosines = np.sum(ours.embed(TEXTS) * reference.embed(TEXTS), axis=1)
    print(f"MiniLM: cosine to the CPU's at least {cosines.min():.7f}", flush=True)
    return bool((cosines > LEAST_COSINE).all())


def main() -> int:
    """Run what the options choose."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runtime", choices=RUNTIMES)
    parser.add_argument("-k", "--cases", default="", help="only programs with this regular expression")
    parser.add_argument("-j", "--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--sample", action="store_true", help="a program for each kernel, and nothing else")
    parser.add_argument("--work", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--embed", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    name = options.runtime
    if options.work:
        work(name, options.work[0], Path(options.work[1]))
        return 0
    if options.embed:
        return 0 if embeds() else 1
    try:
        paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        env = {**os.environ, "PYTHONPATH": paths, **environment(name)}
    except RuntimeError as why:
        print(f"OpenCL runtime {name} cannot be installed: {why}")
        return 2
    cases = [case for case in CASES if re.search(options.cases, case.id)]
    if options.sample:
        cases = first_of_their_kind(sorted(cases, key=cost), kernels)
    chosen = [case.id for case in cases]
    splits = RUNTIMES[name].splits[: 1 if options.sample else None]
    passed = [golden(name, split, chosen, options.jobs, env) for split in splits]
    if not options.sample and not options.cases:
        passed.append(behaviour(name, env))
        passed.append(subprocess.run([interpreter(name), __file__, name, "--embed"], env=env).returncode == 0)
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
