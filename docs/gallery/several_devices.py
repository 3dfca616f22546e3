"""Several devices.

A product runs on the device of its weight. The first layer's is on OpenCL0, the second's on the CPU; the
scheduler makes two splits, copies the result between them, and says why each node is where it is.
"""

import numpy as np

import ggmlb
from ggmlb import BufferUsage, Context, Graph, Scheduler

rng = np.random.default_rng(0)
gpu, cpu = ggmlb.init_by_name("OpenCL0"), ggmlb.init_by_name("CPU")


def weight(backend, name):
    """Return a matrix in the memory of a device, and the memory."""
    own = Context()
    tensor = own.new_tensor("q8_0", (64, 64), name)
    memory = ggmlb.alloc_ctx_tensors(own, backend)
    memory.usage = BufferUsage.WEIGHTS
    tensor.set_array(rng.standard_normal((64, 64)))
    return tensor, memory


(w1, memory1), (w2, memory2) = weight(gpu, "w1"), weight(cpu, "w2")
ctx = Context()
x = ctx.set_input(ctx.new_tensor("f32", (64, 2), name="x"))
hidden = ctx.set_name(ctx.silu(ctx.mul_mat(w1, x)), "hidden")
y = ctx.set_output(ctx.set_name(ctx.mul_mat(w2, hidden), "y"))
graph = Graph().build_forward_expand(y)

with gpu, cpu, memory1, memory2, Scheduler([gpu, cpu]) as scheduler:
    scheduler.alloc_graph(graph)
    for step in range(3):  # planned once
        x.set_array(np.full((2, 64), step))
        scheduler.graph_compute(graph)
    print(*scheduler.splits, sep="\n")
    for placed in scheduler.placement:
        print(f"{placed.op:8} {placed.device:8} {placed.cause}")
