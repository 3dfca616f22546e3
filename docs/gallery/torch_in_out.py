"""Exchanging tensors with PyTorch.

Tensors of PyTorch on the CPU are shared without a copy, in both directions. PyTorch is not a dependency of
ggmlb: without it, this program prints a note and ends.
"""

import sys

import ggmlb

try:
    import torch
except ImportError:
    sys.exit("this program needs PyTorch: pip install torch")

theirs = torch.arange(6.0).reshape(2, 3)
ctx = ggmlb.Context()
x = ctx.from_array(theirs, copy=False, name="x")  # raises an error if it cannot be shared
print("in:", x.describe())
theirs[0, 0] = 10  # visible on both sides

with ggmlb.init_by_name("CPU") as cpu:
    y = ctx.sqr(x)
    with ggmlb.alloc_ctx_tensors(ctx, cpu):
        cpu.graph_compute(ggmlb.Graph().build_forward_expand(y))
        back = torch.from_dlpack(y)
        print("out:", back.tolist())
        y.set_array([[0, 0, 0], [1, 1, 1]])
        print("shared:", back.tolist())
