"""What a CUDA stream did and when, from timed events around each node and copy."""

from __future__ import annotations

from itertools import pairwise
from time import perf_counter_ns

import numpy as np

from ggmlb import Context, DType, Graph, alloc_ctx_tensors
from ggmlb.backends.cuda.backend import CudaBackend
from ggmlb.inspect.trace import Trace
from tests.support.gpus import CUDA, device_fixture

device = device_fixture(*CUDA)


def test_nodes_and_copies_have_times(stream: CudaBackend, other: CudaBackend) -> None:
    ctx = Context()
    x = ctx.new_tensor(DType.F32, (1000,), name="x")
    y = ctx.set_name(ctx.exp(ctx.set_name(ctx.sqr(x), "s")), "y")
    z = ctx.new_tensor(DType.F32, (1000,), name="z")
    graph = Graph().build_forward_expand(y)
    with alloc_ctx_tensors(ctx, stream):
        stream.set_tensor_async(x, np.zeros(1000, np.float32))
        for _ in range(3):  # the plan becomes a CUDA graph
            stream.graph_compute(graph)
        out = np.zeros(1000, np.float32)
        before = perf_counter_ns()
        with Trace([stream, other]) as trace:
            stream.set_tensor_async(x, np.ones(1000, np.float32))
            stream.graph_compute_async(graph)
            assert other.cpy_tensor_async(stream, y, z)
            other.get_tensor_async(z, out)
        after = perf_counter_ns()
        assert np.allclose(out, np.e)
        stream.graph_compute(graph)  # as before it was timed
        assert stream.commands is stream.clock is None
        rows: dict[int, list[dict[str, object]]] = {}
        for event in trace.events:
            if event["ph"] == "X" and event["pid"]:
                rows.setdefault(event["tid"], []).append(event)
        said = {row: [str(e["name"]).split("'")[1] for e in found] for row, found in rows.items()}
        assert said in (
            {0: ["s", "y"], 1: ["x"], 3: ["y", "z"]},
            {0: ["y"], 1: ["x"], 3: ["y", "z"]},  # fused
        )
        for found in rows.values():
            assert all(e["dur"] >= 0 for e in found)
            span = (after - before) * 1e-3
            assert all(-1000 < e["ts"] <= e["ts"] + e["dur"] < span + 1000 for e in found), (
                "on the host's clock"
            )
            assert all(a["ts"] + a["dur"] <= b["ts"] + 1e-3 for a, b in pairwise(found))
        assert rows[1][-1]["ts"] < rows[0][0]["ts"] < rows[3][0]["ts"]
