"""What it costs that devices share the work of each node, beside one of them, in one run.

A product, and the MiniLM model on 16 sentences: on one OpenCL device; on two, as a meta device (tensor
parallelism); and on one with its weights' rows split over two. The figures are processor times, of all
threads together: what is computed is the same, so that what is more is copies, sums, and the host's work.

Both devices are PoCL's, on the same cores. So nothing is gained here: what two devices with memory and
compute units of their own would gain, this machine cannot show.

    python benchmarks/several_devices.py [--rounds 9]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from report import Table, save

os.environ["POCL_DEVICES"] = "pthread pthread"  # read when PoCL is first asked for its devices

import ggmlb
from ggmlb import (
    Backend,
    BufferType,
    BufferUsage,
    Context,
    DType,
    Graph,
    SplitAxis,
    SplitState,
    alloc_ctx_tensors,
    split_evenly,
)
from ggmlb.models import BertEmbedder

NAMES = ["OpenCL0", "OpenCL1"]
SENTENCES = Path(__file__).parents[1] / "tests/golden/minilm/sentences.json"

SHAPES = ((DType.F32, 2048, 1), (DType.F32, 2048, 64), (DType.Q8_0, 4096, 1), (DType.Q8_0, 4096, 64))
"""Type, extent of both dimensions, and columns of the products."""

Run = Callable[[], object]


def product(stream: Backend, buft: BufferType, dtype: DType, n: int, columns: int) -> Callable[[], object]:
    """Return a call that computes a product whose weight lies in some memory."""
    weights, ctx = Context(), Context()
    w = weights.new_tensor(dtype, (n, n), "w")
    alloc_ctx_tensors(weights, buft).usage = BufferUsage.WEIGHTS
    w.set_array(np.random.default_rng(0).standard_normal((n, n), np.float32))
    x = ctx.new_tensor(DType.F32, (n, columns), "x")
    graph = Graph().build_forward_expand(ctx.mul_mat(w, x))
    allocator = ggmlb.GraphAllocator(stream.default_buffer_type)
    allocator.alloc_graph(graph)
    x.set_array(np.ones(x.shape))
    plan = stream.graph_plan_create(graph)

    def run(_: Any = (allocator, w, graph)) -> None:
        stream.graph_plan_compute(plan)
        stream.synchronize()

    return run


def medians(runs: list[Run], rounds: int) -> list[float]:
    """Return processor seconds of each, the median over rounds of the best of three calls."""
    for run in runs:
        run()
    seconds: list[list[float]] = [[] for _ in runs]
    for i in range(rounds):
        for j in range(len(runs))[:: 1 if i % 2 else -1]:
            calls = []
            for _ in range(3):
                start = time.process_time()
                runs[j]()
                calls.append(time.process_time() - start)
            seconds[j].append(min(calls))
    return [statistics.median(s) for s in seconds]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    devices = [ggmlb.device_by_name(name) for name in NAMES]
    split_buffer_type = ggmlb.reg_by_name("OpenCL").get_proc_address("split_buffer_type")
    assert split_buffer_type is not None
    split = split_buffer_type(0)
    table = Table("what", "one [ms]", "meta [ms]", "rows split [ms]", "meta/one", "rows split/one")

    def row(what: str, runs: list[Run]) -> None:
        one, meta, rows = medians(runs, args.rounds)
        table.row(
            what, *(f"{1e3 * s:.3g}" for s in (one, meta, rows)), f"{meta / one:.2f}", f"{rows / one:.2f}"
        )

    one = devices[0].init_backend()
    halves = lambda t: SplitState(SplitAxis.AXIS_1, (split_evenly(t.ne[1], 2),))  # noqa: E731
    meta = ggmlb.meta_device(devices, halves).init_backend()
    places = (one, one.default_buffer_type), (meta, meta.default_buffer_type), (one, split)
    for dtype, extent, columns in SHAPES:
        runs = [product(stream, memory, dtype, extent, columns) for stream, memory in places]
        row(f"mul_mat {dtype.name.lower()} {extent} x {extent}, {columns} columns", runs)
    texts = json.loads(SENTENCES.read_text())[:16]
    options: list[dict[str, Any]] = [
        {"devices": NAMES[:1]},
        {"devices": ["+".join(NAMES)]},
        {"devices": NAMES[:1], "override_tensors": {"(qkv|out|up|down).*weight": split}},
    ]
    row("MiniLM, 16 sentences", [partial(BertEmbedder(**o).embed, texts) for o in options])
    about = f"""What sharing each node costs
Made by `python benchmarks/several_devices.py`: {args.rounds} rounds.

{__doc__.partition("    python")[0]}"""
    save("several_devices", about, table, packages=("numpy", "pyopencl"))


if __name__ == "__main__":
    main()
