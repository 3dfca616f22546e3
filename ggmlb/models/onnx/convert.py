"""CONVERTERS: one function per ONNX op, from operands to values."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from ggmlb.models.onnx.file import Array, OnnxNode
from ggmlb.models.onnx.lowering import (
    FLOAT,
    INT64,
    Lowering,
    Operand,
    Shaped,
    broadcast,
    extents,
    normal_axis,
)

Results = Shaped | Array | tuple[Operand, ...]
Converter = Callable[..., Results]

CONVERTERS: Final[dict[str, Converter]] = {}
"""The converter of each op: `convert(lowering, node, *operands)`; absent operands are `None`."""


def onnx_op(*names: str) -> Callable[[Converter], Converter]:
    """Register a converter for ops."""

    def register(convert: Converter) -> Converter:
        for name in names:
            CONVERTERS[name] = convert
        return convert

    return register


# -- elements -----------------------------------------------------------------------------------


def _fold(b: Lowering, xs: Sequence[Operand], two: Callable[[Operand, Operand], Shaped]) -> Shaped:
    result: Operand = xs[0]
    for x in xs[1:]:
        result = two(result, x)
    return b.value(result)


def _elu(b: Lowering, x: Operand, alpha: float, inner: float = 1.0) -> Shaped:
    """Return `max(x, 0) + alpha * expm1(min(x, 0) * inner)`."""
    low = b.unary("expm1", b.affine(b.clamp(x, high=0.0), inner))
    return b.add(b.unary("relu", x), b.affine(low, alpha))


def _log_sum(b: Lowering, x: Operand, sign: float) -> Shaped:
    """Return `log(x + sqrt(x^2 + sign))`."""
    return b.unary("log", b.add(x, b.unary("sqrt", b.affine(b.unary("sqr", x), 1.0, sign))))


def _flat(b: Lowering, x: Shaped, axis: int) -> Shaped:
    axis = axis + x.rank if axis < 0 else axis
    return b.reshape(x, (math.prod(x.shape[:axis]), math.prod(x.shape[axis:])))


def _shrunk(b: Lowering, n: OnnxNode, x: Operand) -> Shaped:
    bias, limit = n.get("bias", 0.0), n.get("lambd", 0.5)
    above = b.mul(b.affine(x, 1.0, -bias), b.unary("step", b.affine(x, 1.0, -limit)))
    return b.add(above, b.mul(b.affine(x, 1.0, bias), b.unary("step", b.affine(x, -1.0, -limit))))


def _leaky(b: Lowering, x: Operand, slope: float) -> Shaped:
    v = b.value(x)
    return b.made(b.ctx.leaky_relu(v.tensor, slope), v.shape, v.dtype)


FORMULAS: Final[dict[str, Converter]] = {
    "And": lambda b, n, x, y: b.as_bool(b.mul(x, y)),
    "Or": lambda b, n, x, y: b.as_bool(b.unary("step", b.add(x, y))),
    "Xor": lambda b, n, x, y: b.as_bool(b.unary("abs", b.sub(x, y))),
    "Not": lambda b, n, x: b.as_bool(b.affine(x, -1.0, 1.0)),
    "Where": lambda b, n, c, x, y: replace(b.select(c, x, y), dtype=x.dtype),
    "Sum": lambda b, n, *xs: _fold(b, xs, b.add),
    "Mean": lambda b, n, *xs: b.affine(_fold(b, xs, b.add), 1 / len(xs)),
    "Reciprocal": lambda b, n, x: b.div(b.filled(b.value(x), 1.0), x),
    "Tan": lambda b, n, x: b.div(b.unary("sin", x), b.unary("cos", x)),
    "Sinh": lambda b, n, x: b.affine(b.sub(b.unary("expm1", x), b.unary("expm1", b.unary("neg", x))), 0.5),
    "Cosh": lambda b, n, x: b.affine(b.add(b.unary("exp", x), b.unary("exp", b.unary("neg", x))), 0.5),
    "Asinh": lambda b, n, x: b.mul(b.unary("sgn", x), _log_sum(b, b.unary("abs", x), 1.0)),
    "Acosh": lambda b, n, x: _log_sum(b, x, -1.0),
    "Atanh": lambda b, n, x: b.affine(b.unary("log", b.div(b.affine(x, 1, 1), b.affine(x, -1, 1))), 0.5),
    "Gelu": lambda b, n, x: b.unary("gelu" if n.get("approximate") == "tanh" else "gelu_erf", x),
    "Silu": lambda b, n, x: b.unary("silu", x),
    "Swish": lambda b, n, x: b.mul(x, b.unary("sigmoid", b.affine(x, n.get("alpha", 1.0)))),
    "Mish": lambda b, n, x: b.mul(x, b.unary("tanh", b.unary("softplus", x))),
    "Softsign": lambda b, n, x: b.div(x, b.affine(b.unary("abs", x), 1.0, 1.0)),
    "HardSigmoid": lambda b, n, x: b.clamp(b.affine(x, n.get("alpha", 0.2), n.get("beta", 0.5)), 0.0, 1.0),
    "LeakyRelu": lambda b, n, x: _leaky(b, x, n.get("alpha", 0.01)),
    "PRelu": lambda b, n, x, slope: b.add(b.unary("relu", x), b.mul(b.clamp(x, high=0.0), slope)),
    "ThresholdedRelu": lambda b, n, x: b.mul(x, b.unary("step", b.affine(x, 1.0, -n.get("alpha", 1.0)))),
    "Elu": lambda b, n, x: _elu(b, x, n.get("alpha", 1.0)),
    "Celu": lambda b, n, x: _elu(b, x, n.get("alpha", 1.0), 1.0 / n.get("alpha", 1.0)),
    "Selu": lambda b, n, x: b.affine(_elu(b, x, n.get("alpha", 1.67326324)), n.get("gamma", 1.05070099)),
    "Shrink": _shrunk,
    "Shape": lambda b, n, x: np.array(x.shape[slice(n.get("start", 0), n.get("end"))], np.int64),
    "Size": lambda b, n, x: np.array(math.prod(x.shape), np.int64),
    "Transpose": lambda b, n, x: b.transpose(x, n.get("perm") or range(x.rank)[::-1]),
    "Expand": lambda b, n, x, shape: b.expand(x, broadcast("Expand", x.shape, tuple(b.ints(shape)))),
    "Flatten": lambda b, n, x: _flat(b, x, n.get("axis", 1)),
}
"""Ops that are an expression."""

UNARY: Final = {
    "Abs": "abs", "Ceil": "ceil", "Cos": "cos", "Exp": "exp", "Floor": "floor", "HardSwish": "hardswish",
    "Log": "log", "Neg": "neg", "Relu": "relu", "Sigmoid": "sigmoid", "Sign": "sgn", "Sin": "sin",
    "Softplus": "softplus", "Sqrt": "sqrt", "Tanh": "tanh",
}  # fmt: skip
"""Ops that are one function of `Context`."""


def _unary(fn: str) -> Converter:
    return lambda b, n, x: b.unary(fn, x)


CONVERTERS.update(FORMULAS)
CONVERTERS.update({op: _unary(fn) for op, fn in UNARY.items()})


@onnx_op("Identity", "Dropout")
def identity(
    b: Lowering, n: OnnxNode, x: Operand, ratio: Operand | None = None, *training: Operand
) -> Results:
    """The operand; dropout is for training."""
    if training and bool(b.const(training[0])) and (ratio is None or float(b.const(ratio).reshape(())) > 0):
        raise b.fail("training_mode")
    if len(n.outputs) > 1:
        shape = x.shape
        return x, np.ones(shape, bool)
    return x


@onnx_op("Round")
def round_half_even(b: Lowering, n: OnnxNode, x: Operand) -> Results:
    """To the nearest integer, halves to the even one: ggml rounds halves away from zero."""
    whole = b.unary("round", x)
    is_half = b.affine(b.unary("step", b.affine(b.unary("abs", b.sub(x, whole)), 1.0, -0.49999997)), 1.0)
    even = b.affine(b.unary("round", b.affine(whole, 0.5)), 2.0)  # of an odd one: away from zero
    odd = b.unary("abs", b.sub(whole, even))
    return b.sub(whole, b.mul(b.mul(odd, is_half), b.unary("sgn", whole)))


@onnx_op("Erf")
def erf(b: Lowering, n: OnnxNode, x: Operand) -> Results:
    """By Abramowitz and Stegun 7.1.26, within 5e-7; the pattern of GELU is one op."""
    z = b.unary("abs", x)
    t = b.div(b.filled(z, 1.0), b.affine(z, 0.3275911, 1.0))
    p = b.affine(t, 1.061405429, -1.453152027)
    for c in (1.421413741, -0.284496736, 0.254829592):
        p = b.affine(b.mul(p, t), 1.0, c)
    tail = b.mul(b.mul(p, t), b.unary("exp", b.unary("neg", b.unary("sqr", z))))
    return b.mul(b.unary("sgn", x), b.affine(tail, -1.0, 1.0))


@onnx_op("Clip")
def clip(
    b: Lowering, n: OnnxNode, x: Operand, low: Operand | None = None, high: Operand | None = None
) -> Results:
    """`x` limited to a range."""
    if low is None and high is None and n.version < 11:
        return b.clamp(x, n.get("min", -math.inf), n.get("max", math.inf))
    least = -math.inf if low is None else float(b.const(low).reshape(()))
    most = math.inf if high is None else float(b.const(high).reshape(()))
    if least > most:
        return b.filled(b.value(x), most)
    return b.clamp(x, least, most)


@onnx_op("Cast", "CastLike")
def cast(b: Lowering, n: OnnxNode, x: Shaped, like: Operand | None = None) -> Results:
    """To float32, float16 (computed as float32), integers or booleans."""
    to = like.dtype if like is not None else n.attrs["dtype"]
    if to is None or to.name not in ("float32", "float16", "int64", "int32", "bool"):
        raise b.fail(f"a cast to {to}")
    v = b.value(x)
    if to.name == "bool" and v.dtype.name != "bool":
        return replace(b.unary("step", b.unary("abs", v)), dtype=to)
    if to.kind == "i" and v.dtype.kind == "f":
        v = b.unary("trunc", v)
    if to.name == "float16" and v.dtype.name != "float16":
        half = b.ctx.cast(b.ctx.cast(v.tensor, "f16"), "f32")
        return b.made(half, v.shape, to)
    return replace(v, dtype=to, permuted=None)


# -- elements: arithmetic and logic -------------------------------------------------------------


def _dtype(x: Operand, y: Operand) -> np.dtype[Any]:
    return x.dtype if isinstance(x, Shaped) else y.dtype


@onnx_op("Add", "Sub", "Mul", "Div")
def arithmetic(b: Lowering, n: OnnxNode, x: Operand, y: Operand) -> Results:
    """Broadcast arithmetic; quotients of integers are truncated."""
    if n.version < 7 and n.get("broadcast"):
        raise b.fail("broadcasting as before operator set 7")
    found = b.binary(n.op.lower(), x, y)
    dtype = _dtype(x, y)
    return replace(b.unary("trunc", found) if n.op == "Div" and dtype.kind == "i" else found, dtype=dtype)


@onnx_op("Mod")
def mod(b: Lowering, n: OnnxNode, x: Operand, y: Operand) -> Results:
    """`x - y * floor(x / y)`, or with the quotient truncated (fmod)."""
    if not n.get("fmod") and _dtype(x, y).kind == "f":
        raise b.fail("floats with fmod=0")
    quotient = b.unary("trunc" if n.get("fmod") else "floor", b.div(x, y))
    return replace(b.sub(x, b.mul(quotient, y)), dtype=_dtype(x, y))


@onnx_op("Pow")
def power(b: Lowering, n: OnnxNode, x: Operand, y: Operand) -> Results:
    """Constant exponents: small integers, and their halves."""
    p = b.scalar(y)
    if p is None:
        raise b.fail("an exponent that is not one constant")
    if len(y.shape) > len(x.shape):
        raise b.fail("an exponent of more axes than the base")
    if p == 2.0:
        return replace(b.unary("sqr", x), dtype=x.dtype)
    if p * 2 != int(p * 2) or not 0 < abs(p) <= 8:
        raise b.fail(f"the exponent {p}")
    whole, result = int(abs(p)), None
    for _ in range(whole):
        result = b.value(x) if result is None else b.mul(result, x)
    if abs(p) != whole:
        root = b.unary("sqrt", x)
        result = root if result is None else b.mul(result, root)
    assert result is not None
    return result if p > 0 else b.div(b.filled(result, 1.0), result)


@onnx_op("Max", "Min")
def extreme(b: Lowering, n: OnnxNode, *xs: Operand) -> Results:
    """Largest or smallest of tensors."""
    sign = 1.0 if n.op == "Max" else -1.0

    def two(x: Operand, y: Operand) -> Shaped:
        for one, other in ((x, y), (y, x)):
            limit = b.scalar(other)
            if limit is not None and isinstance(other, np.ndarray) and other.ndim <= len(one.shape):
                return b.clamp(one, low=limit) if sign > 0 else b.clamp(one, high=limit)
        return b.select(b.unary("step", b.affine(b.sub(x, y), sign)), x, y)

    dtype = next(x.dtype for x in xs if isinstance(x, Shaped))
    return replace(_fold(b, xs, two), dtype=dtype)


@onnx_op("Greater", "Less", "GreaterOrEqual", "LessOrEqual", "Equal")
def compare(b: Lowering, n: OnnxNode, x: Operand, y: Operand) -> Results:
    """0 or 1."""
    if n.op == "Equal":
        return b.as_bool(b.affine(b.unary("step", b.unary("abs", b.sub(x, y))), -1.0, 1.0))
    above = n.op in ("Greater", "LessOrEqual")
    is_more = b.unary("step", b.sub(x, y) if above else b.sub(y, x))
    return b.as_bool(b.affine(is_more, -1.0, 1.0) if n.op.endswith("Equal") else is_more)


@onnx_op("IsNaN")
def is_nan(b: Lowering, n: OnnxNode, x: Operand) -> Results:
    """A number is at least 0 or at most 0; NaN is neither."""
    some = b.add(b.unary("step", x), b.unary("step", b.unary("neg", x)))
    zero = b.unary("step", b.affine(b.unary("abs", x), -1.0, float(np.finfo(np.float32).tiny)))
    return b.as_bool(b.affine(b.unary("step", b.add(some, zero)), -1.0, 1.0))


# -- shapes -------------------------------------------------------------------------------------


@onnx_op("Reshape")
def reshape(b: Lowering, n: OnnxNode, x: Operand, shape: Operand | None = None) -> Results:
    """0 keeps an extent, -1 is what is left."""
    told = b.ints(shape) if shape is not None else [int(i) for i in n.get("shape", [])]
    if not n.get("allowzero"):
        told = [x.shape[i] if m == 0 and i < len(x.shape) else m for i, m in enumerate(told)]
    if told.count(-1) == 1:
        known = -math.prod(told)
        if known <= 0 or math.prod(x.shape) % known:
            raise b.fail(f"shape {told} of {x.shape}")
        told[told.index(-1)] = math.prod(x.shape) // known
    return b.reshape(x, told)


def _axes(b: Lowering, n: OnnxNode, told: Operand | None, rank: int) -> list[int] | None:
    axes = b.ints(told) if told is not None else n.get("axes")
    return None if axes is None else [normal_axis(n.op, int(i), rank) for i in axes]


@onnx_op("Squeeze")
def squeeze(b: Lowering, n: OnnxNode, x: Shaped, axes: Operand | None = None) -> Results:
    """Without axes of one element."""
    gone = _axes(b, n, axes, x.rank)
    gone = [i for i, m in enumerate(x.shape) if m == 1] if gone is None else gone
    return b.reshape(x, [m for i, m in enumerate(x.shape) if i not in gone])


@onnx_op("Unsqueeze")
def unsqueeze(b: Lowering, n: OnnxNode, x: Shaped, axes: Operand | None = None) -> Results:
    """With axes of one element."""
    told = b.ints(axes) if axes is not None else list(n.get("axes", []))
    rank = x.rank + len(told)
    new = {normal_axis(n.op, int(i), rank) for i in told}
    rest = iter(x.shape)
    return b.reshape(x, [1 if i in new else next(rest) for i in range(rank)])


@onnx_op("Tile")
def tile(b: Lowering, n: OnnxNode, x: Shaped, repeats: Operand) -> Results:
    """Repeated along each axis."""
    for axis, times in enumerate(b.ints(repeats)):
        if times != 1:
            v, outer, m, inner = b.parted(x, axis)
            shape = (*x.shape[:axis], m * times, *x.shape[axis + 1 :])
            if math.prod(shape) >= 1 << 31:
                raise b.fail(f"a result of shape {shape}")
            t = b.ctx.repeat_4d(v.tensor, inner, m * times, outer, 1)
            x = b.made(b.ctx.reshape_4d(t, *extents(shape)), shape, x.dtype)
    return x


@onnx_op("Concat")
def concat(b: Lowering, n: OnnxNode, *xs: Operand) -> Results:
    """Joined along an axis."""
    found = b.concat(xs, normal_axis("Concat", n.get("axis", 1), len(xs[0].shape)))
    return replace(found, dtype=next(x.dtype for x in xs if isinstance(x, Shaped)))


@onnx_op("Split")
def split(b: Lowering, n: OnnxNode, x: Shaped, sizes: Operand | None = None) -> Results:
    """Parts along an axis."""
    axis = normal_axis("Split", n.get("axis", 0), x.rank)
    told = b.ints(sizes) if sizes is not None else n.get("split")
    if told is None:
        count = n.get("num_outputs", len(n.outputs))
        each = -(-x.shape[axis] // count)
        told = [min(each, x.shape[axis] - i * each) for i in range(count)]
    if sum(told) != x.shape[axis] or min(told) < 0:
        raise b.fail(f"parts {told} of {x.shape[axis]}")
    ends = np.cumsum(told).tolist()
    return tuple(b.slice(x, axis, end - m, end) for end, m in zip(ends, told, strict=True))


@onnx_op("Slice")
def slice_(
    b: Lowering,
    n: OnnxNode,
    x: Shaped,
    starts: Operand | None = None,
    ends: Operand | None = None,
    axes: Operand | None = None,
    steps: Operand | None = None,
) -> Results:
    """Ranges along axes; with a step, elements by index."""
    first = b.ints(starts) if starts is not None else list(n.get("starts", []))
    last = b.ints(ends) if ends is not None else list(n.get("ends", []))
    along = _axes(b, n, axes, x.rank) or list(range(len(first)))
    by = b.ints(steps) if steps is not None else [1] * len(first)
    if not len(first) == len(last) == len(along) == len(by) or 0 in by:
        raise b.fail(f"starts {first}, ends {last}, axes {along}, steps {by}")
    for axis, start, stop, step in zip(along, first, last, by, strict=True):
        start, stop, step = slice(start, stop if step > 0 or stop >= -x.shape[axis] else None, step).indices(
            x.shape[axis]
        )
        if step == 1:
            x = b.slice(x, axis, start, max(stop, start))
        else:
            x = replace(b.take(x, np.arange(start, stop, step), axis), dtype=x.dtype)
    return x


@onnx_op("Gather")
def gather(b: Lowering, n: OnnxNode, x: Operand, indices: Operand) -> Results:
    """Elements at indices along an axis."""
    axis = normal_axis("Gather", n.get("axis", 0), len(x.shape))
    if isinstance(indices, np.ndarray) and indices.ndim == 0:
        at = int(indices) + (x.shape[axis] if indices < 0 else 0)
        if not 0 <= at < x.shape[axis]:
            raise b.fail(f"index {int(indices)} of {x.shape[axis]}")
        part = b.slice(x, axis, at, at + 1)
        return b.reshape(part, (*x.shape[:axis], *x.shape[axis + 1 :]))
    return b.take(x, indices, axis)


@onnx_op("GatherElements")
def gather_elements(b: Lowering, n: OnnxNode, x: Operand, indices: Operand) -> Results:
    """One element for each index."""
    rank, shape = len(x.shape), tuple(indices.shape)
    axis = normal_axis("GatherElements", n.get("axis", 0), rank)
    strides = [math.prod(x.shape[i + 1 :]) for i in range(rank)]
    grid = np.indices(shape, np.float32)
    base = sum((grid[i] * strides[i] for i in range(rank) if i != axis), np.zeros(shape, np.float32))
    at = b.value(indices)
    at = b.add(at, b.affine(b.unary("step", b.unary("neg", at)), float(x.shape[axis])))
    flat = b.add(b.affine(at, float(strides[axis])), base.astype(np.float32))
    found = b.take(b.reshape(x, (math.prod(x.shape),)), b.reshape(flat, (math.prod(shape),)), 0)
    return replace(b.reshape(found, shape), dtype=x.dtype)


@onnx_op("Pad")
def pad(
    b: Lowering,
    n: OnnxNode,
    x: Shaped,
    pads: Operand | None = None,
    fill: Operand | None = None,
    axes: Operand | None = None,
) -> Results:
    """With a constant, or with elements of `x`; negative widths cut off."""
    told = b.ints(pads) if pads is not None else list(n.get("pads", n.get("paddings", [])))
    number = float(b.const(fill).reshape(())) if fill is not None else n.get("value", 0.0)
    along = _axes(b, n, axes, x.rank) if axes is not None else list(range(x.rank))
    assert along is not None
    if len(told) != 2 * len(along):
        raise b.fail(f"{len(told)} widths for {len(along)} axes")
    mode, half = n.get("mode", "constant"), len(along)
    dtype = x.dtype
    for axis, before, after in zip(along, told[:half], told[half:], strict=True):
        x = _padded(b, x, axis, (before, after), mode, number)
    return replace(x, dtype=dtype)


def _padded(b: Lowering, x: Shaped, axis: int, width: tuple[int, int], mode: str, fill: float) -> Shaped:
    before, after = width
    m = x.shape[axis]
    if before < 0 or after < 0:
        start, stop = max(-before, 0), m - max(-after, 0)
        x = b.slice(x, axis, start, max(stop, start))
        m, before, after = x.shape[axis], max(before, 0), max(after, 0)
    if before == after == 0:
        return x
    if m + before + after > 1 << 31:
        raise b.fail(f"widths {before} and {after}")
    if mode != "constant":
        modes = {"reflect": "reflect", "edge": "edge", "wrap": "wrap"}
        if mode not in modes or not m:
            raise b.fail(f"mode {mode!r}")
        kinds: Any = modes[mode]
        return b.take(x, np.pad(np.arange(m), (before, after), mode=kinds), axis)
    v, outer, _, inner = b.parted(x, axis)
    shape = (*x.shape[:axis], m + before + after, *x.shape[axis + 1 :])
    t = b.ctx.pad_ext(v.tensor, 0, 0, before, after)
    if fill:
        edge = np.zeros((m + before + after, 1), np.float32)
        edge[:before], edge[before + m :] = fill, fill
        return b.reshape(b.add(b.made(t, (outer, shape[axis], inner)), edge), shape)
    return b.made(b.ctx.reshape_4d(t, *extents(shape)), shape, x.dtype)


@onnx_op("DepthToSpace")
def depth_to_space(b: Lowering, n: OnnxNode, x: Shaped) -> Results:
    """Channels to blocks of pixels."""
    (count, c, h, w), k = x.shape, n.get("blocksize", 1)
    if n.get("mode", "DCR") == "CRD":
        parts, order = (count, c // k**2, k, k, h, w), (0, 1, 4, 2, 5, 3)
    else:
        parts, order = (count, k, k, c // k**2, h, w), (0, 3, 4, 1, 5, 2)
    return b.reshape(b.transpose(b.reshape(x, parts), order), (count, c // k**2, h * k, w * k))


@onnx_op("SpaceToDepth")
def space_to_depth(b: Lowering, n: OnnxNode, x: Shaped) -> Results:
    """Blocks of pixels to channels."""
    (count, c, h, w), k = x.shape, n.get("blocksize", 1)
    order = (0, 1, 3, 5, 2, 4) if n.get("mode", "DCR") == "CRD" else (0, 3, 5, 1, 2, 4)
    moved = b.transpose(b.reshape(x, (count, c, h // k, k, w // k, k)), order)
    return b.reshape(moved, (count, c * k * k, h // k, w // k))


@onnx_op("Trilu")
def trilu(b: Lowering, n: OnnxNode, x: Shaped, k: Operand | None = None) -> Results:
    """A triangle of each matrix, 0 elsewhere."""
    diagonal = 0 if k is None else b.ints(k)[0]
    rows, columns = x.shape[-2:]
    mask = np.tri(rows, columns, diagonal if not n.get("upper", 1) else diagonal - 1, dtype=np.float32)
    return replace(b.mul(x, 1 - mask if n.get("upper", 1) else mask), dtype=x.dtype)


@onnx_op("OneHot")
def one_hot(b: Lowering, n: OnnxNode, indices: Operand, depth: Operand, values: Operand) -> Results:
    """1 at an index, 0 elsewhere."""
    count, (off, on) = b.ints(depth)[0], b.const(values).reshape(2)
    if not 0 < count < 1 << 24:
        raise b.fail(f"depth {count}")
    axis = normal_axis("OneHot", n.get("axis", -1), len(indices.shape) + 1)
    shape = (*indices.shape[:axis], 1, *indices.shape[axis:])
    at = b.value(b.reshape(indices, shape))
    at = b.add(at, b.affine(b.unary("step", b.unary("neg", at)), float(count)))
    places = np.arange(count, dtype=np.float32).reshape(-1, *(1,) * (len(shape) - axis - 1))
    other = b.unary("step", b.unary("abs", b.sub(at, places)))
    return replace(b.affine(other, float(off) - float(on), float(on)), dtype=np.asarray(values).dtype)


# -- rows ---------------------------------------------------------------------------------------

REDUCTIONS = (
    "ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax", "ReduceMean", "ReduceMin",
    "ReduceSum", "ReduceSumSquare",
)  # fmt: skip


def _max_rows(b: Lowering, rows: Shaped) -> Shaped:
    m, k = rows.shape
    at = b.ctx.reshape_2d(b.ctx.argmax(rows.tensor), 1, m)  # POOL_1D makes -inf the least float
    found = b.ctx.get_rows(b.ctx.reshape_3d(rows.tensor, 1, k, m), at)
    return b.made(b.ctx.reshape_2d(found, 1, m), (m, 1), rows.dtype)


@onnx_op(*REDUCTIONS)
def reduce(b: Lowering, n: OnnxNode, x: Shaped, axes: Operand | None = None) -> Results:
    """Along axes, moved behind the others."""
    told = _axes(b, n, axes, x.rank)
    if not told:
        if n.get("noop_with_empty_axes"):
            return x
        told = list(range(x.rank))
    shape = [1 if i in told else m for i, m in enumerate(x.shape) if i not in told or n.get("keepdims", 1)]
    if 0 in x.shape:
        raise b.fail("a reduction of no elements")
    rows, _ = b.last(x, sorted(told))
    kind = n.op.removeprefix("Reduce")
    if kind in ("L1", "L2", "SumSquare"):
        rows = b.unary("abs" if kind == "L1" else "sqr", rows)
    if kind in ("Max", "Min"):
        y = _max_rows(b, rows if kind == "Max" else b.unary("neg", rows))
        y = y if kind == "Max" else b.unary("neg", y)
    elif kind == "Mean":
        y = b.unary("mean", rows)
    elif kind == "LogSumExp":
        most = _max_rows(b, rows)
        total = b.unary("sum_rows", b.unary("exp", b.sub(rows, most)))
        y = b.add(b.unary("log", replace(total, shape=most.shape)), most)
    else:
        y = b.unary("sum_rows", rows)
    y = replace(y, shape=(rows.shape[0], 1))
    if kind in ("L2", "LogSum"):
        y = b.unary("sqrt" if kind == "L2" else "log", y)
    return replace(b.reshape(y, shape), dtype=x.dtype)


@onnx_op("ArgMax", "ArgMin")
def arg_extreme(b: Lowering, n: OnnxNode, x: Shaped) -> Results:
    """Index of the first largest or smallest element along an axis."""
    axis = normal_axis(n.op, n.get("axis", 0), x.rank)
    if n.get("select_last_index"):
        raise b.fail("select_last_index")
    rows, _ = b.last(x if n.op == "ArgMax" else b.unary("neg", x), [axis])
    shape = [1 if i == axis else m for i, m in enumerate(x.shape) if i != axis or n.get("keepdims", 1)]
    return b.reshape(b.made(b.ctx.argmax(rows.tensor), (rows.shape[0],), INT64), shape)


@onnx_op("TopK")
def top_k(b: Lowering, n: OnnxNode, x: Shaped, k: Operand | None = None) -> Results:
    """Largest or smallest elements along an axis, and their indices."""
    axis = normal_axis("TopK", n.get("axis", -1), x.rank)
    count = b.ints(k)[0] if k is not None else n.get("k", 1)
    if not 0 <= count <= x.shape[axis]:
        raise b.fail(f"{count} of {x.shape[axis]} elements")
    rows, order = b.last(x, [axis])
    m, width = rows.shape
    key = b.unary("neg", rows) if n.get("largest", 1) else rows  # of equal elements, the first comes first
    by = b.ctx.argsort(key.tensor, "asc")
    ids = b.ctx.cont(b.ctx.view_2d(by, count, m, by.nb[1]))
    found = b.ctx.get_rows(b.ctx.reshape_4d(rows.tensor, 1, width, m, 1), b.ctx.reshape_2d(ids, count, m))
    shape = [*(x.shape[i] for i in order[:-1]), count]
    back = [order.index(i) for i in range(x.rank)]
    values = b.made(b.ctx.reshape_4d(found, *extents(shape)), shape, x.dtype)
    places = b.made(b.ctx.reshape_4d(b.ctx.cast(ids, "f32"), *extents(shape)), shape, INT64)
    return b.transpose(values, back), b.transpose(places, back)


@onnx_op("CumSum")
def cumsum(b: Lowering, n: OnnxNode, x: Shaped, axis: Operand) -> Results:
    """Running sum along an axis."""
    along = normal_axis("CumSum", b.ints(axis)[0], x.rank)
    if n.get("reverse"):
        x = replace(b.take(x, np.arange(x.shape[along])[::-1], along), dtype=x.dtype)
    order = [i for i in range(x.rank) if i != along] + [along]
    moved = b.transpose(b.value(x), order)
    total = b.unary("cumsum", moved)
    if n.get("exclusive"):
        total = b.sub(total, moved)
    result = b.transpose(total, [order.index(i) for i in range(x.rank)])
    if n.get("reverse"):
        result = b.take(result, np.arange(x.shape[along])[::-1], along)
    return replace(result, dtype=x.dtype)


def _along(b: Lowering, n: OnnxNode, x: Shaped, fn: Callable[[Shaped], Shaped]) -> Shaped:
    """Apply a function of rows along an axis; before operator set 13, the axes from it on are a row."""
    axis = normal_axis(n.op, n.get("axis", -1 if n.version >= 13 else 1), x.rank)
    axes = [axis] if n.version >= 13 else list(range(axis, x.rank))
    rows, order = b.last(x, axes)
    y = fn(rows)
    moved = b.reshape(y, [x.shape[i] for i in order])
    back = [order.index(i) for i in range(x.rank)]
    return replace(b.transpose(moved, back), dtype=x.dtype)


@onnx_op("Softmax")
def softmax(b: Lowering, n: OnnxNode, x: Shaped) -> Results:
    """Along an axis."""
    axis = n.get("axis", -1 if n.version >= 13 else 1) % max(x.rank, 1)
    if axis == x.rank - 1:
        return b.unary("soft_max", x)
    return _along(b, n, x, lambda rows: b.unary("soft_max", rows))


@onnx_op("MaskedSoftmax")
def masked_softmax(b: Lowering, n: OnnxNode, x: Operand, mask: Operand | None = None) -> Results:
    """Of the pattern `softmax(x * scale + mask)`, over the last axis."""
    v = b.value(x)
    scale = n.get("scale", 1.0)
    if mask is None:
        return b.made(b.ctx.soft_max_ext(v.tensor, None, scale), v.shape, v.dtype)
    m = b.value(mask)
    lead = (1,) * (v.rank - m.rank) + m.shape
    if v.rank > 4 or m.rank > v.rank or broadcast("Softmax", v.shape, m.shape) != v.shape:
        total = b.add(b.affine(v, scale), m)
        return b.unary("soft_max", total)
    m = b.expand(m, (*lead[:-2], *v.shape[-2:]))
    return b.made(b.ctx.soft_max_ext(v.tensor, m.tensor, scale), v.shape, v.dtype)


@onnx_op("LogSoftmax")
def log_softmax(b: Lowering, n: OnnxNode, x: Shaped) -> Results:
    """Along an axis, without small numbers."""

    def rows_of(rows: Shaped) -> Shaped:
        low = b.sub(rows, _max_rows(b, rows))
        total = replace(b.unary("sum_rows", b.unary("exp", low)), shape=(rows.shape[0], 1))
        return b.sub(low, b.unary("log", total))

    return _along(b, n, x, rows_of)


# -- norms --------------------------------------------------------------------------------------


def _normed(b: Lowering, fn: str, x: Shaped, rows: tuple[int, int], eps: float) -> Shaped:
    v = b.reshape(b.value(x), rows)
    return b.reshape(b.made(getattr(b.ctx, fn)(v.tensor, eps), rows, x.dtype), x.shape)


@onnx_op("LayerNormalization", "RMSNormalization")
def layer_norm(
    b: Lowering, n: OnnxNode, x: Shaped, w: Operand | None = None, bias: Operand | None = None
) -> Results:
    """Over the axes from `axis` on."""
    if len([name for name in n.outputs if name]) > 1:
        raise b.fail("the results Mean and InvStdDev")
    axis = normal_axis(n.op, n.get("axis", -1), x.rank)
    rows = math.prod(x.shape[:axis]), math.prod(x.shape[axis:])
    y = _normed(b, "norm" if n.op == "LayerNormalization" else "rms_norm", x, rows, n.get("epsilon", 1e-5))
    y = y if w is None else b.mul(y, w)
    return y if bias is None else b.add(y, bias)


def _channels(x: Operand, rank: int) -> Operand | None:
    """A vector for the channels, axis 1 of `rank`, as an operand that broadcasts."""
    return np.reshape(x, (-1, *(1,) * (rank - 2))) if isinstance(x, np.ndarray) else None


def _per_channel(b: Lowering, x: Operand, rank: int) -> Operand:
    shaped = _channels(x, rank)
    return b.reshape(x, (x.shape[0], *(1,) * (rank - 2))) if shaped is None else shaped


@onnx_op("InstanceNormalization", "GroupNormalization")
def group_norm(b: Lowering, n: OnnxNode, x: Shaped, w: Operand, bias: Operand) -> Results:
    """Over groups of channels; an instance's are one channel each."""
    groups = x.shape[1] if n.op == "InstanceNormalization" else n.get("num_groups", 1)
    if x.shape[1] % groups:
        raise b.fail(f"{groups} groups of {x.shape[1]} channels")
    if n.op == "GroupNormalization" and n.version < 21:
        each = x.shape[1] // groups
        w, bias = (np.repeat(b.const(v), each) for v in (w, bias))
    rows = x.shape[0] * groups, math.prod(x.shape[1:]) // groups
    y = _normed(b, "norm", x, rows, n.get("epsilon", 1e-5))
    return b.add(b.mul(y, _per_channel(b, w, x.rank)), _per_channel(b, bias, x.rank))


@onnx_op("BatchNormalization")
def batch_norm(
    b: Lowering, n: OnnxNode, x: Shaped, w: Operand, bias: Operand, mean: Operand, var: Operand
) -> Results:
    """A scale and a bias for each channel, of constants folded."""
    if n.get("training_mode") or len([name for name in n.outputs if name]) > 1:
        raise b.fail("training_mode")
    eps, rank = n.get("epsilon", 1e-5), x.rank
    if all(isinstance(v, np.ndarray) for v in (w, bias, mean, var)):
        scale = (b.const(w) / np.sqrt(b.const(var) + eps)).astype(np.float32)
        shift = (b.const(bias) - b.const(mean) * scale).astype(np.float32)
        return b.add(b.mul(x, _per_channel(b, scale, rank)), _per_channel(b, shift, rank))
    deviation = b.unary("sqrt", b.affine(_per_channel(b, var, rank), 1.0, eps))
    y = b.div(b.sub(x, _per_channel(b, mean, rank)), deviation)
    return b.add(b.mul(y, _per_channel(b, w, rank)), _per_channel(b, bias, rank))


@onnx_op("LpNormalization")
def lp_norm(b: Lowering, n: OnnxNode, x: Shaped) -> Results:
    """Divided by the norm along an axis; 0 stays 0."""
    length = reduce(b, replace(n, op=f"ReduceL{n.get('p', 2)}", attrs={"axes": [n.get("axis", -1)]}), x)
    return b.div(x, b.clamp(length, low=float(np.finfo(np.float32).tiny)))  # type: ignore[arg-type]


@onnx_op("MeanVarianceNormalization")
def mean_variance_norm(b: Lowering, n: OnnxNode, x: Shaped) -> Results:
    """Over axes, by default all but the channels."""
    rows, order = b.last(x, [normal_axis(n.op, i, x.rank) for i in n.get("axes", [0, 2, 3])])
    y = b.made(b.ctx.norm(rows.tensor, 1e-9), [x.shape[i] for i in order])
    y = b.reshape(y, [x.shape[i] for i in order])
    return b.transpose(y, [order.index(i) for i in range(x.rank)])


# -- products -----------------------------------------------------------------------------------


@onnx_op("MatMul")
def matmul(b: Lowering, n: OnnxNode, x: Operand, y: Operand) -> Results:
    """NumPy's matmul; constant matrices are transposed once."""
    dtype = x.dtype if isinstance(x, Shaped) else y.dtype
    left, right = len(x.shape), len(y.shape)
    if not left or not right:
        raise b.fail("a product with a scalar")
    p = b.reshape(x, (1, *x.shape)) if left == 1 else x
    q = b.reshape(y, (*y.shape, 1)) if right == 1 else y
    out = b.matmul(p, b.swapped(q))
    shape = list(out.shape)
    if right == 1:
        del shape[-1]
    if left == 1:
        del shape[-1 if right == 1 else -2]
    return replace(b.reshape(out, shape), dtype=dtype)


@onnx_op("Gemm")
def gemm(b: Lowering, n: OnnxNode, x: Operand, y: Operand, c: Operand | None = None) -> Results:
    """`alpha * x @ y + beta * c`."""
    if len(x.shape) != 2 or len(y.shape) != 2:
        raise b.fail("operands that are not matrices")
    p: Operand = b.swapped(x) if n.get("transA") else x
    if n.get("transB"):
        rows = y if isinstance(y, Shaped) else Shaped(b.weight(y, "matrix"), y.shape, y.dtype)
    else:
        rows = b.swapped(y)
    out = b.matmul(p, b.value(rows) if rows.tensor.dtype.name in ("I32",) else rows)
    alpha, beta = n.get("alpha", 1.0), n.get("beta", 1.0)
    out = out if alpha == 1.0 else b.affine(out, alpha)
    if c is not None and beta:
        out = b.add(out, c if beta == 1.0 else b.affine(c, beta))
    return out


# -- convolutions and pools ---------------------------------------------------------------------


def _spatial(b: Lowering, n: OnnxNode, x: Operand, kernel: Sequence[int]) -> tuple[list[int], ...]:
    """Strides, dilations, and padding before and after each spatial axis."""
    rank = len(kernel)
    strides = [int(i) for i in n.get("strides") or [1] * rank]
    dilations = [int(i) for i in n.get("dilations") or [1] * rank]
    pads = [int(i) for i in n.get("pads") or [0] * 2 * rank]
    if len(strides) != rank or len(dilations) != rank or len(pads) != 2 * rank:
        raise b.fail("attributes for another number of axes")
    if min(strides + dilations) < 1 or max(strides + dilations + pads, default=0) >= 1 << 24 or min(pads) < 0:
        raise b.fail(f"strides {strides}, dilations {dilations}, pads {pads}")
    before, after = pads[:rank], pads[rank:]
    how = n.get("auto_pad", "NOTSET")
    if how in ("SAME_UPPER", "SAME_LOWER"):
        for i, (m, k, s, d) in enumerate(zip(x.shape[2:], kernel, strides, dilations, strict=True)):
            total = max((-(-m // s) - 1) * s + (k - 1) * d + 1 - m, 0)
            half = total // 2 if how == "SAME_UPPER" else total - total // 2
            before[i], after[i] = half, total - half
    elif how == "VALID":
        before, after = [0] * rank, [0] * rank
    return strides, dilations, before, after


def _planes(b: Lowering, x: Operand) -> Operand:
    """One spatial axis as two."""
    if len(x.shape) == 4:
        return x
    if len(x.shape) != 3:
        raise b.fail(f"{len(x.shape) - 2} spatial axes; 1 or 2 are supported")
    shape = (x.shape[0], x.shape[1], 1, x.shape[2])
    return np.reshape(x, shape) if isinstance(x, np.ndarray) else b.reshape(x, shape)


@onnx_op("Conv")
def conv(b: Lowering, n: OnnxNode, x: Shaped, w: Operand, bias: Operand | None = None) -> Results:
    """Convolution over one or two axes, as patches times the kernel, or one kernel for each channel."""
    strides, dilations, before, after = _spatial(b, n, x, w.shape[2:])
    one = [1] * (4 - x.rank)
    v, kernel = b.value(_planes(b, x)), _planes(b, w)
    strides, dilations = one + strides, one + dilations
    before, after = [0] * len(one) + before, [0] * len(one) + after
    if before != after:
        for axis, width in enumerate(zip(before, after, strict=True)):
            v = _padded(b, v, axis + 2, width, "constant", 0.0)
        before = [0, 0]
    group, (count, c, _, _), (oc, ic, kh, kw) = n.get("group", 1), v.shape, kernel.shape
    if group < 1 or c != ic * group or oc % group:
        raise b.fail(f"{c} channels, {group} groups and a kernel of {kernel.shape}")
    place = (strides[1], strides[0], before[1], before[0], dilations[1], dilations[0])
    out = [
        (v.shape[2 + i] + 2 * before[i] - dilations[i] * (k - 1) - 1) // strides[i] + 1
        for i, k in enumerate((kh, kw))
    ]
    if min(out) < 1:
        raise b.fail(f"a kernel of {kernel.shape} for {x.shape}")
    if group == c and ic == 1 and oc == c:
        t = b.ctx.conv_2d_dw_direct(b.value(kernel).tensor, v.tensor, *place)
        y = b.made(t, (count, oc, *out))
    else:
        each = oc // group
        parts = []
        for g in range(group):
            data = b.slice(v, 1, g * ic, (g + 1) * ic)
            rows = kernel[g * each : (g + 1) * each] if isinstance(kernel, np.ndarray) else b.slice(
                kernel, 0, g * each, (g + 1) * each
            )  # fmt: skip
            parts.append(_conv(b, data, rows, place, out))
        y = parts[0] if group == 1 else b.concat(parts, 1)
    if bias is not None:
        y = b.add(y, _per_channel(b, bias, 4))
    return replace(b.reshape(y, (count, oc, *(out if x.rank == 4 else out[1:]))), dtype=x.dtype)


def _conv(
    b: Lowering, x: Shaped, w: Operand, place: tuple[int, int, int, int, int, int], out: list[int]
) -> Shaped:
    """One op; of a kernel of one pixel, a product whose rows are pixels."""
    count, (oc, ic, kh, kw) = x.shape[0], w.shape
    shape = (count, oc, *out)
    if (kh, kw) != (1, 1) or place[:4] != (1, 1, 0, 0) or count > 1:
        return b.made(b.ctx.conv_2d_direct(b.value(w).tensor, x.tensor, *place), shape)
    pixels = b.transpose(b.reshape(x, (ic, out[0] * out[1])), (1, 0))
    t = b.ctx.mul_mat(pixels.tensor, b.value(b.reshape(w, (oc, ic))).tensor)
    return b.made(b.ctx.reshape_4d(t, *extents(shape)), shape)


@onnx_op("ConvTranspose")
def conv_transpose(b: Lowering, n: OnnxNode, x: Shaped, w: Operand, bias: Operand | None = None) -> Results:
    """Transposed convolution: as the kernel's products, summed where they overlap, of equal strides."""
    if n.get("output_shape") or n.get("auto_pad", "NOTSET") != "NOTSET":
        raise b.fail("output_shape and auto_pad")
    strides, dilations, before, after = _spatial(b, n, x, w.shape[2:])
    extra = [int(i) for i in n.get("output_padding") or [0] * len(strides)]
    if n.get("group", 1) != 1 or set(dilations) != {1}:
        raise b.fail("groups and dilations")
    if len(set(strides)) > 1 and x.rank == 4:
        raise b.fail(f"strides {strides}; they must be equal")
    v, kernel = b.value(_planes(b, x)), _planes(b, w)
    one = [0] * (4 - x.rank)
    before, after, extra = one + before, one + after, one + extra
    t = b.ctx.conv_transpose_2d_p0(b.value(kernel).tensor, v.tensor, strides[-1])
    y = b.made(t, t.ne[::-1])
    for i in range(len(one), 2):
        size = y.shape[2 + i] + extra[i]
        if extra[i]:
            y = _padded(b, y, 2 + i, (0, extra[i]), "constant", 0.0)
        y = b.slice(y, 2 + i, before[i], size - after[i])
    if bias is not None:
        y = b.add(y, _per_channel(b, bias, 4))
    return b.reshape(y, y.shape if x.rank == 4 else (*y.shape[:2], y.shape[3]))


@onnx_op("MaxPool", "AveragePool")
def pool(b: Lowering, n: OnnxNode, x: Shaped) -> Results:
    """Largest or mean element of windows over one or two axes."""
    is_max = n.op == "MaxPool"
    if len([name for name in n.outputs if name]) > 1:
        raise b.fail("the result Indices")
    kernel = [int(i) for i in n.get("kernel_shape", [])]
    if len(kernel) != x.rank - 2 or min(kernel, default=0) < 1:
        raise b.fail(f"a window of {kernel}")
    strides, dilations, before, after = _spatial(b, n, x, kernel)
    if set(dilations) != {1}:
        raise b.fail("dilations")
    shape = x.shape[2:]
    counts = after.copy()  # of padding that a mean counts
    if n.get("ceil_mode") and n.get("auto_pad", "NOTSET") == "NOTSET":
        for i, (m, k, s) in enumerate(zip(shape, kernel, strides, strict=True)):
            places = -(-(m + before[i] + after[i] - k) // s) + 1
            if (places - 1) * s >= m + before[i]:
                places -= 1  # the last window would begin in the padding
            after[i] = max((places - 1) * s + k - m - before[i], 0)
            counts[i] = min(counts[i], after[i])
    one = [1] * (4 - x.rank)
    v = b.value(_planes(b, x))
    full = [*one, *kernel], [*one, *strides], [0] * len(one) + before, [0] * len(one) + after
    for i in range(2):
        width = (full[2][i], full[3][i])
        v = _padded(b, v, 2 + i, width, "constant", -np.inf if is_max else 0.0)
    (kh, kw), (sh, sw) = full[:2]
    if kh > v.shape[2] or kw > v.shape[3]:
        raise b.fail(f"a window of {kernel} for {x.shape}")
    t = b.ctx.pool_2d(v.tensor, "max" if is_max else "avg", kw, kh, sw, sh)
    y = b.made(t, t.ne[::-1])
    y = replace(y, shape=(x.shape[0], x.shape[1], *y.shape[2:]))
    if not is_max and (any(full[2]) or any(full[3])):
        y = b.mul(y, _mean_factor(n, [*[1] * len(one), *shape], full, [0] * len(one) + counts, y.shape[2:]))
    return b.reshape(y, (*x.shape[:2], *(y.shape[2:] if x.rank == 4 else y.shape[3:])))


def _mean_factor(
    n: OnnxNode, shape: Sequence[int], place: Any, counts: list[int], out: Sequence[int]
) -> Array:
    """Size of each window over the number of its elements that a mean counts."""
    kernel, strides, before, _ = place
    told = []
    for i in range(2):
        start = np.arange(out[i]) * strides[i]
        low, high = before[i], before[i] + shape[i]
        if n.get("count_include_pad"):
            low, high = 0, high + counts[i]
        told.append(np.minimum(start + kernel[i], high) - np.maximum(start, low))
    factor: Array = (math.prod(kernel) / np.outer(*told)).astype(np.float32)
    return factor


@onnx_op("GlobalAveragePool", "GlobalMaxPool")
def global_pool(b: Lowering, n: OnnxNode, x: Shaped) -> Results:
    """Largest or mean element of each channel."""
    rows = b.reshape(b.value(x), (x.shape[0] * x.shape[1], math.prod(x.shape[2:])))
    y = (
        _max_rows(b, rows)
        if n.op == "GlobalMaxPool"
        else replace(b.unary("mean", rows), shape=(rows.shape[0], 1))
    )
    return b.reshape(y, (*x.shape[:2], *(1,) * (x.rank - 2)))


@onnx_op("Resize", "Upsample")
def resize(b: Lowering, n: OnnxNode, x: Shaped, *rest: Operand) -> Results:
    """Interpolation: whole factors as one op, others as a product along each axis."""
    if n.op == "Upsample":
        scales = n.get("scales") or [float(v) for v in b.const(rest[0]).reshape(-1)]
        sizes = None
        mode, by, near = n.get("mode", "nearest"), "asymmetric", "floor"
    else:
        given = list(rest) if n.version > 10 else [None, *rest]
        told = [None if v is None or 0 in v.shape else v for v in (*given, None, None, None)]
        scales = None if told[1] is None else [float(v) for v in b.const(told[1]).reshape(-1)]
        sizes = None if told[2] is None else b.ints(told[2])
        mode = n.get("mode", "nearest")
        by = n.get("coordinate_transformation_mode", "half_pixel" if n.version > 10 else "asymmetric")
        near = n.get("nearest_mode", "round_prefer_floor" if n.version > 10 else "floor")
    if by == "tf_crop_and_resize" or n.get("keep_aspect_ratio_policy", "stretch") != "stretch":
        raise b.fail("tf_crop_and_resize and keep_aspect_ratio_policy")
    axes = [normal_axis(n.op, i, x.rank) for i in n.get("axes") or range(x.rank)]
    if len(sizes or scales or []) != len(axes):
        raise b.fail("scales or sizes for another number of axes")
    for i, axis in enumerate(axes):
        m = x.shape[axis]
        size = sizes[i] if sizes else math.floor(m * scales[i])
        scale = size / m if sizes else scales[i]
        if size == m and scale == 1.0:
            continue
        if not 0 < size < 1 << 16 or not 0 < m < 1 << 16:
            raise b.fail(f"{m} to {size} elements")
        x = _resized(b, n, x, axis, size, scale, (mode, by, near))
    return x


def _resized(
    b: Lowering, n: OnnxNode, x: Shaped, axis: int, size: int, scale: float, how: tuple[str, str, str]
) -> Shaped:
    """Resample along one axis, by a matrix or (nearest) by indices."""
    from onnx.reference.ops import op_resize

    mode, by, near = how
    m = x.shape[axis]
    if mode == "nearest" and size % m == 0 and (by, near) == ("asymmetric", "floor"):
        v, outer, _, inner = b.parted(x, axis)
        many = b.expand(b.reshape(v, (outer, m, 1, inner)), (outer, m, size // m, inner))
        return b.reshape(many, (*x.shape[:axis], size, *x.shape[axis + 1 :]))
    coefficients: Callable[..., Any]
    if mode == "nearest":

        def coefficients(ratio: float, scale: float) -> Any:
            return op_resize._nearest_coeffs(ratio, mode=near)
    elif mode == "linear":
        antialias = op_resize._linear_coeffs_antialias
        coefficients = (
            antialias if n.get("antialias") else lambda ratio, scale: op_resize._linear_coeffs(ratio, scale)
        )
    elif mode == "cubic":
        a = n.get("cubic_coeff_a", -0.75)
        antialias = op_resize._cubic_coeffs_antialias
        used = antialias if n.get("antialias") else op_resize._cubic_coeffs
        coefficients = lambda ratio, scale: used(ratio, scale, A=a)  # noqa: E731
    else:
        raise b.fail(f"mode {mode!r}")
    eye = np.eye(m, dtype=np.float32)
    extent = {"output_size": [size]} if scale * m == size else {"scale_factors": [scale]}
    columns = [
        op_resize._interpolate_nd(
            eye[i], coefficients, **extent,
            coordinate_transformation_mode=by, exclude_outside=bool(n.get("exclude_outside")),
            extrapolation_value=n.get("extrapolation_value", 0.0),
        )
        for i in range(m)
    ]  # fmt: skip
    matrix = np.stack(columns, 1).astype(np.float32)  # (size, m)
    if mode == "nearest":
        return b.take(x, matrix.argmax(1), axis)
    order = [i for i in range(x.rank) if i != axis] + [axis]
    moved = b.transpose(b.value(x), order)
    y = b.matmul(
        b.reshape(moved, (math.prod(moved.shape[:-1]), m)),
        Shaped(b.weight(matrix, "f32"), matrix.shape, FLOAT),
    )
    y = b.reshape(y, (*moved.shape[:-1], size))
    return b.transpose(y, [order.index(i) for i in range(x.rank)])


# -- recurrent ----------------------------------------------------------------------------------


@onnx_op("LSTM")
def lstm(b: Lowering, n: OnnxNode, x: Shaped, w: Operand, r: Operand, bias: Operand | None = None,
         lengths: Operand | None = None, h0: Operand | None = None, c0: Operand | None = None,
         peephole: Operand | None = None) -> Results:  # fmt: skip
    """One or both directions, a step at a time; gates in ONNX's order: input, output, forget, cell."""
    if (
        lengths is not None
        or peephole is not None
        or n.get("layout")
        or n.get("clip")
        or n.get("input_forget")
    ):
        raise b.fail("sequence_lens, peepholes, layout, clip and input_forget")
    steps, batch, _ = x.shape
    hidden, directions = n.get("hidden_size", r.shape[-1]), w.shape[0]
    if steps > 1024 or list(n.get("activations") or ["Sigmoid", "Tanh", "Tanh"])[:3] != [
        "Sigmoid",
        "Tanh",
        "Tanh",
    ]:
        raise b.fail("more than 1024 steps, and other activations")

    def part(v: Operand, d: int) -> Operand:
        return v[d] if isinstance(v, np.ndarray) else b.reshape(b.slice(v, 0, d, d + 1), v.shape[1:])

    def product(v: Operand, matrix: Operand) -> Shaped:
        rows = (
            Shaped(b.weight(matrix, "matrix"), matrix.shape, FLOAT)
            if isinstance(matrix, np.ndarray)
            else matrix
        )
        return b.matmul(v, rows)

    ends_h, ends_c, both = [], [], []
    for d in range(directions):
        back = d == 1 or n.get("direction") == "reverse"
        inputs = product(b.reshape(x, (steps * batch, x.shape[2])), part(w, d))
        if bias is not None:
            halves = part(bias, d)
            inputs = b.add(inputs, b.slice(halves, 0, 0, 4 * hidden))
            inputs = b.add(inputs, b.slice(halves, 0, 4 * hidden, 8 * hidden))
        zero: Operand = np.zeros((batch, hidden), np.float32)
        h = zero if h0 is None else part(h0, d)
        c = zero if c0 is None else part(c0, d)
        told: list[Shaped] = []
        for step in range(steps)[:: -1 if back else 1]:
            gates = b.add(b.slice(inputs, 0, step * batch, (step + 1) * batch), product(h, part(r, d)))
            first, out, forget, cell = (b.slice(gates, 1, i * hidden, (i + 1) * hidden) for i in range(4))
            kept = b.mul(b.unary("sigmoid", forget), c)
            c = b.add(kept, b.mul(b.unary("sigmoid", first), b.unary("tanh", cell)))
            h = b.mul(b.unary("sigmoid", out), b.unary("tanh", c))
            told.append(h)
        rows = [b.reshape(v, (1, 1, batch, hidden)) for v in (told[::-1] if back else told)]
        both.append(b.concat(rows, 0))
        ends_h.append(b.reshape(h, (1, batch, hidden)))
        ends_c.append(b.reshape(c, (1, batch, hidden)))
    return b.concat(both, 1), b.concat(ends_h, 0), b.concat(ends_c, 0)
