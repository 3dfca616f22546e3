"""Ops one by one: ggmlb on the processor against ggml, in one run.

Each library computes in a process of its own, so that neither's idle threads disturb the other; they take
turns, never run at the same time, and get the same data. Both run a graph of one op through their CPU
backend; what has a target and is no product also runs on the LLVM device, which computes in the CPU's
memory and takes such nodes over where it is installed. The times are those of the best call of all rounds,
and the ratio is ggml's divided by ours: more than 1 is faster than ggml. The column `median` has the median
of the rounds' ratios of best calls: the two differ where the machine was busy with other work, which slows
either library, ggml's spinning threads most. The results of both are compared before anything is measured;
the error (NMSE) is in the table, and a wrong result ends the run.

    python benchmarks/ops.py [--rounds 5] [--threads 2] [--only mul_mat,add]
"""

from __future__ import annotations

import argparse
import os
import statistics

from ops_cases import CASES, Case
from report import Table, save
from turns import Players

LEAST = 0.2
"""The ratio below which a case needs a note."""


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
    columns = "op,what,device,memory,ggml [ms],ggmlb [ms],ratio,median,target,NMSE,note"
    table = Table(*columns.split(","))
    load = [os.getloadavg()[0]]
    with Players("ops_cases", args.threads) as players:
        for case in CASES:
            if args.only and case.op not in args.only.split(","):
                continue
            seconds, nmse = players.measure(case, args.rounds)
            ours, theirs = seconds["ggmlb"], seconds["ggml"]
            ratio = min(theirs) / min(ours)
            median = statistics.median(b / a for a, b in zip(ours, theirs, strict=True))
            figures = (milliseconds(theirs), milliseconds(ours), f"{ratio:.2f}", f"{median:.2f}")
            note = case.note if ratio < (case.target or 1) else ""
            table.row(
                *(case.op, case.what, case.device, case.storage),
                *(*figures, verdict(case, ratio), f"{nmse:.0e}", note),
            )
            if ratio < LEAST and not note:
                print(f"{case.op} {case.what} is slower than {LEAST} times ggml, and has no note")
            load.append(os.getloadavg()[0])
    if args.only:
        return
    about = f"""Ops on the CPU beside ggml
Made by `python benchmarks/ops.py`: {args.rounds} rounds, {args.threads} threads each. Sizes are ne. CPU_F32
is the extra buffer type that dequantises at upload; ggml has the blocks in either case. The machine was
shared: its load (of one minute, both libraries included) was {min(load):.1f} to {max(load):.1f}.

{__doc__.partition("    python")[0]}"""
    save("ops", about, table, packages=("numpy", "llvmlite", "ggml-python"))


if __name__ == "__main__":
    main()
