"""Peak memory of graph allocation: ggmlb beside ggml itself, on the same graphs.

Each graph is built twice by the same function, once with `ggmlb.Context` and once with ggml through
ggml-python, and measured by each one's graph allocator, for memory of the same alignment. The table is
printed and saved; the exit status is 1 if ggmlb needs more for any graph.
"""

from __future__ import annotations

import ctypes
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import ggml
from alloc_graphs import GRAPHS, llama, random_graph
from libraries import GgmlContext
from report import Table, save

from ggmlb.core.context import Context
from ggmlb.core.dtypes import DType
from ggmlb.core.graph import Graph
from ggmlb.core.tensor import Tensor
from ggmlb.runtime.alloc import GraphAllocator
from ggmlb.testing.memory import TestMemory

GGML_BUFFER_TYPE = ggml.ggml_backend_get_default_buffer_type(ggml.ggml_backend_cpu_init())
ALIGNMENT = ggml.ggml_backend_buft_get_alignment(GGML_BUFFER_TYPE)
N_RANDOM = 300

PAPER = TestMemory(alignment=ALIGNMENT)
WEIGHTS = PAPER.alloc_buffer(0)  # weights count as placed, their data is never touched


class OurContext(Context):
    def weight(self, dtype: DType, *ne: int) -> Tensor:
        tensor = self.new_tensor(dtype, ne)
        tensor.buffer = WEIGHTS
        return tensor


def our_peak(build: Callable[[Any], list[Any]]) -> tuple[int, int]:
    """Return the bytes that ggmlb reserves, and the number of nodes."""
    graph = Graph().build_forward_expand(*build(OurContext()))
    return GraphAllocator(PAPER).reserve_n_size(graph)[0], len(graph)


def ggml_peak(build: Callable[[Any], list[Any]]) -> tuple[int, int]:
    """Return the bytes that ggml reserves, and the number of nodes."""
    ctx = GgmlContext(64 << 20)
    results = build(ctx)
    graph = ggml.ggml_new_graph_custom(ctx.ctx, 1 << 14, False)
    for result in results:
        ggml.ggml_build_forward_expand(graph, result)
    allocator = ggml.ggml_gallocr_new(GGML_BUFFER_TYPE)
    sizes = (ctypes.c_size_t * 1)()
    ggml.ggml_gallocr_reserve_n_size(allocator, graph, None, None, sizes)
    n_nodes = ggml.ggml_graph_n_nodes(graph)
    ggml.ggml_gallocr_free(allocator)
    ctx.free()
    return sizes[0], n_nodes


def random_peaks() -> list[tuple[int, int, int]]:
    """Return for each random graph its number of nodes, and the bytes of ggmlb and of ggml."""
    peaks = []
    for seed in range(N_RANDOM):
        build = partial(random_graph, seed=seed)
        (ours, n), (theirs, n_ggml) = our_peak(build), ggml_peak(build)
        if n != n_ggml:
            raise SystemExit(f"random graph {seed}: {n} nodes here, {n_ggml} in ggml")
        peaks.append((n, ours, theirs))
    return peaks


def times() -> tuple[list[list[float]], int]:
    """Return the times of a first allocation, of another graph alike, and of the same graph again [ms]."""
    model = partial(llama, n_layer=32, n_embd=256, n_head=8, n_head_kv=8, n_ff=512, n_tokens=8, n_kv=64)
    taken: list[list[float]] = [[], [], []]
    for _ in range(30):
        first, alike = (Graph().build_forward_expand(*model(OurContext())) for _ in range(2))
        with GraphAllocator(PAPER) as allocator:
            for graph, ms in zip((first, alike, alike), taken, strict=True):
                start = time.perf_counter()
                allocator.alloc_graph(graph)
                ms.append(1e3 * (time.perf_counter() - start))
            if (allocator.n_plans, allocator.n_reallocs) != (1, 1):
                raise SystemExit(f"planned {allocator.n_plans} times, allocated {allocator.n_reallocs} times")
    return taken, len(first)


def main() -> int:
    table = Table("graph", "nodes", "ggml [bytes]", "ggmlb [bytes]", "ggmlb / ggml")
    worse = []
    for name, build in GRAPHS.items():
        (ours, n), (theirs, n_ggml) = our_peak(build), ggml_peak(build)
        if n != n_ggml:
            raise SystemExit(f"{name}: {n} nodes here, {n_ggml} in ggml")
        table.row(name, n, f"{theirs:,}", f"{ours:,}", f"{ours / theirs:.3f}")
        if ours > theirs:
            worse.append(name)
    sizes, ours, theirs = zip(*random_peaks(), strict=True)
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    worse += [f"random graph {i}" for i, ratio in enumerate(ratios) if ratio > 1]
    table.row(
        f"{N_RANDOM} random graphs, sums", f"{min(sizes)} to {max(sizes)}", f"{sum(theirs):,}",
        f"{sum(ours):,}", f"{statistics.fmean(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})",
    )  # fmt: skip
    taken, n_nodes = times()
    first, alike, again = (f"{statistics.median(ms):.2f} ms (least {min(ms):.2f})" for ms in taken)
    about = f"""Peak memory of graph allocation
Made by `python benchmarks/alloc_peak.py`: ggml {ggml.ggml_version().decode()}, alignment {ALIGNMENT} bytes.
Weights and caches lie elsewhere. Time for a LLaMA graph of {n_nodes} nodes, median of 30: first allocation
{first}; another graph of the same topology {alike}; the same graph again {again}.
"""
    save("alloc_peak", about, table, packages=("ggml-python",))
    if worse:
        print(f"ggmlb needs more than ggml for {len(worse)}: {', '.join(worse[:20])}", file=sys.stderr)
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
