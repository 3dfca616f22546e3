"""The LLVM device beside ggml, op by op, in one run.

As `ops.py` does it: two processes that take turns, with the same data and threads; results are compared
before anything is measured. The column `ratio` is the median of the rounds' ratios of best calls. `GB/s` is
the weight's or cache's bytes over our time; the machine's own reading speed is below the table, by a loop of
vector loads over as many threads. ggml's weights lie in its plain memory, but where a row says "beside
CPU_REPACK" or "beside AMX": these kinds of memory are to ggml what LLVM_Repacked is here. Parts can be run
apart, each in less than two minutes; the page holds what was last measured of each.

    python benchmarks/llvm_ops.py [--rounds 3] [--threads 2] [--parts n1,n2,ops]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from llvm_cases import PARTS, K, M
from ops import milliseconds, verdict
from ops_cases import Case
from report import Table, save
from turns import Players

from ggmlb.core.dtypes import DType

if TYPE_CHECKING:
    from ggmlb.backends.llvm.codegen.emit import Kernel

MEASURED = Path(tempfile.gettempdir()) / "ggmlb_llvm_ops_{}.json"
"""What was measured so far, by the number of threads."""
COLUMNS = ("op", "what", "ggml [ms]", "ggmlb [ms]", "ratio", "target", "GB/s", "NMSE")
READ_MIB = (64, 512)
CLOCK = "Times are of the processor, which that work disturbs less."


def read(k: Kernel) -> None:
    """Add up vectors: address, bytes, where to put the sums."""
    from ggmlb.backends.llvm.codegen.value import I32, vec

    n = k.level.lanes
    address, nbytes, to = k.ints(3)
    sums = [k.variable(k.const(vec(I32, n), 0)) for _ in range(4)]
    first, last = nbytes * k.chunk // k.n_chunks, nbytes * (k.chunk + 1) // k.n_chunks
    with k.loop(first, last, 16 * n) as i:
        for j, slot in enumerate(sums):
            slot.set(slot.now + k.load(vec(I32, n), address + i + 4 * n * j))
    k.store(sums[0].now + sums[1].now + sums[2].now + sums[3].now, to + k.chunk * 64)


def read_speed(threads: int, nbytes: int) -> float:
    """The best speed of reading memory [GB/s]."""
    from ggmlb.backends.llvm.codegen.library import library
    from ggmlb.backends.llvm.pool import Pool

    memory, sums = np.ones(nbytes + 4096, np.uint8), np.zeros(1024, np.uint8)
    args = np.array([memory.ctypes.data, nbytes, sums.ctypes.data], np.int64)
    table = np.array([[library().address(read), args.ctypes.data, 8]], np.int64)
    pool, best = Pool(threads, library()), float("inf")
    clock = time.thread_time if threads == 1 else time.perf_counter
    for _ in range(20):
        start = clock()
        pool.run(table.ctypes.data, 0, 1, True)
        best = min(best, clock() - start)
    pool.free()
    return nbytes / best / 1e9


def speed(case: Case, seconds: float) -> str:
    """What is read of the weight per second, where that is what takes the time."""
    name, _, n = case.what.partition(", n = ")
    if case.op != "mul_mat" or int(n.partition(",")[0]) > 8:
        return ""
    return f"{DType[name.upper()].row_size(K) * M / seconds / 1e9:.1f}"


def run(part: str, rounds: int, threads: int) -> list[list[str]]:
    table = Table(*COLUMNS)
    with Players("llvm_cases", threads) as players:
        for case in PARTS[part]:
            seconds, nmse = players.measure(case, rounds)
            ours, theirs = seconds["ggmlb"], seconds["ggml"]
            ratio = statistics.median(b / a for a, b in zip(ours, theirs, strict=True))
            figures = (milliseconds(theirs), milliseconds(ours), f"{ratio:.2f}")
            table.row(
                case.op, case.what, *figures, verdict(case, ratio), speed(case, min(ours)), f"{nmse:.0e}"
            )
    return [list(row) for row in table.rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--parts", default=",".join(PARTS))
    args = parser.parse_args()
    path = Path(str(MEASURED).format(args.threads))
    known: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    for part in args.parts.split(","):
        before = os.getloadavg()[0]
        rows = run(part, args.rounds, args.threads)
        known[part] = {"rows": rows, "load": [before, os.getloadavg()[0]]}
    known["read"] = {str(n): read_speed(args.threads, n << 20) for n in READ_MIB}
    path.write_text(json.dumps(known))
    tables = []
    for part in PARTS:
        if part in known:
            table = Table(*COLUMNS)
            table.rows = [tuple(row) for row in known[part]["rows"]]
            tables.append(table)
    loads = [x for part in known.values() if "load" in part for x in part["load"]]
    reads = ", ".join(f"{known['read'][str(n)]:.0f} GB/s from {n} MiB" for n in READ_MIB)
    about = f"""The LLVM device beside ggml
Made by `python benchmarks/llvm_ops.py`: {args.rounds} rounds, {args.threads} thread(s) each. Products are of
weights of {K} x {M}. Reading alone: {reads}. The machine was shared with other work: its load, of one
minute, both libraries included, was {min(loads):.1f} to {max(loads):.1f}.
{CLOCK if args.threads == 1 else ""}

{__doc__.partition("    python")[0]}"""
    save(
        f"llvm_{args.threads}" if args.threads == 1 else "llvm",
        about,
        *tables,
        packages=("numpy", "llvmlite", "ggml-python"),
    )


if __name__ == "__main__":
    main()
