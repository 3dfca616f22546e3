"""Writing and reading a GGUF file.

`save_gguf` takes arrays and blocks; `open_gguf` maps the file into memory, and `load` places its tensors for
a graph, in the mapped file if the device computes in host memory.
"""

import tempfile
from pathlib import Path

import numpy as np

import ggmlb

with tempfile.TemporaryDirectory() as folder:
    path = Path(folder, "two.gguf")
    w = np.linspace(-1, 1, 32 * 64, dtype=np.float32).reshape(32, 64)
    tensors = {"w": (ggmlb.quantize(w, "q8_0"), "q8_0", (64, 32)), "norm": np.full(64, 2, np.float32)}
    ggmlb.save_gguf(path, {"general.name": "two tensors"}, tensors)

    file = ggmlb.open_gguf(path)
    print(file.metadata["general.name"])
    for name in ("w", "norm"):
        print(name, file[name].dtype.name, file[name].ne, file[name].nbytes, "bytes")

    with ggmlb.init_by_name("CPU") as cpu, file.load(cpu) as loaded:
        ctx = ggmlb.Context()
        x = ctx.new_tensor("f32", (64, 1), name="x")
        y = ctx.mul_mat(loaded["w"], ctx.mul(x, loaded["norm"]))
        result = ggmlb.evaluate(y, {"x": np.ones((1, 64))}, devices=[cpu])
    print("as NumPy:", np.allclose(result, 2 * file.array("w").sum(axis=1), rtol=0.01))
