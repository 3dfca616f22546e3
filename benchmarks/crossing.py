"""What crossing to ggml costs: a chain of small nodes on ggml's CPU, planned and computed, per node.

`built` is a plan made anew: ggml's answers, C tensors and the C graph, besides our own checks. `kept` is the
same plan computed again, ggml's work included; with 16 elements a node, there is little of it. The other
devices do the same in Python (CPU) and by machine code (LLVM). The least of the rounds, as other processes
only add.

    python benchmarks/crossing.py [--rounds 50]
"""

from __future__ import annotations

import argparse
import time

from report import Table, save

import ggmlb

N, WIDTH = 1000, 16


def graph_of(ctx: ggmlb.Context) -> ggmlb.Graph:
    y = ctx.new_tensor("f32", (WIDTH,))
    for i in range(N):
        y = ctx.neg(y) if i % 2 else ctx.scale(y, 0.5)
    return ggmlb.Graph().build_forward_expand(y)


def measure(device: str, rounds: int) -> tuple[float, float]:
    """Times to build a plan, and to compute it again [s]."""
    built = kept = float("inf")
    with ggmlb.init_by_name(device, {"n_threads": 1}) as stream:
        ctx = ggmlb.Context()
        graph = graph_of(ctx)
        with ggmlb.alloc_ctx_tensors(ctx, stream):
            for _ in range(rounds):
                start = time.perf_counter()
                plan = stream.graph_plan_create(graph)
                built = min(built, time.perf_counter() - start)
                stream.graph_plan_compute(plan)
                start = time.perf_counter()
                stream.graph_plan_compute(plan)
                kept = min(kept, time.perf_counter() - start)
    return built, kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=50)
    rounds = parser.parse_args().rounds
    table = Table("device", "built [us per node]", "kept [us per node]")
    for device in ("ggml:CPU", "LLVM", "CPU"):
        table.row(device, *(f"{t / N * 1e6:.3f}" for t in measure(device, rounds)))
    save("crossing", __doc__.partition("    python")[0], table, packages=("numpy", "llvmlite", "xllamacpp"))


if __name__ == "__main__":
    main()
