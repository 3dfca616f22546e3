"""PyTorch in and out.

Tensors of PyTorch on the CPU are taken without a copy, and given back without one. PyTorch is no dependency
of ggmlb: where it is missing, the program says so and ends.
"""

import sys

import ggmlb

try:
    import torch
except ImportError:
    sys.exit("this program needs PyTorch: pip install torch")

theirs = torch.arange(6.0).reshape(2, 3)
ctx = ggmlb.Context()
x = ctx.from_array(theirs, copy=False, name="x")  # an error, if it could not be shared
print("in:", x.describe())
theirs[0, 0] = 10  # seen on both sides

with ggmlb.init_by_name("CPU") as cpu:
    y = ctx.sqr(x)
    with ggmlb.alloc_ctx_tensors(ctx, cpu):
        cpu.graph_compute(ggmlb.Graph().build_forward_expand(y))
        back = torch.from_dlpack(y)
        print("out:", back.tolist())
        y.set_array([[0, 0, 0], [1, 1, 1]])
        print("shared:", back.tolist())
