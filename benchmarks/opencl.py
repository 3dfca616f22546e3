"""OpenCL beside NumPy and ggml, op by op, in one run.

Each library computes in a process of its own; they take turns and never run at the same time. The times are
medians over the rounds, of each turn's best call. NumPy has all weights as float32. A call of ggmlb is a
whole `graph_compute`: queueing the plan and waiting for it. GB/s and GFLOP/s are those of OpenCL: what the op
must move and compute, divided by its time.

    python benchmarks/opencl.py [--rounds 7] [--threads 2]
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

import numpy as np
from opencl_cases import CASES
from report import Table, save
from turns import Players

BUSY = """
**Much else ran at the same time: the ratios say little.** It slows every library, ggml's spinning
threads most. Run it again on a quiet machine before relying on it.
"""


def read_bandwidth() -> float:
    """What NumPy reads while it sums 256 MB [GB/s], by one thread."""
    memory = np.ones(1 << 26, np.float32)
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        memory.sum()
        best = min(best, time.perf_counter() - start)
    return memory.nbytes / best / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    table = Table(
        "op", "what", "memory", "OpenCL [ms]", "NumPy [ms]", "ggml [ms]", "NumPy/OpenCL", "ggml/OpenCL",
        "GB/s", "GFLOP/s", "NMSE", "limited by",
    )  # fmt: skip
    bandwidth, load = read_bandwidth(), [os.getloadavg()[0]]
    with Players("opencl_cases", args.threads) as players:
        for case in CASES:
            rounds, nmse = players.measure(case, args.rounds)
            ours, numpy, ggml = (statistics.median(rounds[name]) for name in ("OpenCL", "NumPy", "ggml"))
            table.row(
                case.op, case.what, case.storage, *(f"{1e3 * s:.3g}" for s in (ours, numpy, ggml)),
                *(f"{figure / ours:.2f}" for figure in (numpy, ggml)),
                *(f"{amount / ours:.1f}" for amount in (case.gbytes, case.gflop)),
                f"{nmse:.0e}", case.limit,
            )  # fmt: skip
            load.append(os.getloadavg()[0])
    n_cores = os.cpu_count() or 1
    busy = BUSY if max(load) > n_cores else ""
    about = f"""OpenCL beside NumPy and ggml
Made by `python benchmarks/opencl.py`: {args.rounds} rounds, {args.threads} threads each, on PoCL, an OpenCL
for CPUs: the kernels are those that GPUs run, with the work split for cores. One thread of NumPy reads
{bandwidth:.1f} GB/s. Sizes are ne. The machine was shared: its load (of one minute, all libraries included)
was {min(load):.1f} to {max(load):.1f}.

{busy}
OpenCL0_Packed keeps blocks in groups of eight with the scales in front, so that a GPU reads each eight
elements by one aligned load. On PoCL it does not pay: runs put it between as fast as plain memory and a sixth
slower. So it is offered on GPUs only, where nobody has measured it yet. What limits an op was judged
from these figures and the kernels, not from a profile.

{__doc__.partition("    python")[0]}"""
    save("opencl", about, table, packages=("numpy", "pyopencl", "ggml-python"))


if __name__ == "__main__":
    main()
