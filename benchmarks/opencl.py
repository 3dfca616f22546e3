"""OpenCL beside NumPy and ggml, op by op, in one run.

Each library computes in a process of its own; they take turns and never run at the same time. The times are
medians over the rounds, of each turn's best call. NumPy has all weights as float32. A call of ggmlb is a
whole `graph_compute`: queueing the plan and waiting for it. GB/s and GFLOP/s are those of OpenCL: what the op
must move and compute, divided by its time.

    python benchmarks/opencl.py [--rounds 7] [--threads 2] [--ops mul_mat]
"""

from __future__ import annotations

import os
import statistics
from typing import Any

import numpy as np
from libraries import Case, Ggml, Ggmlb, Numpy, recorded
from report import Table, save
from turns import Players, arguments, best_s

from ggmlb.core.context import Context
from ggmlb.testing.perf import flops, moved_nbytes


class OpenCl(Ggmlb):
    def memories(self, device: Any) -> list[Any]:
        return [device.buffer_type, device.packed_buffer_type]  # on a CPU it is not offered by itself


LIBRARIES = {"OpenCL": OpenCl, "NumPy": Numpy, "ggml": Ggml}

DECODE = "arithmetic: unpacking a block takes more instructions than its products"
LIMITS = {
    "mul_mat(f32,f32;n=1)": "memory", "mul_mat(f16,f32;n=1)": "memory", "mul_mat(q8_0,f32;n=1)": "memory",
    "mul_mat(q4_0,f32;n=1)": DECODE, "mul_mat(q4_k,f32;n=1)": DECODE,
    "mul_mat(f32,f32;n=512)": "arithmetic: vectors of 8 floats; the processor has 16",
    "rms_norm(f32)": "memory (cache), and the start of the kernel",
    "soft_max_ext(f32)": "arithmetic: exp as a polynomial",
    "mul_mat_id(f16,f32;n=64)": "arithmetic",
    "flash_attn_ext(f32,f16;n=512,kv=1024)": "arithmetic",
}  # fmt: skip
"""What keeps OpenCL from being faster, by size of the record."""
PACKED = ("mul_mat(q8_0,f32;n=1)", "mul_mat(q4_0,f32;n=1)")
"""Products measured with packed weights too."""
CASES = [
    Case.of(perf, device="OpenCL0", storage=memory, note=LIMITS[perf.id])
    for memory, chosen in (("OpenCL0", LIMITS), ("OpenCL0_Packed", PACKED))
    for perf in recorded()
    if perf.id in chosen
]

BUSY = """
**Much else ran at the same time: the ratios say little.** It slows every library, ggml's spinning
threads most. Run it again on a quiet machine before relying on it.
"""


def read_bandwidth() -> float:
    """What NumPy reads while it sums 256 MB [GB/s], by one thread."""
    memory = np.ones(1 << 26, np.float32)
    return memory.nbytes / best_s(memory.sum, rounds=5) / 1e9


def main() -> None:
    args = arguments(__doc__, rounds=7).parse_args()
    table = Table(
        "op", "what", "memory", "OpenCL [ms]", "NumPy [ms]", "ggml [ms]", "NumPy/OpenCL", "ggml/OpenCL",
        "GB/s", "GFLOP/s", "NMSE", "limited by",
    )  # fmt: skip
    bandwidth = read_bandwidth()
    with Players(__file__, args.threads) as players:
        for case, rounds, nmse in players.measured(args):
            ours, numpy, ggml = (statistics.median(rounds[name]) for name in LIBRARIES)
            node = case.build(Context())
            table.row(
                case.op, case.what, case.storage, *(f"{1e3 * s:.3g}" for s in (ours, numpy, ggml)),
                *(f"{figure / ours:.2f}" for figure in (numpy, ggml)),
                *(f"{amount / ours / 1e9:.1f}" for amount in (moved_nbytes(node), flops(node))),
                f"{nmse:.0e}", case.note,
            )  # fmt: skip
    if args.ops:
        return
    busy = BUSY if max(players.load) > (os.cpu_count() or 1) else ""
    about = f"""OpenCL beside NumPy and ggml
Made by `python benchmarks/opencl.py`: {args.rounds} rounds, {args.threads} threads each, on PoCL, an OpenCL
for CPUs: the kernels are those that GPUs run, with the work split for cores. One thread of NumPy reads
{bandwidth:.1f} GB/s. The machine was shared: its load (of one minute, all libraries included)
was {players.loads}.

{busy}
OpenCL0_Packed keeps blocks in groups of eight with the scales in front, so that a GPU reads each eight
elements by one aligned load. On PoCL it does not pay: runs put it between as fast as plain memory and a sixth
slower. So it is offered on GPUs only, where nobody has measured it yet. What limits an op was judged
from these figures and the kernels, not from a profile.

{__doc__.partition("    python")[0]}"""
    save("opencl", about, table, packages=("numpy", "pyopencl", "ggml-python"))


if __name__ == "__main__":
    main()
