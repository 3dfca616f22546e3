"""What OpenCL plans cost: queueing a node, what fusion saves, and first use.

Queueing is timed beside queueing a kernel of one argument that does nothing, with the device held back, so
that its own threads do not disturb: what is above that is the arguments', which the runtime copies for every
launch, and the processor's caches, which hold other data after kernels that did something. MiniLM embeds one
text of 19 tokens, or 32 of them, with and without `GGMLB_FUSE=0`, in turns. First use is the first text in a
process of its own, with an empty cache folder and with a full one.

    python benchmarks/opencl_plan.py [--rounds 15]
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

import pyopencl as cl
from report import Table, save

from ggmlb.models import BertEmbedder

TEXT = "The quick brown fox jumps over the lazy dog near the river bank today, and sleeps."
DEVICES = ["OpenCL0", "CPU"]
FIRST_USE = f"""
from time import perf_counter
from ggmlb.models import BertEmbedder
embedder = BertEmbedder(devices={DEVICES})
start = perf_counter()
embedder.embed([{TEXT!r}])
print(perf_counter() - start)
"""


def plan_of(embedder: BertEmbedder, n_texts: int) -> tuple[Any, Any]:
    """Return the stream and the OpenCL plan that embed so many texts."""
    embedder.embed([TEXT] * n_texts, n_texts)
    assert embedder.scheduler is not None
    split = max(
        (s for s in embedder.scheduler.splits if s.backend.name == DEVICES[0]), key=lambda s: len(s.nodes)
    )
    return split.backend, split.plan


def queueing_us(stream: Any, n: int, queue_all: Any) -> float:
    """Return the time that a launch takes to be queued [us]: the median of many rounds."""
    times = []
    for _ in range(60):
        gate = cl.UserEvent(stream.device.context)
        cl.enqueue_barrier(stream.queue, wait_for=[gate])
        start = perf_counter()
        queue_all()
        times.append((perf_counter() - start) / n * 1e6)
        gate.set_status(cl.command_execution_status.COMPLETE)
        stream.synchronize()
    return statistics.median(times)


def floor_us(stream: Any, n: int) -> float:
    """Return the time that a kernel of one argument takes to be queued [us]."""
    text = "__kernel void nothing(__global int *p) { }"
    kernel = cl.Kernel(cl.Program(stream.device.context, text).build(), "nothing")
    buffer = cl.Buffer(stream.device.context, cl.mem_flags.READ_WRITE, 64)  # a kernel does not keep it
    kernel.set_arg(0, buffer)
    queue, enqueue, size = stream.queue, cl.enqueue_nd_range_kernel, (1, 1, 1)

    def queue_all() -> None:
        for _ in range(n):
            enqueue(queue, kernel, size, size)

    return queueing_us(stream, n, queue_all)


def fuse(fused: bool) -> None:
    """Let plans that are made from now on be fused or not; an embedder may make its own anew."""
    os.environ["GGMLB_FUSE"] = "1" if fused else "0"


def embedder(fused: bool) -> BertEmbedder:
    """Return an embedder whose plans are made with or without fusion."""
    fuse(fused)
    made = BertEmbedder(devices=DEVICES)
    for n_texts in (1, 32):
        made.embed([TEXT] * n_texts, n_texts)
    return made


def first_use_s(folder: str) -> float:
    """Return how long the first text takes in a new process [s]."""
    env = {**os.environ, "GGMLB_CACHE_DIR": folder, "POCL_CACHE_DIR": folder, "GGMLB_FUSE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", FIRST_USE], env=env, capture_output=True, text=True, check=True
    )
    return float(done.stdout)


def main() -> None:
    """Measure, and write results/opencl_plan.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    n_rounds = parser.parse_args().rounds

    whole = {fused: embedder(fused) for fused in (False, True)}
    queueing = Table("plan", "launches", "queueing [us/launch]", "an empty kernel [us]", "ratio")
    for fused, made in whole.items():
        fuse(fused)
        stream, plan = plan_of(made, 1)
        n = len(plan.steps)
        ours, floor = queueing_us(stream, n, lambda s=stream, p=plan: s._compute(p)), floor_us(stream, n)
        name = "MiniLM, fused" if fused else "MiniLM, GGMLB_FUSE=0"
        queueing.row(name, n, f"{ours:.2f}", f"{floor:.2f}", f"{ours / floor:.2f}")

    saved = Table("texts", "GGMLB_FUSE=0 [ms]", "fused [ms]", "ratio")
    for n_texts in (1, 32):
        times: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(n_rounds):
            for fused, made in whole.items():
                fuse(fused)
                start = perf_counter()
                made.embed([TEXT] * n_texts, n_texts)
                times[fused].append((perf_counter() - start) * 1e3)
        plain, fused_ = (statistics.median(times[fused]) for fused in (False, True))
        saved.row(n_texts, f"{plain:.2f}", f"{fused_:.2f}", f"{fused_ / plain:.2f}")

    first = Table("first text in a process", "[s]")
    with tempfile.TemporaryDirectory() as folder:
        first.row("nothing compiled yet", f"{first_use_s(folder):.2f}")
        warm = statistics.median(first_use_s(folder) for _ in range(3))
        first.row("all compiled before", f"{warm:.3f}")
    path = save("opencl_plan", __doc__ or "", queueing, saved, first, packages=("numpy", "pyopencl"))
    print(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


if __name__ == "__main__":
    main()
