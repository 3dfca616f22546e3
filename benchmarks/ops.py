"""Ops one by one: ggmlb on the processor against ggml, in one run.

Each library computes in a process of its own, so that neither's idle threads disturb the other; they take
turns, never run at the same time, and get the same data. Both run a graph of one op through their CPU
backend; what has a target and is no product also runs on the LLVM device, which computes in the CPU's
memory and takes such nodes over where it is installed. The times are those of the best call of all rounds,
and the ratio is ggml's divided by ours: more than 1 is faster than ggml. The column `median` has the median
of the rounds' ratios of best calls: the two differ where the machine was busy with other work, which slows
either library, ggml's spinning threads most. The results of both are compared before anything is measured;
the error (NMSE) is in the table, and a wrong result ends the run.

    python benchmarks/ops.py [--rounds 5] [--threads 2] [--ops mul_mat,add]
"""

from __future__ import annotations

import statistics
from dataclasses import replace

from libraries import Case, Ggml, Ggmlb, recorded
from report import Table, save
from turns import Players, arguments

LIBRARIES = {"ggmlb": Ggmlb, "ggml": Ggml}

LEAST = 0.2
"""The ratio below which a case needs a note."""
EVEN = (
    "add", "mul", "scale", "silu", "gelu", "gelu_erf", "swiglu", "norm", "rms_norm", "soft_max_ext",
)  # fmt: skip
"""Ops that should take 1/0.8 of ggml's time at most; the LLVM device is measured beside the CPU."""
PRODUCTS = {"f32": 2.0, "f16": 2.0, "q8_0": 1.2, "q4_0": 1.2, "q4_k": 0.7, "q6_k": 0.7}
"""Targets for products of many columns by type of the weights, which lie in plain memory."""
CPU_F32 = 1.2
"""The same, of weights in this extra buffer type."""

EXP = "several passes of NumPy, whose exp takes 0.35 (AVX-512) to 1.6 ns a value; ggml and LLVM need one"
HALVES = "NumPy takes 3.2 ns of a thread to make a half; ggml has the processor's instruction"
STEPS = "tokens follow each other, so the state passes through some NumPy calls for each"
WIDENED = "not tuned: each weight becomes a float32 first; ggml multiplies short types as they are"
NOTES = {
    "add": "NumPy takes 1.6 times as long to add a row to each as to scale; waking a thread takes 0.03 ms",
    "silu": EXP, "swiglu": EXP, "soft_max_ext": EXP, "set_rows": HALVES, "cpy": HALVES,
    "rope": "seven passes over half rows of 64 values, and NumPy begins its loop anew for each of them",
    "ssm_scan": STEPS, "rwkv_wkv6": STEPS, "mul_mat": WIDENED, "mul_mat_id": WIDENED,
}  # fmt: skip


def cases() -> list[Case]:
    found = []
    for perf in recorded():
        weight, _, columns = perf.text.partition(",f32;n=")
        many = perf.fn == "mul_mat" and columns == "512"
        target = 0.8 if perf.fn in EVEN else PRODUCTS.get(weight) if many else None
        found.append(Case.of(perf, target=target, note=NOTES.get(perf.fn, "")))
        if many:
            found.append(replace(found[-1], target=CPU_F32, storage="CPU_F32"))
    return found + [replace(case, device="LLVM", note="") for case in found if case.op in EVEN]


CASES = cases()


def verdict(case: Case, ratio: float) -> str:
    target = f"{case.target:.1f}" if case.target else ""
    return target + (" (missed)" if case.target and ratio < case.target else "")


def milliseconds(seconds: list[float]) -> str:
    return f"{1e3 * min(seconds):.3g}"


def main() -> None:
    args = arguments(__doc__, rounds=5).parse_args()
    columns = "op,what,device,memory,ggml [ms],ggmlb [ms],ratio,median,target,NMSE,note"
    table = Table(*columns.split(","))
    with Players(__file__, args.threads) as players:
        for case, seconds, nmse in players.measured(args):
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
    if args.ops:
        return
    about = f"""Ops on the CPU beside ggml
Made by `python benchmarks/ops.py`: {args.rounds} rounds, {args.threads} threads each. Sizes are those of mode
`perf` on a CPU, twice along each edge. CPU_F32 is the extra buffer type that dequantises at upload; ggml has
the blocks in either case. The machine was shared: its load (of one minute, both libraries included) was
{players.loads}.

{__doc__.partition("    python")[0]}"""
    save("ops", about, table, packages=("numpy", "llvmlite", "ggml-python"))


if __name__ == "__main__":
    main()
