"""Timeline of a computation.

A trace has a row for each device and thread, and is saved as a file for
[ui.perfetto.dev](https://ui.perfetto.dev). In a notebook it draws itself. Here the nodes and copies of each
device are listed.
"""

import tempfile
from pathlib import Path

import ggmlb
from ggmlb import Context, Graph, Scheduler

with (
    ggmlb.init_by_name("OpenCL0") as gpu,
    ggmlb.init_by_name("CPU") as cpu,
    Scheduler([gpu, cpu]) as scheduler,
):
    ctx = Context()
    x = ctx.set_input(ctx.new_tensor("f32", (256, 256), name="x"))
    product = ctx.set_name(ctx.mul_mat(x, x), "product")
    y = ctx.set_output(ctx.soft_max(product))
    graph = Graph().build_forward_expand(y)
    scheduler.set_tensor_backend(product, gpu)
    scheduler.set_tensor_backend(y, cpu)
    scheduler.alloc_graph(graph)
    x.memset(0)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "run.json")
        with scheduler.trace(path) as trace:
            scheduler.graph_compute(graph)
        print("written:", path.stat().st_size > 0)

rows = {e["pid"]: e["args"]["name"] for e in trace.events if e["name"] == "process_name"}
slices = [e for e in trace.events if e["ph"] == "X"]
for row, name in sorted(rows.items())[1:]:  # without the first row, the host's
    nodes = [e["name"] for e in slices if e["pid"] == row and "f32[256, 256]" in e["name"]]
    print(name.partition(" (")[0], [node.rpartition(": ")[2] for node in nodes])
print("slices with a time:", all(e["dur"] >= 0 for e in slices))
print("devices that cannot tell:", trace.untimed)
