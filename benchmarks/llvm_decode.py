"""A decode step of llama-like models on the LLVM device, with and without fusion, beside ggml, in one run.

Three processes take turns, with the same data and threads (`turns.py`); results are compared before anything
is measured. `fusion` is the median of the rounds' ratios of the time without fusion (GGMLB_FUSE=0) to that
with it; `ratio` that of ggml's time to ours with it.

    python benchmarks/llvm_decode.py [--rounds 5] [--threads 2]
"""

from __future__ import annotations

import argparse
import os
import statistics

from llvm_decode_cases import CASES
from ops import milliseconds
from report import Table, save
from turns import Players


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    table = Table("model", "ggml [ms]", "LLVM [ms]", "without fusion [ms]", "fusion", "ratio", "NMSE")
    load = [os.getloadavg()[0]]
    with Players("llvm_decode_cases", args.threads) as players:
        for case in CASES:
            seconds, nmse = players.measure(case, args.rounds)
            fusion, ratio = (
                statistics.median(b / a for a, b in zip(seconds["fused"], seconds[name], strict=True))
                for name in ("apart", "ggml")
            )
            times = [milliseconds(seconds[name]) for name in ("ggml", "fused", "apart")]
            table.row(case.what, *times, f"{fusion:.2f}", f"{ratio:.2f}", f"{nmse:.0e}")
            load.append(os.getloadavg()[0])
    about = f"""A decode step on the LLVM device
Made by `python benchmarks/llvm_decode.py`: {args.rounds} rounds, {args.threads} thread(s) each. The load of
the machine, of one minute, all three included, was {min(load):.1f} to {max(load):.1f}.

{__doc__.partition("    python")[0]}"""
    save(
        f"llvm_decode_{args.threads}" if args.threads == 1 else "llvm_decode",
        about,
        table,
        packages=("numpy", "llvmlite", "ggml-python"),
    )


if __name__ == "__main__":
    main()
