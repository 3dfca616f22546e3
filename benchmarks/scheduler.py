"""What the scheduler itself costs: building, splitting, allocating and computing a graph of 1000 nodes.

The graph is LLaMA-like (attention with a KV cache, gated feed-forward), so small that the kernels cost
little. The first computation includes what is left until then: plans, and the tensors that they are made
of. "Rebuilt" is what a decoding program does for each token: the same graph made anew, of new tensors,
allocated by the same scheduler. Computing it again is compared with calling the steps of the same plans
directly; for ggml, with computing it on the backend without its scheduler. ggml runs through ggml-python,
which adds what a call through ctypes costs where objects are built. Times are medians, with the least in
brackets: other work on a shared machine may double the median, and each row has its own moment.

    python benchmarks/scheduler.py [--rounds N]
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any, cast

import numpy as np
from report import Table, save

import ggmlb
from ggmlb import BufferUsage, Context, DType, Graph, GraphAllocator, Scheduler, Tensor, tensor_copy
from ggmlb.backends.cpu.plan import CpuPlan
from ggmlb.interface import Backend
from ggmlb.runtime.alloc import alloc_ctx_tensors
from ggmlb.runtime.compile.assign import AssignRules
from ggmlb.runtime.compile.executable import compile_graph
from ggmlb.runtime.compile.read import IndexedGraph, is_compute
from ggmlb.testing.fake import FakeReg

WIDTH, HEADS, N_KV = 64, 4, 32


NAMES = ("norm", "wq", "wk", "wv", "wo", "norm2", "gate", "up", "down", "k", "v")
EXTENTS: dict[str, tuple[int, ...]] = {
    **{name: (WIDTH, WIDTH) for name in ("wq", "wk", "wv", "wo")},
    **{name: (WIDTH,) for name in ("norm", "norm2")},
    **{name: (WIDTH, N_KV) for name in ("k", "v")},
    **{name: (WIDTH, 2 * WIDTH) for name in ("gate", "up")},
    "down": (2 * WIDTH, WIDTH),
}


def decode_step(c: Any, layers: list[dict[str, Any]], expand: Callable[[Any], object]) -> None:
    """Build one token through all layers, 32 nodes each; `c` has ggml's ops as methods."""
    x = c.set_input(c.new_tensor(DType.F32, (WIDTH, 1)))
    pos = c.set_input(c.new_tensor(DType.I32, (1,)))
    row = c.set_input(c.new_tensor(DType.I64, (1,)))
    mask = c.set_input(c.new_tensor(DType.F32, (N_KV, 1)))
    d = WIDTH // HEADS
    for w in layers:
        h = c.mul(c.rms_norm(x, 1e-5), w["norm"])
        q = c.rope(c.reshape_3d(c.mul_mat(w["wq"], h), d, HEADS, 1), pos, d, 0)
        k = c.rope(c.reshape_3d(c.mul_mat(w["wk"], h), d, HEADS, 1), pos, d, 0)
        v = c.mul_mat(w["wv"], h)
        expand(c.set_rows(w["k"], c.reshape_2d(k, WIDTH, 1), row))
        expand(c.set_rows(w["v"], v, row))
        keys = c.permute(c.reshape_3d(w["k"], d, HEADS, N_KV), 0, 2, 1, 3)
        values = c.cont(c.permute(c.reshape_3d(w["v"], d, HEADS, N_KV), 1, 2, 0, 3))
        p = c.soft_max_ext(c.mul_mat(keys, c.permute(q, 0, 2, 1, 3)), mask, d**-0.5, 0.0)
        a = c.cont_2d(c.permute(c.mul_mat(values, p), 0, 2, 1, 3), WIDTH, 1)
        x = c.add(x, c.mul_mat(w["wo"], a))
        h = c.mul(c.rms_norm(x, 1e-5), w["norm2"])
        x = c.add(x, c.mul_mat(w["down"], c.swiglu_split(c.mul_mat(w["gate"], h), c.mul_mat(w["up"], h))))
    expand(c.set_output(x))


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
            layer = {name: ctx.new_tensor(DType.F32, EXTENTS[name], name=f"{name}.{i}") for name in NAMES}
            buffer = stack.enter_context(alloc_ctx_tensors(ctx, backends[i * len(backends) // n_layers]))
            buffer.usage = BufferUsage.WEIGHTS
            for tensor in layer.values():
                tensor.set_array(0.1 * random.standard_normal(tensor.shape, np.float32))
            self.layers.append(layer)

    def graph(self) -> Graph:
        graph = Graph()
        decode_step(Context(), self.layers, graph.build_forward_expand)
        return graph

    @staticmethod
    def set_inputs(graph: Graph) -> None:
        for leaf in graph.leafs:
            if leaf.flags:
                leaf.set_array(np.zeros(leaf.shape))


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
        n = len(model.graph().nodes)
        builds, firsts, planned, rebuilts = [], [], [], []
        for _ in range(rounds):
            graph = model.graph()
            with Scheduler(backends) as fresh:
                firsts.append(timed(partial(fresh.alloc_graph, graph), 1))
                model.set_inputs(graph)
                planned.append(timed(partial(fresh.graph_compute, graph), 1))
        sched = stack.enter_context(Scheduler(backends))
        sched.alloc_graph(graph)
        for _ in range(rounds):
            start = time.perf_counter()
            graph = model.graph()
            built = time.perf_counter()
            sched.alloc_graph(graph)
            builds.append(built - start)
            rebuilts.append(time.perf_counter() - built)
        model.set_inputs(graph)
        sched.graph_compute(graph)

        steps: list[Callable[[], object]] = []
        for split in sched.splits:
            steps += [partial(tensor_copy, item.tensor, item.copy) for item in split.inputs]
            steps += cast("CpuPlan", split.plan).steps

        def bare() -> None:
            for step in steps:
                step()

        whole, kernels = [], []
        with np.errstate(all="ignore"):
            for _ in range(5):
                whole.append(timed(lambda: sched.graph_compute(graph), rounds))
                kernels.append(timed(bare, rounds))
        report(table, name, n, sched.n_splits, builds, firsts, planned, rebuilts, whole, kernels)


def report(
    table: Table,
    name: str,
    n: int,
    n_splits: int,
    builds: list[float],
    firsts: list[float],
    planned: list[float],
    rebuilts: list[float],
    whole: list[float],
    kernels: list[float],
) -> None:
    over = statistics.median(a - b for a, b in zip(whole, kernels, strict=True))
    table.row(
        name, n, n_splits, f"{statistics.median(builds) / n * 1e6:.1f}",
        in_ms(firsts), in_ms(planned), in_ms(rebuilts), in_ms(whole), f"{over / n * 1e6:.2f}",
    )  # fmt: skip


def in_ms(times: list[float]) -> str:
    return f"{statistics.median(times) * 1e3:.2f} ({min(times) * 1e3:.2f})"


def measure_ggml(rounds: int, table: Table) -> None:
    """The same graph with ggml's own scheduler on its CPU backend."""
    import ggml
    from libraries import GgmlContext

    backend = ggml.ggml_backend_cpu_init()
    ggml.ggml_backend_cpu_set_n_threads(backend, 1)
    held = GgmlContext(4 << 20)
    layers = [{name: held.new_tensor(DType.F32, EXTENTS[name]) for name in NAMES} for _ in range(32)]
    buffer = ggml.ggml_backend_alloc_ctx_tensors(held.ctx, backend)
    ggml.ggml_backend_buffer_set_usage(buffer, ggml.GGML_BACKEND_BUFFER_USAGE_WEIGHTS)
    ggml.ggml_backend_buffer_clear(buffer, 0)
    backends = (ggml.ggml_backend_t_ctypes * 1)(backend)

    def build() -> tuple[GgmlContext, Any]:
        c = GgmlContext(4 << 20)
        graph = ggml.ggml_new_graph(c.ctx)
        decode_step(c, layers, lambda t: ggml.ggml_build_forward_expand(graph, t))
        return c, graph

    def clear_inputs(graph: Any) -> None:
        """Make the inputs zeros, so that positions and rows are valid."""
        for i in range(ggml.ggml_graph_n_nodes(graph)):
            for src in ggml.ggml_graph_node(graph, i).contents.src:
                if src and src.contents.flags & ggml.GGML_TENSOR_FLAG_INPUT:
                    ctypes.memset(src.contents.data, 0, ggml.ggml_nbytes(src))

    def new_sched() -> Any:
        return ggml.ggml_backend_sched_new(backends, None, 1, 2048, False, True)

    builds, firsts, planned, rebuilts = [], [], [], []
    for _ in range(rounds):
        c, graph = build()
        fresh = new_sched()
        firsts.append(timed(lambda f=fresh, g=graph: ggml.ggml_backend_sched_alloc_graph(f, g), 1))
        clear_inputs(graph)
        planned.append(timed(lambda f=fresh, g=graph: ggml.ggml_backend_sched_graph_compute(f, g), 1))
        ggml.ggml_backend_sched_free(fresh)
        c.free()
    sched = new_sched()
    for _ in range(rounds):
        start = time.perf_counter()
        c, graph = build()
        built = time.perf_counter()
        ggml.ggml_backend_sched_reset(sched)
        ggml.ggml_backend_sched_alloc_graph(sched, graph)
        builds.append(built - start)
        rebuilts.append(time.perf_counter() - built)
    n = ggml.ggml_graph_n_nodes(graph)
    clear_inputs(graph)
    whole, kernels = [], []
    for _ in range(5):
        whole.append(timed(lambda: ggml.ggml_backend_sched_graph_compute(sched, graph), rounds))
        kernels.append(timed(lambda: ggml.ggml_backend_graph_compute(backend, graph), rounds))
    n_splits = ggml.ggml_backend_sched_get_n_splits(sched)
    report(table, "ggml-python, CPU", n, n_splits, builds, firsts, planned, rebuilts, whole, kernels)


def where_it_goes(backends: list[Backend], layers_on: list[Backend], rounds: int, table: Table) -> None:
    """The parts of a first allocation, and of one of a known topology."""
    bufts = [b.default_buffer_type for b in backends]
    rules = AssignRules(backends, bufts)
    with ExitStack() as stack:
        model = Llama(layers_on, 32, stack)
        times: dict[str, list[float]] = {}

        def part(name: str, call: Callable[[], Any]) -> Any:
            start = time.perf_counter()
            result = call()
            times.setdefault(name, []).append(time.perf_counter() - start)
            return result

        for _ in range(rounds):
            graph, again = model.graph(), model.graph()
            read = part("read the graph", lambda g=graph: IndexedGraph(g, is_compute))
            executable = part(
                "choose backends, split, and insert copies",
                lambda r=read: compile_graph(r, rules, {}, 1),
            )
            with GraphAllocator([*bufts, bufts[-1]], keep_inputs=True) as allocator:
                part("plan and get memory", lambda e=executable, a=allocator: e.allocate(a))
                part("place the tensors", lambda e=executable, a=allocator: e.place(a))
                part("before it is computed first: the splits' graphs", lambda e=executable: e.graphs(0))
                executable.release()
                tensors = part("again: compare it", lambda e=executable, g=again: e.match(g, {}))
                executable.bind(tensors)
                part("again: place the tensors", lambda e=executable, a=allocator: e.place(a))
                part("again: take the places back", executable.release)
        for name, values in times.items():
            table.row(name, f"{statistics.median(values) * 1e3:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    table = Table(
        "graph", "nodes", "splits", "objects built [us/node]", "first split and allocation [ms]",
        "first computation, with its plans [ms]", "rebuilt, allocated again [ms]", "computed again [ms]",
        "over the kernels alone [us/node]",
    )  # fmt: skip
    parts = Table("part of an allocation on the CPU", "median [ms]")
    with ggmlb.init_by_name("CPU") as cpu:
        measure("ggmlb, CPU", [cpu], [cpu], rounds, table)
        fakes: list[Backend] = [d.init_backend() for d in FakeReg(2).devices]
        measure("ggmlb, two devices and CPU", [*fakes, cpu], fakes, rounds, table)
        measure_ggml(rounds, table)
        where_it_goes([cpu], [cpu], rounds, parts)
    save("scheduler", __doc__ or "", table, parts, packages=("numpy", "ggml-python"))


if __name__ == "__main__":
    main()
