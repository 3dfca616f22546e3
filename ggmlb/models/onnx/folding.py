"""fold: values of nodes whose operands are constants, by NumPy, in bounded memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import onnx
from onnx import helper
from onnx.reference import ReferenceEvaluator

from ggmlb.models.onnx.file import DTYPES, Array, OnnxNode, not_supported

MAX_BYTES: Final = 1 << 28
"""Limit of a folded value, unless it is a part of its operands."""

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


def constant(node: OnnxNode) -> Array:
    """Return the value of a Constant."""
    for name, kind in (("value", None), ("value_float", np.float32), ("value_int", np.int64),
                       ("value_floats", np.float32), ("value_ints", np.int64)):  # fmt: skip
        if name in node.attrs:
            return np.asarray(node.attrs[name], kind)
    raise not_supported("Constant", "no value of numbers")


def _size(node: OnnxNode, operands: Sequence[Array | None]) -> int:
    """Return a bound of the elements of a result."""
    given = [x for x in operands if x is not None]
    total = sum(x.size for x in given)
    op = node.op

    def product(values: Any) -> int:
        return math.prod(max(int(v), 1) for v in np.asarray(values).reshape(-1)[:64])

    if op == "ConstantOfShape":
        return product(given[0])
    if op == "Expand":
        return product(given[1]) * max(given[0].size, 1)
    if op == "Tile":
        return product(given[1]) * given[0].size
    if op == "Range":
        start, limit, delta = (float(x.reshape(())) for x in given[:3])
        return int(min(max((limit - start) / delta, 0), 1e18)) + 1 if delta else 1 << 62
    if op == "OneHot":
        return product(given[1]) * max(given[0].size, 1)
    if op == "Pad":
        widths = np.asarray(given[1] if len(given) > 1 else node.get("pads", [])).reshape(2, -1)
        sizes = given[0].shape[-widths.shape[1] :]
        return math.prod(max(int(m) + int(p) + int(q), 1) for m, (p, q) in zip(sizes, widths.T, strict=True))
    if op in ("MatMul", "Gemm", "Gather", "GatherND", "GatherElements"):
        return max(given[0].size, 1) * max(given[1].size, 1) if len(given) > 1 else total
    if op in ("Add", "Sub", "Mul", "Div", "Where", "Pow", "Mod", "Max", "Min", "Sum", "Mean", "Equal", "Less",
              "Greater", "And", "Or", "Xor", "LessOrEqual", "GreaterOrEqual"):  # fmt: skip
        return math.prod(np.broadcast_shapes(*(x.shape for x in given)))
    return total * 2 + 64


def fold(node: OnnxNode, operands: Sequence[Array | None]) -> tuple[Array, ...]:
    """Return the results of a node of constants.

    Raises:
        UnsupportedOpError: The operands do not fit the op, or a result would be large.
    """
    if node.op == "Constant":
        return (constant(node),)
    try:
        n = _size(node, operands)
        if n * 8 > max(MAX_BYTES, 16 * sum(x.nbytes for x in operands if x is not None)):
            raise not_supported(node.op, f"a constant of {n} elements")
        return _computed(node, operands)
    except (
        ValueError,
        TypeError,
        IndexError,
        KeyError,
        RuntimeError,
        ArithmeticError,
        AttributeError,
    ) as error:
        if not hasattr(error, "facts"):
            raise not_supported(node.op, f"its constants do not fit: {str(error)[:200]}") from None
        raise


def _computed(node: OnnxNode, operands: Sequence[Array | None]) -> tuple[Array, ...]:
    names = [f"i{k}" if x is not None else "" for k, x in enumerate(operands)]
    attrs = {name: value for name, value in node.attrs.items() if name != "dtype"}
    if "value" in attrs and isinstance(attrs["value"], np.ndarray):
        attrs["value"] = onnx.numpy_helper.from_array(attrs["value"])
    outputs = [f"o{k}" for k in range(len(node.outputs))]
    proto = helper.make_node(node.op, names, outputs, **attrs)
    kinds = {dtype: number for number, dtype in DTYPES.items()}
    infos = [
        helper.make_tensor_value_info(name, kinds[x.dtype.newbyteorder("=")], None)
        for name, x in zip(names, operands, strict=True)
        if x is not None
    ]
    results = [helper.make_value_info(name, onnx.TypeProto()) for name in outputs]
    graph = helper.make_graph([proto], "fold", infos, results)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", node.version)])
    given = {name: x for name, x in zip(names, operands, strict=True) if x is not None}
    with np.errstate(all="ignore"):
        return tuple(np.asarray(x) for x in ReferenceEvaluator(model).run(None, given))
