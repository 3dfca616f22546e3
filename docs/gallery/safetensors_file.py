"""A safetensors file.

The arrays of a file become leafs of a graph; `from_array` with a type quantises them.
"""

import tempfile
from pathlib import Path

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

import ggmlb

with tempfile.TemporaryDirectory() as folder:
    path = Path(folder, "layer.safetensors")
    rng = np.random.default_rng(0)
    save_file({"up": rng.standard_normal((128, 64), np.float32), "bias": np.ones(128, np.float32)}, path)

    ctx = ggmlb.Context()
    with safe_open(path, framework="numpy") as file:
        up = ctx.from_array(file.get_tensor("up"), "q8_0", name="up")
        bias = ctx.from_array(file.get_tensor("bias"), name="bias")

x = ctx.new_tensor("f32", (64, 3), name="x")
y = ctx.gelu(ctx.add(ctx.mul_mat(up, x), bias))
print(up.describe(), "has", up.nbytes, "bytes")
print(bias.describe(), "has", bias.nbytes, "bytes")
print(ggmlb.evaluate(y, {"x": np.zeros((3, 64))}, devices="CPU")[0, :3].round(3))
