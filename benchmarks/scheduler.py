"""What the scheduler itself costs: splitting, allocating and re-computing a graph of 1000 nodes.

The graph is LLaMA-like (attention with a KV cache, gated feed-forward), so small that the kernels cost
little. Computing it through the scheduler is compared with calling the steps of the same plans directly.

    python benchmarks/scheduler.py [--rounds N]
"""

from __future__ import annotations

import argparse
import statistics
import time
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, cast

import numpy as np
from report import Table, save

import ggmlb
from ggmlb import BufferUsage, Context, DType, Graph, Scheduler, Tensor, tensor_copy
from ggmlb.alloc import alloc_ctx_tensors
from ggmlb.testing.fake import FakeReg

if TYPE_CHECKING:
    from collections.abc import Callable

    from ggmlb.backends.array.plan import ArrayPlan
    from ggmlb.interface import Backend

WIDTH, HEADS, N_KV = 64, 4, 32


class Llama:
    """Weights of a tiny LLaMA-like model, and the graph of one decode step.

    Args:
        backends: Layer `i` of `n_layers` lies in the memory of `backends[i * len(backends) // n_layers]`.
    """

    def __init__(self, backends: list[Backend], n_layers: int, stack: ExitStack) -> None:
        self.layers: list[dict[str, Tensor]] = []
        random = np.random.default_rng(0)
        for i in range(n_layers):
            ctx = Context()
            layer = {
                name: ctx.new_tensor(DType.F32, ne, name=f"{name}.{i}")
                for name, ne in {
                    "norm": (WIDTH,), "wq": (WIDTH, WIDTH), "wk": (WIDTH, WIDTH), "wv": (WIDTH, WIDTH),
                    "wo": (WIDTH, WIDTH), "norm2": (WIDTH,), "gate": (WIDTH, 2 * WIDTH),
                    "up": (WIDTH, 2 * WIDTH),
                    "down": (2 * WIDTH, WIDTH), "k": (WIDTH, N_KV), "v": (WIDTH, N_KV),
                }.items()
            }  # fmt: skip
            buffer = stack.enter_context(alloc_ctx_tensors(ctx, backends[i * len(backends) // n_layers]))
            buffer.usage = BufferUsage.WEIGHTS
            for tensor in layer.values():
                tensor.set_array(0.1 * random.standard_normal(tensor.shape, np.float32))
            self.layers.append(layer)

    def graph(self) -> tuple[Graph, Context]:
        """One token through all layers: 31 nodes a layer, 24 of which compute."""
        c = Context()
        x = c.set_input(c.new_tensor(DType.F32, (WIDTH, 1), name="x"))
        pos = c.set_input(c.new_tensor(DType.I32, (1,), name="pos"))
        row = c.set_input(c.new_tensor(DType.I64, (1,), name="row"))
        mask = c.set_input(c.new_tensor(DType.F32, (N_KV, 1), name="mask"))
        graph = Graph()
        d = WIDTH // HEADS
        for w in self.layers:
            h = c.mul(c.rms_norm(x, 1e-5), w["norm"])
            q = c.rope(c.reshape_3d(c.mul_mat(w["wq"], h), d, HEADS, 1), pos, d)
            k = c.rope(c.reshape_3d(c.mul_mat(w["wk"], h), d, HEADS, 1), pos, d)
            v = c.mul_mat(w["wv"], h)
            graph.build_forward_expand(c.set_rows(w["k"], c.reshape_2d(k, WIDTH, 1), row))
            graph.build_forward_expand(c.set_rows(w["v"], v, row))
            keys = c.permute(c.reshape_3d(w["k"], d, HEADS, N_KV), 0, 2, 1, 3)
            values = c.cont(c.permute(c.reshape_3d(w["v"], d, HEADS, N_KV), 1, 2, 0, 3))
            p = c.soft_max_ext(c.mul_mat(keys, c.permute(q, 0, 2, 1, 3)), mask, d**-0.5, 0.0)
            a = c.cont_2d(c.permute(c.mul_mat(values, p), 0, 2, 1, 3), WIDTH, 1)
            x = c.add(x, c.mul_mat(w["wo"], a))
            h = c.mul(c.rms_norm(x, 1e-5), w["norm2"])
            x = c.add(x, c.mul_mat(w["down"], c.swiglu_split(c.mul_mat(w["gate"], h), c.mul_mat(w["up"], h))))
        graph.build_forward_expand(c.set_output(x))
        return graph, c

    @staticmethod
    def set_inputs(graph: Graph) -> None:
        for leaf in graph.leafs:
            if leaf.name in ("x", "mask"):
                leaf.set_array(np.zeros(leaf.shape))
            elif leaf.name in ("pos", "row"):
                leaf.set_array(np.zeros(1, np.int64))


def timed(call: Callable[[], object], rounds: int) -> float:
    """Return the median of several timings [s]."""
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def measure(name: str, backends: list[Backend], layers_on: list[Backend], rounds: int, table: Table) -> None:
    with ExitStack() as stack:
        model = Llama(layers_on, 32, stack)
        graph, _ = model.graph()
        n = len(graph.nodes)

        def first() -> None:
            with Scheduler(backends) as fresh:
                start = time.perf_counter()
                fresh.alloc_graph(graph)
                firsts.append(time.perf_counter() - start)

        firsts: list[float] = []
        for _ in range(rounds):
            first()
        sched = stack.enter_context(Scheduler(backends))
        sched.alloc_graph(graph)
        again = timed(lambda: sched.alloc_graph(graph), rounds)
        model.set_inputs(graph)
        sched.graph_compute(graph)

        steps: list[Callable[[], object]] = []
        for split in sched.splits:
            steps += [partial(tensor_copy, item.src, item.copy) for item in split.inputs]
            steps += cast("ArrayPlan", split.plan).steps

        def bare() -> None:
            for step in steps:
                step()

        whole, kernels = [], []
        with np.errstate(all="ignore"):
            for _ in range(5):
                whole.append(timed(lambda: sched.graph_compute(graph), rounds))
                kernels.append(timed(bare, rounds))
        over = statistics.median(a - b for a, b in zip(whole, kernels, strict=True))
        table.row(
            name, n, sched.n_splits, f"{statistics.median(firsts) * 1e3:.1f}", f"{again * 1e3:.1f}",
            f"{statistics.median(whole) * 1e3:.2f}", f"{over / n * 1e6:.2f}",
        )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    table = Table(
        "graph", "nodes", "splits", "first split and allocation [ms]", "same graph allocated again [ms]",
        "computed again [ms]", "over the steps alone [us/node]",
    )  # fmt: skip
    with ggmlb.init_by_name("CPU") as cpu:
        measure("CPU", [cpu], [cpu], rounds, table)
        fakes = [d.init_backend() for d in FakeReg(2).devices]
        measure("two devices and CPU", [*fakes, cpu], fakes, rounds, table)
    save("scheduler", __doc__ or "", table)


if __name__ == "__main__":
    main()
