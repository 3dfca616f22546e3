"""fold: values of nodes whose operands are constants, by NumPy, in bounded memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np
import onnx
from onnx import helper
from onnx.numpy_helper import from_array
from onnx.reference import ReferenceEvaluator
from onnx.shape_inference import InferenceError, infer_shapes

from ggmlb.core.errors import UnsupportedOpError
from ggmlb.models.onnx.file import FAULTS, Array, OnnxNode, not_supported

MAX_BYTES: Final = 1 << 28
"""Limit of a folded value, unless it is a part of its operands."""

CONSTANTS: Final = {
    "value": None, "value_float": np.float32, "value_int": np.int64, "value_floats": np.float32,
    "value_ints": np.int64,
}  # fmt: skip
"""Types of the attributes of a Constant; `None`: the attribute's own."""

FOLDED: Final = frozenset((
    "Constant",
    "Abs", "Add", "And", "ArgMax", "ArgMin", "Cast", "CastLike", "Ceil", "Clip", "Concat",
    "ConstantOfShape", "Cos", "CumSum", "Div", "Equal", "Erf", "Exp", "Expand", "Flatten", "Floor",
    "Gather", "GatherElements", "GatherND", "Gemm", "Greater", "GreaterOrEqual", "Identity", "IsInf",
    "IsNaN", "LayerNormalization", "Less", "LessOrEqual", "Log", "MatMul", "Max", "Mean", "Min", "Mod",
    "Mul", "Neg", "NonZero", "Not", "OneHot", "Or", "Pad", "Pow", "Range", "Reciprocal", "ReduceMax",
    "ReduceMean", "ReduceMin", "ReduceProd", "ReduceSum", "Relu", "Reshape", "Round", "ScatterElements",
    "ScatterND", "Shape", "Sigmoid", "Sign", "Sin", "Size", "Slice", "Softmax", "Split", "Sqrt", "Squeeze",
    "Sub", "Sum", "Tanh", "Tile", "TopK", "Transpose", "Trilu", "Unsqueeze", "Where", "Xor",
))  # fmt: skip
"""Ops that are folded; others with constant operands alone are computed as those of inputs are."""


def fold(node: OnnxNode, operands: Sequence[Array | None]) -> tuple[Array, ...]:
    """Return the results of a node of constants.

    Raises:
        UnsupportedOpError: The operands do not fit the op, or a result would be large.
    """
    try:
        return _computed(node, operands)
    except UnsupportedOpError:
        raise
    except (InferenceError, *FAULTS) as error:
        raise not_supported(node.op, f"its constants do not fit: {str(error)[:200]}") from None


def _computed(node: OnnxNode, operands: Sequence[Array | None]) -> tuple[Array, ...]:
    if node.op == "Constant":
        for name, dtype in CONSTANTS.items():
            if name in node.attrs:
                return (np.asarray(node.attrs[name], dtype),)
        raise not_supported("Constant", "no value of numbers")
    if node.op == "GatherElements":  # the reference takes no indices that are shorter along other axes
        x, at = np.asarray(operands[0]), np.asarray(operands[1])
        axis = range(x.ndim)[node.get("axis", 0)]
        part = x[tuple(slice(None if i == axis else m) for i, m in enumerate(at.shape))]
        return (np.take_along_axis(part, np.where(at < 0, at + x.shape[axis], at), axis),)
    names = [f"i{k}" if x is not None else "" for k, x in enumerate(operands)]
    given = {name: x for name, x in zip(names, operands, strict=True) if x is not None}
    if node.op == "Range":  # the reference takes [1] for scalars
        given = {name: x.reshape(()) if x.size == 1 else x for name, x in given.items()}
    attrs = {k: from_array(v) if isinstance(v, np.ndarray) else v for k, v in node.attrs.items()}
    outputs = [f"o{k}" for k in range(len(node.outputs))]
    results = [helper.make_value_info(name, onnx.TypeProto()) for name in outputs]
    infos = [
        helper.make_tensor_value_info(
            name, helper.np_dtype_to_tensor_dtype(x.dtype.newbyteorder("=")), x.shape
        )
        for name, x in given.items()
    ]
    small = [from_array(x, name) for name, x in given.items() if x.size <= 64]  # may determine a shape
    nodes = [helper.make_node(node.op, names, outputs, **attrs)]
    graph = helper.make_graph(nodes, "fold", infos, results, small)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", node.version)])
    most = max(MAX_BYTES, 16 * sum(x.nbytes for x in given.values()))
    for result in infer_shapes(model, strict_mode=True, data_prop=True).graph.output:
        n = math.prod(d.dim_value for d in result.type.tensor_type.shape.dim)
        if n * 8 > most or not result.type.tensor_type.HasField("shape"):
            raise not_supported(node.op, f"a constant of {n} elements")
    with np.errstate(all="ignore"):
        return tuple(np.asarray(x) for x in ReferenceEvaluator(model).run(None, given))
