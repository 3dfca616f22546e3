"""A decode step of llama-like models on the LLVM device, with and without fusion, beside ggml, in one run.

Three processes take turns, with the same data and threads (`turns.py`); results are compared before anything
is measured. `fusion` is the median of the rounds' ratios of the time without fusion (GGMLB_FUSE=0) to that
with it; `ratio` that of ggml's time to ours with it. ggml is that of `llvm_ops.py`.

    [GGMLB_SIMD=avx2] python benchmarks/llvm_decode.py [--peer wheel] [--rounds 5] [--threads 2]
"""

from __future__ import annotations

import os
import statistics
from functools import partial

from decode import Sizes, decode
from libraries import Case, Ggmlb, OnGgml
from llvm_ops import SIMD, peer_arguments, use_peer
from ops import milliseconds
from report import Table, save
from turns import Players

from ggmlb.core.dtypes import DType


class Fused(Ggmlb):
    """Nodes lie where an allocator places them, so that results that nobody else reads can be left out."""

    def __init__(self, case: Case, threads: int) -> None:
        from ggmlb import GraphAllocator

        super().__init__(case, threads)
        self._backend.graph_optimize(self._graph)
        allocator = GraphAllocator(self._backend.default_buffer_type)
        for node in self._graph.nodes:
            node.buffer = None
        allocator.alloc_graph(self._graph)
        self._memory.append(allocator)


class Apart(Fused):
    """Without fusion."""

    def __init__(self, case: Case, threads: int) -> None:
        os.environ["GGMLB_FUSE"] = "0"
        super().__init__(case, threads)


LIBRARIES = {"fused": Fused, "apart": Apart, "ggml": OnGgml}

MODELS = {
    "8 layers of 512": Sizes(8, 512, 1408, 8, 4, 64, 256),
    "4 layers of 2048": Sizes(4, 2048, 5632, 32, 4, 64, 1024),
}
CASES = [
    Case("decode", f"{what}, {dtype.name.lower()}", partial(decode, sizes, dtype), nmse=1e-2, device="LLVM")
    for what, sizes in MODELS.items()
    for dtype in (DType.Q4_0, DType.Q8_0, DType.F16)
]


def main() -> None:
    args = peer_arguments(__doc__, rounds=5).parse_args()
    peer = use_peer(args.peer)
    table = Table("model", "ggml [ms]", "LLVM [ms]", "without fusion [ms]", "fusion", "ratio", "NMSE")
    with Players(__file__, args.threads) as players:
        for case, seconds, nmse in players.measured(args):
            fusion, ratio = (
                statistics.median(b / a for a, b in zip(seconds["fused"], seconds[name], strict=True))
                for name in ("apart", "ggml")
            )
            times = [milliseconds(seconds[name]) for name in ("ggml", "fused", "apart")]
            table.row(case.what, *times, f"{fusion:.2f}", f"{ratio:.2f}", f"{nmse:.0e}")
    if args.ops:
        return
    about = f"""A decode step on the LLVM device{f", limited to {SIMD.upper()}" if SIMD else ""}
Made by `python benchmarks/llvm_decode.py`: {args.rounds} rounds, {args.threads} thread(s) each. The load of
the machine, of one minute, all three included, was {players.loads}. ggml is that of
{peer.about}.

{__doc__.partition("    [GGMLB")[0]}"""
    name = "_".join(["llvm_decode", *([SIMD] if SIMD else []), *(["1"] if args.threads == 1 else [])])
    save(name, about, table, packages=("numpy", "llvmlite"))


if __name__ == "__main__":
    main()
