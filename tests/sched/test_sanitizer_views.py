"""The sanitizer finds what programs do to memory through views of it, without a call."""

from __future__ import annotations

import numpy as np
import pytest

import ggmlb
from ggmlb import Context, Graph, alloc_ctx_tensors
from tests.support.races import F32, OnHostMemory, doubled, found, placed, right


@pytest.fixture
def on_host(bench):
    """A stream whose work in the host's memory runs when it is waited for."""
    with OnHostMemory(bench.reg, 7, lambda op: None, 1 << 30).init_backend() as stream:
        yield stream


VIEWS = {
    "as_array": lambda x: x.as_array(),
    "numpy.asarray": np.asarray,
    "dlpack": np.from_dlpack,
    "base": lambda x: x.buffer.base[x.offset : x.offset + x.nbytes].view(np.float32),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
@pytest.mark.parametrize("again", [False, True])
def test_an_operand_overwritten_through_a_view(bench, on_host, sanitizer, view, again):
    (x,) = placed(bench.cpu, "x")
    graph, _ = doubled(x)
    values = view(x)
    values[:] = 1
    for _ in range(2):
        on_host.graph_compute_async(graph)
        on_host.synchronize()
        values[:] += 1  # now it may
    on_host.graph_compute_async(graph)
    values[3] = 99
    line = r"test_sanitizer_views.py:\d+"
    with found("changed", "'x'", f"Fake7's graph_plan_compute, queued at {line}", "synchronize Fake7"):
        if again:
            on_host.graph_compute_async(graph)
        else:
            on_host.synchronize()


@pytest.mark.parametrize("order", ["synchronize", "event"])
def test_an_operand_overwritten_in_order(bench, on_host, sanitizer, order):
    (x,) = placed(bench.cpu, "x")
    graph, _ = doubled(x)
    event = on_host.device.event_new()
    for _ in range(3):
        on_host.graph_compute_async(graph)
        on_host.event_record(event)
        on_host.synchronize() if order == "synchronize" else event.synchronize()
        x.as_array()[:] = 7
    on_host.synchronize()


def test_what_queued_work_writes_itself_is_no_change(bench, on_host, sanitizer):
    (x,) = placed(bench.cpu, "x")
    ctx = Context()
    y = ctx.scale_inplace(ctx.add(x, x), 3.0)
    z = ctx.cpy(y, x)  # read at first, and then written
    memory = alloc_ctx_tensors(ctx, bench.cpu)
    graph = Graph().build_forward_expand(z)
    x.set_array(np.ones(8))
    with on_host.device.init_backend() as other:
        for _ in range(3):
            on_host.graph_compute_async(graph)
        event = on_host.device.event_new()
        on_host.event_record(event)
        other.event_wait(event)
        other.set_tensor_async(x, np.zeros(8, np.float32))
        other.synchronize()
        on_host.synchronize()
    memory.free()


def test_bytes_between_the_elements_may_change(bench, on_host, sanitizer):
    (x,) = placed(bench.cpu, "x")
    left = Context().view_2d(x, 1, 4, 8, 0)  # each second element
    graph, _ = doubled(left)
    for i, rule in ((1, right()), (2, found("changed", "'x"))):
        on_host.graph_compute_async(graph)
        x.as_array()[i] = 99
        with rule:
            on_host.synchronize()


def test_a_view_given_to_a_transfer(bench, sanitizer):
    (x,), (copy,) = placed(bench.cpu, "x"), placed(bench.gpu0, "copy")
    bench.gpu0.set_tensor_async(copy, x.as_array())
    x.as_array()[0] = 5
    with found("changed", "the data for", "'copy'", "Fake0's set_tensor_async"):
        bench.gpu0.synchronize()


@pytest.mark.parametrize("export", [np.asarray, np.from_dlpack], ids=["asarray", "dlpack"])
def test_an_export_of_what_is_still_computed(bench, on_host, sanitizer, export):
    (x,) = placed(bench.cpu, "x")
    graph, y = doubled(x)
    on_host.graph_compute_async(graph)
    with found("race", "the host's", "reads", "'y'", "Fake7's graph_plan_compute", "still write"):
        export(y)
    y.as_array()  # for later
    on_host.synchronize()
    assert not export(y).any()


def test_an_array_under_a_buffer_of_a_real_device(sanitizer):
    with ggmlb.init_by_name("OpenCL0") as stream:
        if not stream.device.caps.buffer_from_host_ptr:
            pytest.skip("it has memory of its own")
        array = np.ones(1 << 12, np.float32)
        buffer = stream.device.buffer_from_host_ptr(array)
        x = Context().new_tensor(F32, (1 << 12,), name="x")
        ggmlb.tensor_alloc(buffer, x, 0)
        graph, _ = doubled(x)
        stream.graph_compute_async(graph)
        stream.synchronize()
        array[:] = 2
        stream.graph_compute_async(graph)
        array[17] = 99
        with found("changed", "'x'", "OpenCL0's graph_plan_compute"):
            stream.synchronize()
