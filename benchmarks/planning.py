"""What a graph costs the LLVM device that was not seen before: prompts of a new size, and 1000 nodes.

Prompts are filled up to few sizes; the first of each size builds a graph, plans it and binds its steps, and
later ones compute it. `new size` is what the first takes more than the second, the median of several sizes;
kernels are on disk, and their own time is not counted. `first` is a graph of 1024 nodes (as in
`scheduler.py`) given to a new scheduler and computed once; the stream has computed one like it before. All
times are the processor time of the thread that plans, in milliseconds, with the least in brackets: other
work on the machine counts less so.

    python benchmarks/planning.py [--rounds 5] [--model FILE] [--save]
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from report import Table, save
from scheduler import Llama

import ggmlb
from ggmlb import Scheduler
from ggmlb.backends.llvm import backend as llvm_backend
from ggmlb.backends.llvm import plan as llvm_plan
from ggmlb.interface import Backend
from ggmlb.models import TextModel, default_text_model
from ggmlb.models.text.decoder import Decoder
from ggmlb.runtime.alloc import GraphAllocator
from ggmlb.runtime.compile import executable
from ggmlb.runtime.scheduler import cache

SIZES = (32, 48, 64, 96, 128, 192, 256, 384)
"""Tokens of prompts; the first size is not counted."""

N_LAYERS = 32

PARTS: tuple[tuple[Any, str, str], ...] = (
    (Decoder, "_new_graph", "build the graph"),
    (cache, "IndexedGraph", "read the graph"),
    (executable, "assign", "choose backends"),
    (executable, "split_graph", "split"),
    (executable, "insert_copies", "insert copies"),
    (llvm_backend, "gather", "find groups, and order nodes"),
    (GraphAllocator, "alloc_indexed", "plan memory"),
    (Backend, "_check_graph", "check places"),
    (llvm_plan, "fuse", "ask whether groups still fit"),
    (llvm_plan.LlvmPlan, "_lower", "lower new kinds of nodes, and bind"),
    (llvm_backend.LlvmBackend, "_compute", "kernels"),
)
"""The parts of the work: what is timed where. The kernels at the end are not counted."""

clock = time.thread_time


class Parts:
    """Times of parts, without those of parts within them [s]."""

    def __init__(self) -> None:
        self.times: Counter[str] = Counter()
        self._inner: list[float] = []
        for owner, name, label in PARTS:
            setattr(owner, name, self._timed(getattr(owner, name), label))

    def _timed(self, function: Callable[..., Any], label: str) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._inner.append(0.0)
            start = clock()
            try:
                return function(*args, **kwargs)
            finally:
                taken = clock() - start
                self.times[label] += taken - self._inner.pop()
                if self._inner:
                    self._inner[-1] += taken

        return timed

    def of(self, call: Callable[[], object]) -> dict[str, float]:
        """The times of a call by part, and of all of it but the kernels."""
        self.times.clear()
        start = clock()
        call()
        taken = clock() - start
        return {**self.times, "all": taken - self.times["kernels"]}


def new_sizes(parts: Parts, model: TextModel) -> list[dict[str, float]]:
    """What the first prompt of each size takes more than the second [s]."""
    found = []
    for n in SIZES:
        prompt = [300 + i % 1000 for i in range(n)]
        first, again = (
            parts.of(lambda p=prompt: model.generate(p, max_tokens=1, temperature=0)) for _ in range(2)
        )
        found.append({part: taken - again.get(part, 0.0) for part, taken in first.items()})
    return found[1:]


def first_computations(parts: Parts, rounds: int) -> tuple[list[dict[str, float]], list[dict[str, float]]]:
    """What a graph takes of a new scheduler, and another graph like it of the same [s]."""
    first, rebuilt = [], []
    with ExitStack() as stack:
        backends = [stack.enter_context(ggmlb.init_by_name(name)) for name in ("LLVM", "CPU")]
        llama = Llama(backends[:1], N_LAYERS, stack)
        for _ in range(rounds + 1):
            graph, again = llama.graph(), llama.graph()
            with Scheduler(backends) as scheduler:
                placed = parts.of(lambda s=scheduler, g=graph: s.alloc_graph(g))
                llama.set_inputs(graph)
                computed = parts.of(lambda s=scheduler, g=graph: s.graph_compute(g))
                first.append(dict(Counter(placed) + Counter(computed)))
                rebuilt.append(parts.of(lambda s=scheduler, g=again: s.alloc_graph(g)))
    return first[1:], rebuilt[1:]


def row(label: str, *columns: list[dict[str, float]]) -> list[str]:
    """A row of the table: medians, and the least."""
    cells = [label]
    for runs in columns:
        times = [1e3 * times.get(label, 0.0) for times in runs]
        cells.append(f"{statistics.median(times):.2f} ({min(times):.2f})" if any(times) else "")
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", default="", help="a GGUF file; the installed SmolLM2 by default")
    parser.add_argument("--save", action="store_true", help="write results/planning.md")
    args = parser.parse_args()
    parts = Parts()
    sizes: list[dict[str, float]] = []
    for _ in range(args.rounds):
        with TextModel(args.model or default_text_model(), ["LLVM", "CPU"], n_ctx=2048) as model:
            sizes += new_sizes(parts, model)
    first, rebuilt = first_computations(parts, 3 * args.rounds)
    table = Table("part", "new size of SmolLM2 [ms]", "1024 nodes, first [ms]", "1024 nodes, rebuilt [ms]")
    for label in ("all", *(label for _, _, label in PARTS[:-1])):
        table.row(*row(label, sizes, first, rebuilt))
    if args.save:
        save("planning", __doc__ or "", table, packages=("numpy", "llvmlite"))


if __name__ == "__main__":
    main()
