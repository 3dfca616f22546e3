"""Devices that share the work of each node, beside one of them, in one run.

OpenCL devices of one core each, cut out of PoCL's; a product, and the MiniLM model on 16 sentences, on one
of them, on all as a meta device (tensor parallelism), and on one with its weights' rows split over all. And
on PoCL's whole device, which has all cores, but needs no copies and no sums. They take turns, and the
medians over the rounds are shown.

    python benchmarks/several_devices.py [--rounds 9]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyopencl as cl
from report import Table, save

import ggmlb
from ggmlb import BufferUsage, Context, DType, Graph, SplitAxis, SplitState, alloc_ctx_tensors, split_evenly
from ggmlb.backends.opencl import OpenClReg
from ggmlb.backends.opencl.device import OpenClDevice
from ggmlb.models import BertEmbedder

if TYPE_CHECKING:
    from collections.abc import Callable

    from ggmlb import Backend, BufferType, Device

SENTENCES = Path(__file__).parents[1] / "tests/golden/minilm/sentences.json"

SHAPES = ((DType.F32, 2048, 1), (DType.F32, 2048, 64), (DType.Q8_0, 4096, 1), (DType.Q8_0, 4096, 64))
"""Type, extent of both dimensions, and columns of the products."""

Run = tuple[str, "Callable[[], object]"]


def cores() -> tuple[OpenClReg, list[Device]]:
    """Return a registration of devices of one core each, which the registry knows by name too."""
    whole: Any = ggmlb.device_by_name("OpenCL0")
    parts = whole.cl_device.create_sub_devices([cl.device_partition_property.EQUALLY, 1])
    context = cl.Context(parts)
    reg = OpenClReg()
    reg._devices = tuple(OpenClDevice(reg, f"Core{i}", part, context) for i, part in enumerate(parts))
    for device in reg.devices:
        ggmlb.register_device(device)
    return reg, list(reg.devices)


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
    """Return seconds of each, the median over rounds of the best of three calls."""
    for _, run in runs:
        run()
    seconds: list[list[float]] = [[] for _ in runs]
    for i in range(rounds):
        for j in range(len(runs))[:: 1 if i % 2 else -1]:
            calls = []
            for _ in range(3):
                start = time.perf_counter()
                runs[j][1]()
                calls.append(time.perf_counter() - start)
            seconds[j].append(min(calls))
    return [statistics.median(s) for s in seconds]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    reg, devices = cores()
    n = len(devices)
    split = reg.get_proc_address("split_buffer_type")
    assert split is not None
    names = ["one core", f"meta device of {n}", f"rows over {n}", "whole device"]
    table = Table("what", *(f"{name} [ms]" for name in names), *(f"one core / {name}" for name in names[1:]))
    load = [os.getloadavg()[0]]

    def row(what: str, runs: list[Run]) -> None:
        one, *others = medians(runs, args.rounds)
        table.row(what, *(f"{1e3 * s:.3g}" for s in (one, *others)), *(f"{one / s:.2f}" for s in others))
        load.append(os.getloadavg()[0])

    meta = ggmlb.meta_device(
        devices, lambda t: SplitState(SplitAxis.AXIS_1, (split_evenly(t.ne[1], n),))
    ).init_backend()
    core, whole = devices[0].init_backend(), ggmlb.init_by_name("OpenCL0")
    for dtype, extent, columns in SHAPES:
        bufts = core.default_buffer_type, meta.default_buffer_type, split(0), whole.default_buffer_type
        streams = core, meta, core, whole
        runs = [
            (name, product(stream, buft, dtype, extent, columns))
            for name, stream, buft in zip(names, streams, bufts, strict=True)
        ]
        row(f"mul_mat {dtype.name.lower()} {extent} x {extent}, {columns} columns", runs)

    texts = json.loads(SENTENCES.read_text())[:16]
    matrices = {"(qkv|out|up|down).*weight": split(0)}
    embedders = [
        BertEmbedder(devices=["Core0"]),
        BertEmbedder(devices=["+".join(d.name for d in devices)]),
        BertEmbedder(devices=["Core0"], override_tensors=matrices),
        BertEmbedder(devices=["OpenCL0"]),
    ]
    row(
        "MiniLM, 16 sentences",
        [(name, partial(e.embed, texts)) for name, e in zip(names, embedders, strict=True)],
    )
    about = f"""Several devices beside one
Made by `python benchmarks/several_devices.py`: {args.rounds} rounds. The machine was shared: its load (of one
minute, this program included) was {min(load):.1f} to {max(load):.1f}.

{__doc__.partition("    python")[0]}"""
    save("several_devices", about, table, packages=("numpy", "pyopencl"))


if __name__ == "__main__":
    main()
