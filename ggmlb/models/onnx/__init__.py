"""ONNX models on any mix of devices.

from ggmlb.models.onnx import OnnxModel

with OnnxModel("model.onnx", devices=["LLVM", "CPU"]) as model:
    results = model.run({"x": x})
    print(model.scheduler)

file.py       reads and checks a file: constants, nodes in order, external data mapped
patterns.py   replaces chains of nodes that exporters write for one function
folding.py    computes nodes of constants by NumPy
lowering.py   ggml nodes with ONNX's ranks and broadcasting
convert.py    one function per ONNX op
model.py      OnnxModel: graphs by sizes, weights on devices, runs
"""

try:
    import onnx as _onnx
except ImportError as error:
    raise ImportError("ggmlb.models.onnx needs onnx: pip install 'ggmlb[onnx]'") from error

from ggmlb.models.onnx.convert import CONVERTERS
from ggmlb.models.onnx.model import OnnxModel

__all__ = ["CONVERTERS", "OnnxModel"]

del _onnx
