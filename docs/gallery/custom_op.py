"""A custom op in Python.

`map_custom1` and similar ops take a function that fills the result's array. Such nodes run on the CPU, also
between nodes of another device: the scheduler copies their inputs and results.
"""

import numpy as np

import ggmlb
from ggmlb import Context, Graph, Scheduler


def top_half(out, a, ith, nth, userdata):
    """Keep the values above the row's median; thread `ith` of `nth` computes every `nth` row."""
    rows, results = a[0, 0], out[0, 0]
    for row in range(ith, len(rows), nth):
        results[row] = np.where(rows[row] > np.median(rows[row]), rows[row], userdata)


ctx = Context()
x = ctx.set_input(ctx.new_tensor("f32", (6, 2), name="x"))
square = ctx.sqr(x)
y = ctx.set_output(ctx.sqrt(ctx.map_custom1(square, top_half, n_tasks=2, userdata=0)))

with (
    ggmlb.init_by_name("OpenCL0") as gpu,
    ggmlb.init_by_name("CPU") as cpu,
    Scheduler([gpu, cpu]) as scheduler,
):
    graph = Graph().build_forward_expand(y)
    for node in (square, y):
        scheduler.set_tensor_backend(node, gpu)
    scheduler.alloc_graph(graph)
    x.set_array([[1, 2, 3, 4, 5, 6], [60, 50, 40, 30, 20, 10]])
    scheduler.graph_compute(graph)
    print(y.to_numpy())
    for placed in scheduler.placement:
        print(f"{placed.op:12} on {placed.device}")
