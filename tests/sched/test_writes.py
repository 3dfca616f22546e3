"""Nodes that write into other tensors: copies are made anew, and accesses of several devices are ordered."""

from __future__ import annotations

import numpy as np
import pytest

from ggmlb import Context, DType, Graph, Scheduler, Tensor, alloc_ctx_tensors
from ggmlb.core.errors import UnsupportedOpError
from ggmlb.testing.fake import FakeReg
from tests.support.sequences import needless_copies


def placed(bench, backend, *ne: int) -> Tensor:
    """A tensor of ones, not a weight, in the memory of a backend."""
    ctx = Context()
    tensor = ctx.new_tensor(DType.F32, ne)
    bench.stack.enter_context(alloc_ctx_tensors(ctx, backend))
    tensor.set_array(np.ones(tensor.shape))
    return tensor


def write_scaled(c: Context, s: Tensor) -> Tensor:
    return c.scale_inplace(s, 10.0)


def write_elsewhere(c: Context, s: Tensor) -> Tensor:
    return c.cpy(c.scale(s, 10.0), s)


def write_view(c: Context, s: Tensor) -> Tensor:
    return c.scale_inplace(c.view_2d(s, 8, 2, s.nb[1], 2 * s.nb[1]), 10.0)


def write_rows(c: Context, s: Tensor) -> Tensor:
    ids = c.set_name(c.new_tensor(DType.I64, (4,)), "ids")
    return c.set_rows(s, c.scale(s, 10.0), c.set_input(ids))


@pytest.mark.parametrize("n_copies", [1, 3])
@pytest.mark.parametrize("where", ["placed", "input", "computed"])
@pytest.mark.parametrize("write", [write_scaled, write_elsewhere, write_view, write_rows])
def test_what_is_written_is_copied_again(bench, write, where, n_copies):
    c = Context()
    x = c.set_input(c.new_tensor(DType.F32, (8, 4)))
    s = {"placed": placed(bench, bench.gpu1, 8, 4), "input": x, "computed": c.scale(x, 1.0)}[where]
    w = bench.weight(bench.gpu0, 8, 8)
    w.set_array(np.eye(8))
    before = c.mul_mat(w, s)
    graph = Graph().build_forward_expand(c.set_output(before))
    written = write(c, s)
    through, after = c.mul_mat(w, written), c.mul_mat(w, s)
    for t in (written, through, after, c.view_2d(s, 8, 2, s.nb[1], 0)):
        graph.build_forward_expand(c.set_output(t) if t.view_src is None else t)
    with Scheduler(bench.backends, parallel=n_copies > 1, n_copies=n_copies) as sched:
        sched.set_tensor_backend(s, bench.gpu1)
        sched.set_tensor_backend(written, bench.gpu1)
        sched.alloc_graph(graph)
        for _ in range(3):
            (s if where == "placed" else x).set_array(np.ones((4, 8)))
            for leaf in graph.leafs:
                if leaf.name == "ids":
                    leaf.set_array(np.arange(4))
            sched.graph_compute(graph)
            rows = slice(2 * (write is write_view), None)
            assert (before.to_numpy() == 1).all()
            assert (through.to_numpy() == 10).all()
            assert (after.to_numpy()[rows] == 10).all()
        assert needless_copies(sched) == []


@pytest.mark.parametrize("events", [True, False])
@pytest.mark.parametrize("reader", ["in place", "copy"])
def test_devices_that_write_into_host_memory_are_waited_for(make_bench, reader, events):
    bench = make_bench(FakeReg(2, events=events))
    users = (bench.gpu0,) if reader == "copy" else (bench.gpu0, bench.gpu1)
    for backend in users:
        own = backend.default_buffer_type
        backend.device.supports_buft = lambda buft, own=own: buft.is_host or buft is own
    c = Context()
    s = placed(bench, bench.cpu, 8, 4)
    graph, results = Graph(), []
    for _ in range(4):
        written = c.scale_inplace(s, 2.0)
        results.append(c.set_output(c.scale(s, 1.0)))
        graph.build_forward_expand(written).build_forward_expand(results[-1])
    with Scheduler(bench.backends) as sched:
        for i, node in enumerate(graph.nodes):
            sched.set_tensor_backend(node, bench.backends[i % 2])
        sched.alloc_graph(graph)
        for _ in range(3):
            s.set_array(np.ones((4, 8)))
            sched.graph_compute(graph)
            assert [float(t.to_numpy().max()) for t in results] == [2, 4, 8, 16]


@pytest.mark.parametrize("on", [0, 2])
def test_moments_are_written_where_they_lie(bench, on):
    """An optimizer's step writes operands besides its result; in a copy, the values would be lost."""
    c = Context()
    a, m, v = (placed(bench, bench.backends[i], 8, 4) for i in (0, on, 0))
    c.set_param(a)
    grad, numbers = (c.set_input(c.new_tensor(DType.F32, ne)) for ne in ((8, 4), (7,)))
    graph = Graph().build_forward_expand(c.opt_step_adamw(a, grad, m, v, numbers))
    with Scheduler(bench.backends) as sched:
        if on:
            with pytest.raises(UnsupportedOpError, match="writes into"):
                sched.alloc_graph(graph)
            return
        sched.alloc_graph(graph)
        grad.set_array(np.full((4, 8), 2.0))
        numbers.set_array(np.array([0.1, 0.5, 0.5, 0, 0, 1, 1]))
        sched.graph_compute(graph)
        assert (m.to_numpy() == 1.5).all()
