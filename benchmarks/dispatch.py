"""What a node costs besides its arithmetic: a chain of 1000 additions and products of 64 floats, by library.

`x = x + a` and `x = x * b` by turns, so small that nearly all of the time is the library's own. Each library
computes the same graph again and again, on one thread, with all that can be prepared done before: ggmlb's and
ggml's schedulers have split, allocated and planned it; ONNX Runtime's session is made, with its rewriting of
graphs off, since a chain could be folded; NumPy and PyTorch are given the memory of each result. NumPy's row
is a Python loop over bound calls, the least that a library built on it can take. PoCL wakes its threads for
each kernel; a GPU's driver does not. They take turns; the time is the median of all rounds.

    python benchmarks/dispatch.py [--rounds 9]
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
from libraries import GgmlContext, use_threads
from report import Table, save
from turns import turn

Run = Callable[[], Any]

N, WIDTH = 1000, 64

random = np.random.default_rng(0)
X, A = random.standard_normal((2, WIDTH), np.float32)
B = random.uniform(0.9, 1.1, WIDTH).astype(np.float32)  # the products stay about 1
NAMES = ("x", "a", "b")


def expected() -> Any:
    """The result, by plain NumPy."""
    x = X
    for i in range(N):
        x = x * B if i % 2 else x + A
    return x


def chain(c: Any, x: Any, a: Any, b: Any) -> Any:
    """Build the graph by a context's methods."""
    for i in range(N):
        x = c.mul(x, b) if i % 2 else c.add(x, a)
    return x


def calls(add: Callable[..., Any], mul: Callable[..., Any], x: Any, a: Any, b: Any, outs: list[Any]) -> Run:
    """Bind each call of a library that computes at once."""
    bound = []
    for i, out in enumerate(outs):
        bound.append(partial(mul, x, b, out=out) if i % 2 else partial(add, x, a, out=out))
        x = out

    def run() -> None:
        for call in bound:
            call()

    return run


def numpy_chain(stack: ExitStack) -> tuple[Run, Run]:
    outs = list(np.empty((N, WIDTH), np.float32))
    return calls(np.add, np.multiply, X, A, B, outs), lambda: outs[-1]


def torch_chain(stack: ExitStack) -> tuple[Run, Run]:
    import torch

    torch.set_num_threads(1)
    stack.enter_context(torch.inference_mode())
    outs = list(torch.empty(N, WIDTH))
    return calls(torch.add, torch.mul, *map(torch.from_numpy, (X, A, B)), outs), outs[-1].numpy


def onnx_chain(stack: ExitStack) -> tuple[Run, Run]:
    import onnxruntime
    from onnx import TensorProto, helper

    names = ["x", *(f"n{i}" for i in range(N))]
    nodes = [
        helper.make_node("Mul" if i % 2 else "Add", [names[i], "ab"[i % 2]], [names[i + 1]]) for i in range(N)
    ]
    *inputs, output = (
        helper.make_tensor_value_info(n, TensorProto.FLOAT, [WIDTH]) for n in (*NAMES, names[-1])
    )
    graph = helper.make_graph(nodes, "chain", inputs, [output])
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    run = partial(session.run, None, dict(zip(NAMES, (X, A, B), strict=True)))
    return run, lambda: run()[0]


def ggml_chain(stack: ExitStack) -> tuple[Run, Run]:
    import ctypes

    import ggml

    from ggmlb import DType

    backend = ggml.ggml_backend_cpu_init()
    ggml.ggml_backend_cpu_set_n_threads(backend, 1)
    c = GgmlContext(4 << 20)
    inputs = [c.set_input(c.new_tensor(DType.F32, (WIDTH,))) for _ in NAMES]
    out = c.set_output(chain(c, *inputs))
    graph = ggml.ggml_new_graph(c.ctx)
    ggml.ggml_build_forward_expand(graph, out)
    backends = (ggml.ggml_backend_t_ctypes * 1)(backend)
    sched = ggml.ggml_backend_sched_new(backends, None, 1, 2048, False, True)
    ggml.ggml_backend_sched_alloc_graph(sched, graph)
    run = partial(ggml.ggml_backend_sched_graph_compute, sched, graph)

    def again() -> None:
        run()

    def result() -> Any:
        for tensor, value in zip(inputs, (X, A, B), strict=True):
            ggml.ggml_backend_tensor_set(tensor, value.ctypes.data, 0, value.nbytes)
        run()
        values = np.empty(WIDTH, np.float32)
        ggml.ggml_backend_tensor_get(out, ctypes.c_void_p(values.ctypes.data), 0, values.nbytes)
        return values

    return again, result


def ggmlb_chain(device: str, stack: ExitStack) -> tuple[Run, Run]:
    import ggmlb

    backends = [stack.enter_context(ggmlb.init_by_name(name)) for name in dict.fromkeys((device, "CPU"))]
    for backend in backends:
        use_threads(backend, 1)
    c = ggmlb.Context()
    inputs = [c.set_input(c.new_tensor(ggmlb.DType.F32, (WIDTH,))) for _ in NAMES]
    out = c.set_output(chain(c, *inputs))
    graph = ggmlb.Graph().build_forward_expand(out)
    sched = stack.enter_context(ggmlb.Scheduler(backends))
    for tensor in graph.nodes:
        sched.set_tensor_backend(tensor, backends[0])
    sched.alloc_graph(graph)
    for tensor, value in zip(inputs, (X, A, B), strict=True):
        tensor.set_array(value)
    return partial(sched.graph_compute, graph), out.to_numpy


LIBRARIES: dict[str, Callable[[ExitStack], tuple[Run, Run]]] = {
    "ggmlb, CPU": partial(ggmlb_chain, "CPU"),
    "ggmlb, LLVM": partial(ggmlb_chain, "LLVM"),
    "ggmlb, ggml:CPU": partial(ggmlb_chain, "ggml:CPU"),
    "ggmlb, OpenCL0 (PoCL)": partial(ggmlb_chain, "OpenCL0"),
    "NumPy": numpy_chain,
    "PyTorch": torch_chain,
    "ONNX Runtime": onnx_chain,
    "ggml-python": ggml_chain,
}
PACKAGES = ("numpy", "torch", "onnxruntime", "ggml-python", "pyopencl", "llvmlite", "xllamacpp")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    with ExitStack() as stack:
        runs = {}
        for name, make in LIBRARIES.items():
            runs[name], result = make(stack)
            runs[name]()
            if not np.allclose(result(), expected(), rtol=1e-3):
                raise SystemExit(f"{name} computes something else")
        times: dict[str, list[float]] = {name: [] for name in runs}
        for i in range(rounds):
            for name in list(runs)[:: 1 if i % 2 else -1]:
                times[name].append(statistics.median(turn(runs[name])))
    table = Table("library", "time per node [us]", "least and most", "over NumPy's")
    floor = times["NumPy"]
    for name, each in times.items():
        us = [t / N * 1e6 for t in each]
        ratio = statistics.median(a / b for a, b in zip(each, floor, strict=True))
        table.row(name, f"{statistics.median(us):.2f}", f"{min(us):.2f}-{max(us):.2f}", f"{ratio:.2f}")
    save("dispatch", __doc__ or "", table, packages=PACKAGES)


if __name__ == "__main__":
    main()
