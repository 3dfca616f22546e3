"""A pipeline of four layers over two OpenCL devices, and over two streams of one, with the timeline."""

from __future__ import annotations

import pytest

from tests.support.processes import python

PROGRAM = """
import os
import sys
import numpy as np
import pyopencl as cl
from ggmlb import BufferUsage, Context, DType, Graph, Scheduler
from ggmlb import alloc_ctx_tensors, device_by_name, init_by_name

WIDTH, ROWS, N = 512, 64, 16
devices = [device_by_name(name) for name in sys.argv[1:]]
streams = [d.init_backend() for d in devices]
for stream in streams:  # commands that carry their times
    profiled = cl.command_queue_properties.PROFILING_ENABLE
    stream.queue = cl.CommandQueue(stream.device.context, stream.device.cl_device, properties=profiled)
cpu = init_by_name("CPU")
random = np.random.default_rng(0)
weights = []
for i in range(4):
    ctx = Context()
    weights.append(ctx.new_tensor(DType.F32, (WIDTH, WIDTH), f"w{i}"))
    alloc_ctx_tensors(ctx, streams[i // 2]).usage = BufferUsage.WEIGHTS
    weights[-1].set_array(random.standard_normal((WIDTH, WIDTH), np.float32) / WIDTH**0.5)

def build(sched):
    c = Context()
    x = y = c.set_input(c.new_tensor(DType.F32, (WIDTH, ROWS), "x"))
    for i, w in enumerate(weights):
        product = c.mul_mat(w, y)
        y = c.silu(product)
        for node in (product, y):
            sched.set_tensor_backend(node, streams[i // 2])
    return Graph().build_forward_expand(c.set_output(y)), x, y

batches = random.standard_normal((N, ROWS, WIDTH)).astype(np.float32)
expected, results = [], [np.zeros((ROWS, WIDTH), np.float32) for _ in range(N)]
with Scheduler([*streams, cpu], parallel=True) as sched:
    for batch in batches:
        graph, x, y = build(sched)
        sched.alloc_graph(graph)
        x.set_array(batch)
        sched.graph_compute(graph)
        expected.append(y.to_numpy())
    assert [s.backend for s in sched.splits] == streams

    kernels = []
    enqueue = cl.enqueue_nd_range_kernel
    def timed(queue, *args, **kwargs):
        event = enqueue(queue, *args, **kwargs)
        kernels.append((queue, event))
        return event
    cl.enqueue_nd_range_kernel = timed
    for batch, result in zip(batches, results):
        graph, x, y = build(sched)
        sched.alloc_graph(graph)
        x.set_array(batch)
        sched.graph_compute_async(graph)
        x.set_array(np.full_like(batch, 99))
        streams[1].get_tensor_async(y, result)
    sched.synchronize()
assert all(np.array_equal(a, b) for a, b in zip(results, expected))

times = [[(e.profile.start, e.profile.end) for q, e in kernels if q == s.queue] for s in streams]
assert all(times), "nothing was timed"
overlap = sum(max(0, min(a[1], b[1]) - max(a[0], b[0])) for a in times[0] for b in times[1])
busy = min(sum(end - start for start, end in mine) for mine in times)
print(f"{overlap / busy:.2f} of the time of one, the other works, too")
assert overlap > 0 or os.cpu_count() == 1, "the devices took turns"
for stream in streams:
    stream.free()
"""


@pytest.mark.parametrize("names", [("OpenCL0", "OpenCL1"), ("OpenCL0", "OpenCL0")])
def test_a_pipeline_overlaps_and_gives_the_bits_of_one_after_another(
    names: tuple[str, str], only_pocl: dict[str, str]
) -> None:
    done = python("-c", PROGRAM, *names, POCL_DEVICES="pthread pthread", **only_pocl)
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    assert "the other works" in done.stdout
