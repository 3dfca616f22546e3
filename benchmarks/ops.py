"""Ops one by one: ggmlb on the CPU against ggml, in one run.

Each library computes in a process of its own, so that neither's idle threads disturb the other; they take
turns, never run at the same time, and get the same data. Both run a graph of one op through their CPU
backend. The times are those of the best call of all rounds, and the ratio is ggml's divided by ours: more
than 1 is faster than ggml. The column `median` has the median of the rounds' ratios of best calls: the two
differ where the machine was busy with other work, which slows either library, ggml's spinning threads most.
The results of both are compared before anything is measured; the error (NMSE) is in the table, and a wrong
result ends the run.

    python benchmarks/ops.py [--rounds 5] [--threads 2] [--only mul_mat,add]
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from typing import TYPE_CHECKING, Any

import numpy as np
from ops_cases import CASES, Case, Ggml, Ggmlb
from report import Table, save

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

LIBRARIES: dict[str, Any] = {"ggmlb": Ggmlb, "ggml": Ggml}
LEAST = 0.2
"""The ratio below which a case needs a note."""
TURN_S = 0.15
"""How long a library computes before the other one has its turn; at least one call."""
SETTLE_S = 0.02
"""Threads of OpenMP wait by spinning for some milliseconds after the last call."""


def worker(name: str, threads: int, pipe: Connection) -> None:
    """Answer `("build", number)` with the values, `("time", None)` with seconds per call."""
    program = None
    while (task := pipe.recv()) is not None:
        what, argument = task
        if what == "build":
            if program is not None:
                program.close()
            program = LIBRARIES[name](CASES[argument], threads)
            program.run()
            pipe.send(program.values())
        else:
            pipe.send(turn(program))


def turn(program: Any) -> float:
    """The best call of a turn [s]."""
    best = float("inf")
    end = time.perf_counter() + TURN_S
    while (start := time.perf_counter()) < end:
        program.run()
        best = min(best, time.perf_counter() - start)
    return best


def error(case: Case, ours: Any, theirs: Any) -> float:
    """The normalised mean squared error; ends the run if it is too great."""
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        raise SystemExit(
            f"{case.op} {case.what}: {ours.shape} {ours.dtype}, ggml {theirs.shape} {theirs.dtype}"
        )
    x, y = ours.astype(np.float64), theirs.astype(np.float64)
    nmse = float(((x - y) ** 2).sum() / max((y**2).sum(), 1e-30))
    if not nmse <= case.nmse:
        raise SystemExit(f"{case.op} {case.what}: NMSE {nmse:.2e}, allowed are {case.nmse:.0e}")
    return nmse


def measure(case: Case, rounds: int, pipes: dict[str, Any]) -> tuple[dict[str, list[float]], float]:
    """Return seconds per call of each library, round by round, and the error."""
    for pipe in pipes.values():  # at the same time: nothing is measured yet
        pipe.send(("build", CASES.index(case)))
    nmse = error(case, *[pipe.recv() for pipe in pipes.values()])
    seconds: dict[str, list[float]] = {name: [] for name in pipes}
    for i in range(rounds):
        # Whoever goes first in one round goes last in the next.
        for name in list(pipes)[:: 1 if i % 2 else -1]:
            time.sleep(SETTLE_S)
            pipes[name].send(("time", None))
            seconds[name].append(pipes[name].recv())
    return seconds, nmse


def verdict(case: Case, ratio: float) -> str:
    target = f"{case.target:.1f}" if case.target else ""
    return target + (" (missed)" if case.target and ratio < case.target else "")


def milliseconds(seconds: list[float]) -> str:
    return f"{1e3 * min(seconds):.3g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", default="", help="names of ops; nothing is saved")
    args = parser.parse_args()
    # Read by BLAS and OpenMP when the processes start.
    os.environ.update(OMP_NUM_THREADS=str(args.threads), OPENBLAS_NUM_THREADS=str(args.threads))
    context = multiprocessing.get_context("spawn")
    pipes = {}
    processes = []
    for name in LIBRARIES:
        pipes[name], other = context.Pipe()
        process = context.Process(target=worker, args=(name, args.threads, other), daemon=True)
        process.start()
        processes.append(process)
    table = Table(
        "op", "what", "memory", "ggml [ms]", "ggmlb [ms]", "ratio", "median", "target", "NMSE", "note"
    )
    load = [os.getloadavg()[0]]
    for case in CASES:
        if args.only and case.op not in args.only.split(","):
            continue
        seconds, nmse = measure(case, args.rounds, pipes)
        ours, theirs = seconds["ggmlb"], seconds["ggml"]
        ratio = min(theirs) / min(ours)
        median = statistics.median(b / a for a, b in zip(ours, theirs, strict=True))
        figures = (milliseconds(theirs), milliseconds(ours), f"{ratio:.2f}", f"{median:.2f}")
        note = case.note if ratio < (case.target or 1) else ""
        table.row(case.op, case.what, case.storage, *figures, verdict(case, ratio), f"{nmse:.0e}", note)
        if ratio < LEAST and not note:
            print(f"{case.op} {case.what} is slower than {LEAST} times ggml, and has no note")
        load.append(os.getloadavg()[0])
    for pipe in pipes.values():
        pipe.send(None)
    for process in processes:
        process.join()
    if args.only:
        return
    about = f"""Ops on the CPU beside ggml
Made by `python benchmarks/ops.py`: {args.rounds} rounds, {args.threads} threads each. Sizes are ne. CPU_F32
is the extra buffer type that dequantises at upload; ggml has the blocks in either case. The machine was
shared: its load (of one minute, both libraries included) was {min(load):.1f} to {max(load):.1f}.

{__doc__.partition("    python")[0]}"""
    save("ops", about, table, packages=("numpy", "ggml-python"))


if __name__ == "__main__":
    main()
