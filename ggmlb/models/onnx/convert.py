"""CONVERTERS: one function per ONNX op, from operands to values."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from ggmlb.models.onnx.file import DTYPES, Array, OnnxNode
from ggmlb.models.onnx.folding import fold
from ggmlb.models.onnx.lowering import FLOAT, INT64, Lowering, Operand, Shaped, broadcast, normal_axis

Maybe = Operand | None
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


def _elu(b: Lowering, x: Operand, alpha: float, inner: float = 1.0) -> Shaped:
    """Return `max(x, 0) + alpha * expm1(min(x, 0) * inner)`."""
    low = b.unary("expm1", b.affine(b.clamp(x, high=0.0), inner))
    return b.add(b.unary("relu", x), b.affine(low, alpha))


def _log_sum(b: Lowering, x: Operand, sign: float) -> Shaped:
    """Return `log(x + sqrt(x^2 + sign))`."""
    return b.unary("log", b.add(x, b.unary("sqrt", b.affine(b.unary("sqr", x), 1.0, sign))))


def _more(b: Lowering, x: Operand, y: Operand) -> Shaped:
    return b.as_bool(b.unary("step", b.sub(x, y)))


def _flat(b: Lowering, x: Operand, axis: int) -> Shaped:
    axis = axis + x.ndim if axis < 0 else axis
    return b.reshape(x, (math.prod(x.shape[:axis]), math.prod(x.shape[axis:])))


def _ints(b: Lowering, n: OnnxNode, told: Maybe, name: str) -> list[int] | None:
    """Return integers that are an operand, or an attribute in older operator sets; `None` without."""
    return b.ints(told) if told is not None else n.get(name)


def _shrunk(b: Lowering, n: OnnxNode, x: Operand) -> Shaped:
    bias, limit = n.get("bias", 0.0), n.get("lambd", 0.5)
    above = b.mul(b.affine(x, 1.0, -bias), b.unary("step", b.affine(x, 1.0, -limit)))
    return b.add(above, b.mul(b.affine(x, 1.0, bias), b.unary("step", b.affine(x, -1.0, -limit))))


FORMULAS: Final[dict[str, Converter]] = {
    "And": lambda b, n, x, y: b.as_bool(b.mul(x, y)),
    "Or": lambda b, n, x, y: b.as_bool(b.unary("step", b.add(x, y))),
    "Xor": lambda b, n, x, y: b.as_bool(b.unary("abs", b.sub(x, y))),
    "Not": lambda b, n, x: b.as_bool(b.affine(x, -1.0, 1.0)),
    "Equal": lambda b, n, x, y: b.as_bool(b.affine(b.unary("step", b.unary("abs", b.sub(x, y))), -1.0, 1.0)),
    "Greater": lambda b, n, x, y: _more(b, x, y),
    "Less": lambda b, n, x, y: _more(b, y, x),
    "GreaterOrEqual": lambda b, n, x, y: b.affine(_more(b, y, x), -1.0, 1.0),
    "LessOrEqual": lambda b, n, x, y: b.affine(_more(b, x, y), -1.0, 1.0),
    "Where": lambda b, n, c, x, y: replace(b.select(c, x, y), dtype=x.dtype),
    "Sum": lambda b, n, *xs: b.value(functools.reduce(b.add, xs)),
    "Mean": lambda b, n, *xs: b.affine(functools.reduce(b.add, xs), 1 / len(xs)),
    "Reciprocal": lambda b, n, x: b.div(1.0, x),
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
    "LeakyRelu": lambda b, n, x: b.unary("leaky_relu", x, n.get("alpha", 0.01)),
    "PRelu": lambda b, n, x, slope: b.add(b.unary("relu", x), b.mul(b.clamp(x, high=0.0), slope)),
    "ThresholdedRelu": lambda b, n, x: b.mul(x, b.unary("step", b.affine(x, 1.0, -n.get("alpha", 1.0)))),
    "Elu": lambda b, n, x: _elu(b, x, n.get("alpha", 1.0)),
    "Celu": lambda b, n, x: _elu(b, x, n.get("alpha", 1.0), 1.0 / n.get("alpha", 1.0)),
    "Selu": lambda b, n, x: b.affine(_elu(b, x, n.get("alpha", 1.67326324)), n.get("gamma", 1.05070099)),
    "Shrink": _shrunk,
    "Shape": lambda b, n, x: np.array(x.shape[slice(n.get("start", 0), n.get("end"))], np.int64),
    "Size": lambda b, n, x: np.array(math.prod(x.shape), np.int64),
    "Transpose": lambda b, n, x: b.transpose(x, n.get("perm") or range(x.ndim)[::-1]),
    "Expand": lambda b, n, x, shape: b.expand(x, broadcast("Expand", x.shape, tuple(b.ints(shape)))),
    "Flatten": lambda b, n, x: _flat(b, x, n.get("axis", 1)),
    "Softmax": lambda b, n, x: _along(b, n, x, lambda rows: b.unary("soft_max", rows)),
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
def identity(b: Lowering, n: OnnxNode, x: Operand, ratio: Maybe = None, *training: Operand) -> Results:
    """The operand; dropout is for training."""
    if training and bool(b.const(training[0])) and (ratio is None or float(b.const(ratio).reshape(())) > 0):
        raise b.fail("training_mode")
    return x, np.ones(x.shape if len(n.outputs) > 1 else 0, bool)


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
    t = b.div(1.0, b.affine(z, 0.3275911, 1.0))
    p = b.affine(t, 1.061405429, -1.453152027)
    for c in (1.421413741, -0.284496736, 0.254829592):
        p = b.affine(b.mul(p, t), 1.0, c)
    tail = b.mul(b.mul(p, t), b.unary("exp", b.unary("neg", b.unary("sqr", z))))
    return b.mul(b.unary("sgn", x), b.affine(tail, -1.0, 1.0))


@onnx_op("Clip")
def clip(b: Lowering, n: OnnxNode, x: Operand, low: Maybe = None, high: Maybe = None) -> Results:
    """`x` limited to a range."""
    if low is None and high is None and n.version < 11:
        return b.clamp(x, n.get("min", -math.inf), n.get("max", math.inf))
    least = -math.inf if low is None else float(b.const(low).reshape(()))
    most = math.inf if high is None else float(b.const(high).reshape(()))
    return b.clamp(x, min(least, most), most)


@onnx_op("Cast", "CastLike")
def cast(b: Lowering, n: OnnxNode, x: Operand, like: Maybe = None) -> Results:
    """To float32, float16 (computed as float32), integers or booleans."""
    to = DTYPES.get(n.get("to")) if like is None else like.dtype
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


def _dtype(*xs: Operand) -> np.dtype[Any]:
    return next((x.dtype for x in xs if isinstance(x, Shaped)), xs[-1].dtype)


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
    if y.ndim > x.ndim:
        raise b.fail("an exponent of more axes than the base")
    if p * 2 != int(p * 2) or not abs(p) <= 8:
        raise b.fail(f"exponent {p}")
    t = b.value(x).tensor
    is_one = p.is_integer() or abs(p) == 0.5
    return b.made(t**p if is_one else t ** math.floor(p) * t**0.5, x.shape, x.dtype)


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

    return replace(b.value(functools.reduce(two, xs)), dtype=_dtype(*xs))


@onnx_op("IsNaN")
def is_nan(b: Lowering, n: OnnxNode, x: Operand) -> Results:
    """A number is at least 0 or at most 0; NaN is neither."""
    some = b.add(b.unary("step", x), b.unary("step", b.unary("neg", x)))
    zero = b.unary("step", b.affine(b.unary("abs", x), -1.0, float(np.finfo(np.float32).tiny)))
    return b.as_bool(b.affine(b.unary("step", b.add(some, zero)), -1.0, 1.0))


# -- shapes -------------------------------------------------------------------------------------


@onnx_op("Reshape")
def reshape(b: Lowering, n: OnnxNode, x: Operand, shape: Maybe = None) -> Results:
    """0 keeps an extent, -1 is inferred from the others."""
    told = b.ints(shape) if shape is not None else [int(i) for i in n.get("shape", [])]
    if not n.get("allowzero"):
        told = [x.shape[i] if m == 0 and i < x.ndim else m for i, m in enumerate(told)]
    if told.count(-1) == 1:
        known = -math.prod(told)
        if known <= 0 or math.prod(x.shape) % known:
            raise b.fail(f"shape {told} of {x.shape}")
        told[told.index(-1)] = math.prod(x.shape) // known
    return b.reshape(x, told)


def _axes(b: Lowering, n: OnnxNode, told: Maybe, ndim: int) -> list[int] | None:
    axes = _ints(b, n, told, "axes")
    return None if axes is None else [normal_axis(n.op, i, ndim) for i in axes]


@onnx_op("Squeeze")
def squeeze(b: Lowering, n: OnnxNode, x: Operand, axes: Maybe = None) -> Results:
    """Without axes of one element."""
    gone = _axes(b, n, axes, x.ndim)
    gone = [i for i, m in enumerate(x.shape) if m == 1] if gone is None else gone
    return b.reshape(x, [m for i, m in enumerate(x.shape) if i not in gone])


@onnx_op("Unsqueeze")
def unsqueeze(b: Lowering, n: OnnxNode, x: Operand, axes: Maybe = None) -> Results:
    """With axes of one element."""
    ndim = x.ndim + len(_ints(b, n, axes, "axes") or [])
    new, rest = _axes(b, n, axes, ndim) or [], iter(x.shape)
    return b.reshape(x, [1 if i in new else next(rest) for i in range(ndim)])


@onnx_op("Tile")
def tile(b: Lowering, n: OnnxNode, x: Operand, repeats: Operand) -> Results:
    """Repeated along each axis."""
    for axis, times in enumerate(b.ints(repeats)):
        v, outer, m, inner = b.parted(x, axis)
        many = b.expand(b.reshape(v, (outer, 1, m * inner)), (outer, times, m * inner))
        x = b.reshape(many, (*x.shape[:axis], m * times, *x.shape[axis + 1 :]))
    return x


@onnx_op("Concat")
def concat(b: Lowering, n: OnnxNode, *xs: Operand) -> Results:
    """Joined along an axis."""
    return replace(b.concat(xs, normal_axis("Concat", n.get("axis", 1), xs[0].ndim)), dtype=_dtype(*xs))


@onnx_op("Split")
def split(b: Lowering, n: OnnxNode, x: Operand, sizes: Maybe = None) -> Results:
    """Parts along an axis."""
    axis = normal_axis("Split", n.get("axis", 0), x.ndim)
    told = _ints(b, n, sizes, "split")
    if told is None:
        count = n.get("num_outputs", len(n.outputs))
        each = -(-x.shape[axis] // count)
        told = [min(each, x.shape[axis] - i * each) for i in range(count)]
    if sum(told) != x.shape[axis] or min(told) < 0:
        raise b.fail(f"parts {told} of {x.shape[axis]}")
    ends = np.cumsum(told).tolist()
    return tuple(b.slice(x, axis, end - m, end) for end, m in zip(ends, told, strict=True))


@onnx_op("Slice")
def slice_(b: Lowering, n: OnnxNode, x: Operand, *rest: Maybe) -> Results:
    """Ranges along axes; with a step, elements by index."""
    starts, ends, axes, steps = (*rest, None, None, None, None)[:4]
    first, last = _ints(b, n, starts, "starts") or [], _ints(b, n, ends, "ends") or []
    along = _axes(b, n, axes, x.ndim) or list(range(len(first)))
    by = b.ints(steps) if steps is not None else [1] * len(first)
    if not len(first) == len(last) == len(along) == len(by) or 0 in by:
        raise b.fail(f"starts {first}, ends {last}, axes {along}, steps {by}")
    for axis, start, stop, step in zip(along, first, last, by, strict=True):
        is_whole = step < 0 and stop < -x.shape[axis]
        start, stop, step = slice(start, None if is_whole else stop, step).indices(x.shape[axis])
        if step == 1:
            x = b.slice(x, axis, start, max(stop, start))
        else:
            x = b.take(x, np.arange(start, stop, step), axis)
    return x


@onnx_op("Gather")
def gather(b: Lowering, n: OnnxNode, x: Operand, indices: Operand) -> Results:
    """Elements at indices along an axis."""
    axis = normal_axis("Gather", n.get("axis", 0), x.ndim)
    if isinstance(indices, np.ndarray) and indices.ndim == 0:
        at = int(indices) + (x.shape[axis] if indices < 0 else 0)
        if not 0 <= at < x.shape[axis]:
            raise b.fail(f"index {int(indices)} is out of range for an axis of {x.shape[axis]}")
        part = b.slice(x, axis, at, at + 1)
        return b.reshape(part, (*x.shape[:axis], *x.shape[axis + 1 :]))
    return b.take(x, indices, axis)


@onnx_op("GatherElements")
def gather_elements(b: Lowering, n: OnnxNode, x: Operand, indices: Operand) -> Results:
    """One element for each index."""
    axis, shape = normal_axis("GatherElements", n.get("axis", 0), x.ndim), indices.shape
    strides = [math.prod(x.shape[i + 1 :]) for i in range(x.ndim)]
    others = [0 if i == axis else stride for i, stride in enumerate(strides)]
    base = np.tensordot(np.array(others, np.float32), np.indices(shape, np.float32), 1)
    flat = b.add(b.affine(b.from_first(indices, x.shape[axis]), float(strides[axis])), base)
    return b.take(b.reshape(x, (math.prod(x.shape),)), flat, 0)


@onnx_op("Pad")
def pad(b: Lowering, n: OnnxNode, x: Operand, *rest: Maybe) -> Results:
    """With a constant, or with elements of `x`; negative widths cut off."""
    pads, fill, axes = (*rest, None, None, None)[:3]
    told = _ints(b, n, pads, "pads") or n.get("paddings", [])
    number = float(b.const(fill).reshape(())) if fill is not None else n.get("value", 0.0)
    along = _axes(b, n, axes, x.ndim) or list(range(x.ndim))
    if len(told) != 2 * len(along):
        raise b.fail(f"{len(told)} widths for {len(along)} axes")
    mode, half = n.get("mode", "constant"), len(along)
    for axis, before, after in zip(along, told[:half], told[half:], strict=True):
        x = _padded(b, x, axis, (before, after), mode, number)
    return x


def _padded(b: Lowering, x: Operand, axis: int, width: tuple[int, int], mode: str, fill: float) -> Shaped:
    before, after = width
    m = x.shape[axis]
    if before < 0 or after < 0:
        start, stop = max(-before, 0), m - max(-after, 0)
        x = b.slice(x, axis, start, max(stop, start))
        m, before, after = x.shape[axis], max(before, 0), max(after, 0)
    if before == after == 0:
        return b.value(x)
    if m + before + after > 1 << 31:
        raise b.fail(f"widths {before} and {after}")
    if mode != "constant":
        kind: Any = mode
        return b.take(x, np.pad(np.arange(m), (before, after), mode=kind), axis)
    v, outer, _, inner = b.parted(x, axis)
    shape = (*x.shape[:axis], m + before + after, *x.shape[axis + 1 :])
    t = b.ctx.pad_ext(v.tensor, 0, 0, before, after)
    if fill:
        edge = np.zeros((m + before + after, 1), np.float32)
        edge[:before], edge[before + m :] = fill, fill
        t = b.add(b.made(t, (outer, shape[axis], inner)), edge).tensor
    return b.made(t, shape, x.dtype)


@onnx_op("DepthToSpace")
def depth_to_space(b: Lowering, n: OnnxNode, x: Operand) -> Results:
    """Channels to blocks of pixels."""
    (count, c, h, w), k = x.shape, n.get("blocksize", 1)
    is_crd, rest = n.get("mode", "DCR") == "CRD", c // k**2
    parts = (count, rest, k, k, h, w) if is_crd else (count, k, k, rest, h, w)
    moved = b.transpose(b.reshape(x, parts), (0, 1, 4, 2, 5, 3) if is_crd else (0, 3, 4, 1, 5, 2))
    return b.reshape(moved, (count, rest, h * k, w * k))


@onnx_op("SpaceToDepth")
def space_to_depth(b: Lowering, n: OnnxNode, x: Operand) -> Results:
    """Blocks of pixels to channels."""
    (count, c, h, w), k = x.shape, n.get("blocksize", 1)
    order = (0, 1, 3, 5, 2, 4) if n.get("mode", "DCR") == "CRD" else (0, 3, 5, 1, 2, 4)
    moved = b.transpose(b.reshape(x, (count, c, h // k, k, w // k, k)), order)
    return b.reshape(moved, (count, c * k * k, h // k, w // k))


@onnx_op("Trilu")
def trilu(b: Lowering, n: OnnxNode, x: Operand, k: Maybe = None) -> Results:
    """A triangle of each matrix, 0 elsewhere."""
    diagonal = 0 if k is None else b.ints(k)[0]
    rows, columns = x.shape[-2:]
    is_upper = n.get("upper", 1)
    below = np.tri(rows, columns, diagonal - 1 if is_upper else diagonal, dtype=bool)
    return b.select(~below if is_upper else below, x, np.zeros((), x.dtype))


@onnx_op("OneHot")
def one_hot(b: Lowering, n: OnnxNode, indices: Operand, depth: Operand, values: Operand) -> Results:
    """1 at an index, 0 elsewhere."""
    count, (off, on) = b.ints(depth)[0], b.const(values).reshape(2)
    if not 0 < count < 1 << 24:
        raise b.fail(f"depth {count}")
    axis = normal_axis("OneHot", n.get("axis", -1), indices.ndim + 1)
    shape = (*indices.shape[:axis], 1, *indices.shape[axis:])
    at = b.from_first(b.reshape(indices, shape), count)
    places = np.arange(count, dtype=np.float32).reshape(-1, *(1,) * (len(shape) - axis - 1))
    other = b.unary("step", b.unary("abs", b.sub(at, places)))
    return replace(b.affine(other, float(off) - float(on), float(on)), dtype=np.asarray(values).dtype)


# -- rows ---------------------------------------------------------------------------------------

REDUCTIONS: Final[dict[str, tuple[str | None, str, str | None]]] = {
    "ReduceL1": ("abs", "sum_rows", None), "ReduceL2": ("sqr", "sum_rows", "sqrt"),
    "ReduceLogSum": (None, "sum_rows", "log"), "ReduceMax": (None, "max", None),
    "ReduceMean": (None, "mean", None), "ReduceMin": ("neg", "max", "neg"),
    "ReduceSum": (None, "sum_rows", None), "ReduceSumSquare": ("sqr", "sum_rows", None),
}  # fmt: skip
"""Functions of the elements, of a row, and of its result."""


@onnx_op(*REDUCTIONS, "ReduceLogSumExp")
def reduce(b: Lowering, n: OnnxNode, x: Operand, axes: Maybe = None) -> Results:
    """Along axes, moved behind the others."""
    told = _axes(b, n, axes, x.ndim)
    if not told:
        if n.get("noop_with_empty_axes"):
            return x
        told = list(range(x.ndim))
    shape = [1 if i in told else m for i, m in enumerate(x.shape) if i not in told or n.get("keepdims", 1)]
    if 0 in x.shape:
        raise b.fail("a reduction of no elements")
    rows, _ = b.last(x, sorted(told))
    if n.op == "ReduceLogSumExp":
        low, most = _below_max(b, rows)
        y = b.add(b.unary("log", b.reduced("sum_rows", b.unary("exp", low))), most)
    else:
        before, fn, behind = REDUCTIONS[n.op]
        y = b.reduced(fn, rows if before is None else b.unary(before, rows))
        y = y if behind is None else b.unary(behind, y)
    return b.reshape(y, shape)


def _below_max(b: Lowering, rows: Shaped) -> tuple[Shaped, Shaped]:
    """Return rows less their maxima, and these."""
    most = b.reduced("max", rows)
    return b.sub(rows, most), most


@onnx_op("ArgMax", "ArgMin")
def arg_extreme(b: Lowering, n: OnnxNode, x: Operand) -> Results:
    """Index of the first largest or smallest element along an axis."""
    axis = normal_axis(n.op, n.get("axis", 0), x.ndim)
    if n.get("select_last_index"):
        raise b.fail("select_last_index")
    rows, _ = b.last(x if n.op == "ArgMax" else b.unary("neg", x), [axis])
    shape = [1 if i == axis else m for i, m in enumerate(x.shape) if i != axis or n.get("keepdims", 1)]
    return b.reshape(b.made(b.ctx.argmax(rows.tensor), (rows.shape[0],), INT64), shape)


@onnx_op("TopK")
def top_k(b: Lowering, n: OnnxNode, x: Operand, k: Maybe = None) -> Results:
    """Largest or smallest elements along an axis, and their indices."""
    axis = normal_axis("TopK", n.get("axis", -1), x.ndim)
    count = b.ints(k)[0] if k is not None else n.get("k", 1)
    if not 0 <= count <= x.shape[axis]:
        raise b.fail(f"{count} of {x.shape[axis]} elements")
    rows, _ = b.last(x, [axis])
    m, width = rows.shape
    key = b.unary("neg", rows) if n.get("largest", 1) else rows  # of equal elements, the first comes first
    by = b.ctx.argsort(key.tensor, "asc")
    ids = b.ctx.cont(b.ctx.view_2d(by, count, m, by.nb[1]))
    found = b.ctx.get_rows(b.ctx.reshape_4d(rows.tensor, 1, width, m, 1), b.ctx.reshape_2d(ids, count, m))
    places = b.made(b.ctx.cast(ids, "f32"), (m, count), INT64)
    values = b.made(b.ctx.reshape_2d(found, count, m), (m, count), x.dtype)
    return tuple(b.along(x, [axis], lambda _: values, lambda _: places))


@onnx_op("CumSum")
def cumsum(b: Lowering, n: OnnxNode, x: Operand, axis: Operand) -> Results:
    """Running sum along an axis."""
    along = normal_axis("CumSum", b.ints(axis)[0], x.ndim)
    backwards = np.arange(x.shape[along])[::-1]
    x = b.take(x, backwards, along) if n.get("reverse") else x
    (total,) = b.along(x, [along], lambda rows: b.unary("cumsum", rows))
    total = b.sub(total, x) if n.get("exclusive") else total
    return b.take(total, backwards, along) if n.get("reverse") else total


def _along(b: Lowering, n: OnnxNode, x: Operand, fn: Callable[[Shaped], Shaped]) -> Shaped:
    """Apply a function of rows along an axis; before operator set 13, the axes from it on are a row."""
    axis = normal_axis(n.op, n.get("axis", -1 if n.version >= 13 else 1), x.ndim)
    return b.along(x, [axis] if n.version >= 13 else list(range(axis, x.ndim)), fn)[0]


@onnx_op("MaskedSoftmax")
def masked_softmax(b: Lowering, n: OnnxNode, x: Operand, mask: Maybe = None) -> Results:
    """Of the pattern `softmax(x * scale + mask)`, over the last axis."""
    v, scale = b.value(x), n.get("scale", 1.0)
    m = None if mask is None else b.value(mask)
    if m is not None:
        if v.ndim > 4 or m.ndim > v.ndim or broadcast("Softmax", v.shape, m.shape) != v.shape:
            return b.unary("soft_max", b.add(b.affine(v, scale), m))
        lead = (1,) * (v.ndim - m.ndim) + m.shape
        m = b.expand(m, (*lead[:-2], *v.shape[-2:]))
    return b.made(b.ctx.soft_max_ext(v.tensor, None if m is None else m.tensor, scale), v.shape, v.dtype)


@onnx_op("LogSoftmax")
def log_softmax(b: Lowering, n: OnnxNode, x: Operand) -> Results:
    """Along an axis, without small numbers."""

    def rows_of(rows: Shaped) -> Shaped:
        low, _ = _below_max(b, rows)
        return b.sub(low, b.unary("log", b.reduced("sum_rows", b.unary("exp", low))))

    return _along(b, n, x, rows_of)


# -- norms --------------------------------------------------------------------------------------


def _normed(b: Lowering, fn: str, x: Operand, rows: Sequence[int], eps: float) -> Shaped:
    v = b.reshape(b.value(x), rows)
    return b.reshape(b.made(getattr(b.ctx, fn)(v.tensor, eps), rows, x.dtype), x.shape)


@onnx_op("LayerNormalization", "RMSNormalization")
def layer_norm(b: Lowering, n: OnnxNode, x: Operand, w: Maybe = None, bias: Maybe = None) -> Results:
    """Over the axes from `axis` on."""
    if len([name for name in n.outputs if name]) > 1:
        raise b.fail("the results Mean and InvStdDev")
    axis = normal_axis(n.op, n.get("axis", -1), x.ndim)
    rows = math.prod(x.shape[:axis]), math.prod(x.shape[axis:])
    y = _normed(b, "norm" if n.op == "LayerNormalization" else "rms_norm", x, rows, n.get("epsilon", 1e-5))
    y = y if w is None else b.mul(y, w)
    return y if bias is None else b.add(y, bias)


def _per_channel(b: Lowering, x: Operand, ndim: int) -> Operand:
    """Return a vector for the channels, axis 1 of `ndim`, as an operand that broadcasts."""
    return b.viewed(x, (x.shape[0], *(1,) * (ndim - 2)))


@onnx_op("InstanceNormalization", "GroupNormalization")
def group_norm(b: Lowering, n: OnnxNode, x: Operand, w: Operand, bias: Operand) -> Results:
    """Over groups of channels; an instance's are one channel each."""
    groups = x.shape[1] if n.op == "InstanceNormalization" else n.get("num_groups", 1)
    if x.shape[1] % groups:
        raise b.fail(f"{groups} groups of {x.shape[1]} channels")
    if n.op == "GroupNormalization" and n.version < 21:
        each = x.shape[1] // groups
        w, bias = (np.repeat(b.const(v), each) for v in (w, bias))
    rows = x.shape[0] * groups, math.prod(x.shape[1:]) // groups
    y = _normed(b, "norm", x, rows, n.get("epsilon", 1e-5))
    return b.add(b.mul(y, _per_channel(b, w, x.ndim)), _per_channel(b, bias, x.ndim))


@onnx_op("BatchNormalization")
def batch_norm(b: Lowering, n: OnnxNode, x: Operand, *params: Operand) -> Results:
    """A scale and a bias for each channel, of constants folded."""
    w, bias, mean, var = params
    if n.get("training_mode") or len([name for name in n.outputs if name]) > 1:
        raise b.fail("training_mode")
    eps, rank = n.get("epsilon", 1e-5), x.ndim
    if all(isinstance(v, np.ndarray) for v in (w, bias, mean, var)):
        scale = (b.const(w) / np.sqrt(b.const(var) + eps)).astype(np.float32)
        shift = (b.const(bias) - b.const(mean) * scale).astype(np.float32)
        return b.add(b.mul(x, _per_channel(b, scale, rank)), _per_channel(b, shift, rank))
    deviation = b.unary("sqrt", b.affine(_per_channel(b, var, rank), 1.0, eps))
    y = b.div(b.sub(x, _per_channel(b, mean, rank)), deviation)
    return b.add(b.mul(y, _per_channel(b, w, rank)), _per_channel(b, bias, rank))


@onnx_op("LpNormalization")
def lp_norm(b: Lowering, n: OnnxNode, x: Operand) -> Results:
    """Divided by the norm along an axis; 0 stays 0."""
    length = reduce(b, replace(n, op=f"ReduceL{n.get('p', 2)}", attrs={"axes": [n.get("axis", -1)]}), x)
    return b.div(x, b.clamp(length, low=float(np.finfo(np.float32).tiny)))  # type: ignore[arg-type]


@onnx_op("MeanVarianceNormalization")
def mean_variance_norm(b: Lowering, n: OnnxNode, x: Operand) -> Results:
    """Over axes, by default all but the channels."""
    axes = [normal_axis(n.op, i, x.ndim) for i in n.get("axes", [0, 2, 3])]
    return b.along(x, axes, lambda rows: _normed(b, "norm", rows, rows.shape, 1e-9))[0]


# -- products -----------------------------------------------------------------------------------


@onnx_op("MatMul")
def matmul(b: Lowering, n: OnnxNode, x: Operand, y: Operand) -> Results:
    """NumPy's matmul; constant matrices are transposed once."""
    left, right = x.ndim, y.ndim
    if not left or not right:
        raise b.fail("a product with a scalar")
    p = b.reshape(x, (1, *x.shape)) if left == 1 else x
    q = b.reshape(y, (*y.shape, 1)) if right == 1 else y
    out = b.matmul(p, b.swapped(q))
    *lead, m, k = out.shape
    return replace(b.reshape(out, (*lead, *[m] * (left > 1), *[k] * (right > 1))), dtype=_dtype(x, y))


@onnx_op("Gemm")
def gemm(b: Lowering, n: OnnxNode, x: Operand, y: Operand, c: Maybe = None) -> Results:
    """`alpha * x @ y + beta * c`."""
    if x.ndim != 2 or y.ndim != 2:
        raise b.fail("operands that are not matrices")
    p: Operand = b.swapped(x) if n.get("transA") else x
    out = b.matmul(p, b.rows(y) if n.get("transB") else b.swapped(y))
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


def with_planes(convert: Converter) -> Converter:
    """Let a converter for two spatial axes compute one axis, as the second of two."""

    def planes(b: Lowering, n: OnnxNode, *operands: Operand) -> Results:
        ndim = operands[0].ndim
        if ndim == 4:
            return convert(b, n, *operands)
        if ndim != 3:
            raise b.fail(f"{ndim - 2} spatial axes; 1 or 2 are supported")

        def four(v: Operand) -> Operand:
            return v if v.ndim != 3 else b.viewed(v, (*v.shape[:2], 1, *v.shape[2:]))

        first = {"strides": [1], "dilations": [1], "kernel_shape": [1], "output_padding": [0], "pads": [0]}
        attrs = {name: [*first.get(name, []), *v] if name in first else v for name, v in n.attrs.items()}
        if attrs.get("pads"):
            attrs["pads"][2:2] = [0]
        y: Any = convert(b, replace(n, attrs=attrs), *map(four, operands))
        return b.reshape(y, (*y.shape[:2], y.shape[3]))

    return planes


def _pad_planes(
    b: Lowering, x: Operand, before: Sequence[int], after: Sequence[int], fill: float = 0.0
) -> Shaped:
    for axis, width in enumerate(zip(before, after, strict=True), 2):
        x = _padded(b, x, axis, width, "constant", fill)
    return b.value(x)


@onnx_op("Conv")
@with_planes
def conv(b: Lowering, n: OnnxNode, x: Operand, w: Operand, bias: Maybe = None) -> Results:
    """Convolution over one or two axes: one op for each group, or one for all if each is one channel."""
    strides, dilations, before, after = _spatial(b, n, x, w.shape[2:])
    group, (count, c), (oc, ic, *kernel) = n.get("group", 1), x.shape[:2], w.shape
    if group < 1 or c != ic * group or oc % group:
        raise b.fail(f"{c} channels, {group} groups and a kernel of {w.shape}")
    v = b.value(x)
    if before != after:
        v, before = _pad_planes(b, v, before, after), [0, 0]
    place = (*strides[::-1], *before[::-1], *dilations[::-1])
    out = [
        (m + 2 * p - d * (k - 1) - 1) // s + 1
        for m, p, d, k, s in zip(v.shape[2:], before, dilations, kernel, strides, strict=True)
    ]
    if min(out) < 1:
        raise b.fail(f"a kernel of {w.shape} for {x.shape}")
    if group == c and ic == 1 and oc == c:
        y = b.made(b.ctx.conv_2d_dw_direct(b.value(w).tensor, v.tensor, *place), (count, oc, *out))
    else:
        each, parts = oc // group, []
        for g in range(group):
            low, high = g * each, (g + 1) * each
            rows = w[low:high] if isinstance(w, np.ndarray) else b.slice(w, 0, low, high)
            parts.append(_conv(b, b.slice(v, 1, g * ic, (g + 1) * ic), rows, place, out))
        y = parts[0] if group == 1 else b.concat(parts, 1)
    return replace(y if bias is None else b.add(y, _per_channel(b, bias, 4)), dtype=x.dtype)


def _conv(b: Lowering, x: Shaped, w: Operand, place: Any, out: list[int]) -> Shaped:
    """One op; of a kernel of one pixel, a product whose rows are pixels."""
    count, (oc, ic, kh, kw) = x.shape[0], w.shape
    shape = (count, oc, *out)
    if kh == kw == math.prod(x.shape[2:]) == 1 and place[2:4] == (0, 0):
        rows = b.rows(b.viewed(w, (oc, ic)))
        return b.reshape(b.matmul(b.reshape(x, (count, ic)), rows), shape)
    if (kh, kw) != (1, 1) or place[:4] != (1, 1, 0, 0) or count > 1:
        return b.made(b.ctx.conv_2d_direct(b.value(w).tensor, x.tensor, *place), shape)
    pixels = b.transpose(b.reshape(x, (ic, out[0] * out[1])), (1, 0))
    t = b.ctx.mul_mat(pixels.tensor, b.value(b.reshape(w, (oc, ic))).tensor)
    return b.made(t, shape)


@onnx_op("ConvTranspose")
@with_planes
def conv_transpose(b: Lowering, n: OnnxNode, x: Operand, w: Operand, bias: Maybe = None) -> Results:
    """Transposed convolution: as the kernel's products, summed where they overlap, of equal strides."""
    if n.get("output_shape") or n.get("auto_pad", "NOTSET") != "NOTSET":
        raise b.fail("output_shape and auto_pad")
    strides, dilations, before, after = _spatial(b, n, x, w.shape[2:])
    if n.get("group", 1) != 1 or set(dilations) != {1}:
        raise b.fail("groups and dilations")
    steps = {s for s, m in zip(strides, x.shape[2:], strict=True) if m > 1} or {1}
    if len(steps) > 1:
        raise b.fail(f"strides {strides}; they must be equal")
    t = b.ctx.conv_transpose_2d_p0(b.value(w).tensor, b.value(x).tensor, steps.pop())
    extra = n.get("output_padding") or [0, 0]
    ends = [e - p for e, p in zip(extra, after, strict=True)]
    y = _pad_planes(b, b.made(t, t.ne[::-1]), [-p for p in before], ends)
    return y if bias is None else b.add(y, _per_channel(b, bias, 4))


@onnx_op("MaxPool", "AveragePool")
@with_planes
def pool(b: Lowering, n: OnnxNode, x: Operand) -> Results:
    """Largest or mean element of windows over one or two axes."""
    is_max, kernel, size = n.op == "MaxPool", n.get("kernel_shape", []), x.shape[2:]
    if len([name for name in n.outputs if name]) > 1:
        raise b.fail("the result Indices")
    if len(kernel) != 2 or min(kernel) < 1:
        raise b.fail(f"a window of {kernel}")
    strides, dilations, before, after = _spatial(b, n, x, kernel)
    if set(dilations) != {1}:
        raise b.fail("dilations")
    counts = after.copy()  # of padding that a mean counts
    if n.get("ceil_mode") and n.get("auto_pad", "NOTSET") == "NOTSET":
        for i, (m, k, s) in enumerate(zip(size, kernel, strides, strict=True)):
            places = -(-(m + before[i] + after[i] - k) // s) + 1
            if (places - 1) * s >= m + before[i]:
                places -= 1  # the last window would begin in the padding
            after[i] = max((places - 1) * s + k - m - before[i], 0)
            counts[i] = min(counts[i], after[i])
    own = before if before == after and all(p < k for p, k in zip(before, kernel, strict=True)) else [0, 0]
    v = b.value(x) if own == before == after else _pad_planes(b, x, before, after, -np.inf if is_max else 0.0)
    if any(k > m + 2 * p for k, m, p in zip(kernel, v.shape[2:], own, strict=True)):
        raise b.fail(f"a window of {kernel} for {x.shape}")
    t = b.ctx.pool_2d(v.tensor, "max" if is_max else "avg", *kernel[::-1], *strides[::-1], *own[::-1])
    y = b.made(t, (*x.shape[:2], t.ne[1], t.ne[0]))
    if is_max or not any(before + after):
        return y
    found = []  # numbers of elements of each window that a mean counts
    for i in range(2):
        start = np.arange(y.shape[2 + i]) * strides[i]
        low, high = before[i], before[i] + size[i]
        if n.get("count_include_pad"):
            low, high = 0, high + counts[i]
        found.append(np.minimum(start + kernel[i], high) - np.maximum(start, low))
    return b.mul(y, (math.prod(kernel) / np.outer(*found)).astype(np.float32))


@onnx_op("GlobalAveragePool", "GlobalMaxPool")
def global_pool(b: Lowering, n: OnnxNode, x: Operand) -> Results:
    """Largest or mean element of each channel."""
    rows = b.reshape(x, (x.shape[0] * x.shape[1], math.prod(x.shape[2:])))
    y = b.reduced("max" if n.op == "GlobalMaxPool" else "mean", rows)
    return b.reshape(y, (*x.shape[:2], *(1,) * (x.ndim - 2)))


@onnx_op("Resize", "Upsample")
def resize(b: Lowering, n: OnnxNode, x: Operand, *rest: Maybe) -> Results:
    """Interpolation along one axis after the other."""
    given = (*rest, None, None, None) if n.version > 10 else (None, *rest, None, None)
    told = [None if v is None or 0 in v.shape else b.const(v).reshape(-1).tolist() for v in given]
    scales, sizes = n.get("scales", told[1]), told[2]
    before_11 = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    how = {"mode": "nearest", **(before_11 if n.version < 11 else {}), **n.attrs}
    by = how.get("coordinate_transformation_mode")
    if by == "tf_crop_and_resize" or n.get("keep_aspect_ratio_policy", "stretch") != "stretch":
        raise b.fail("tf_crop_and_resize and keep_aspect_ratio_policy")
    axes = [normal_axis(n.op, i, x.ndim) for i in n.get("axes") or range(x.ndim)]
    if len(sizes or scales or []) != len(axes):
        raise b.fail("scales or sizes for another number of axes")
    for i, axis in enumerate(axes):
        m = x.shape[axis]
        size = sizes[i] if sizes else math.floor(m * scales[i])
        scale = size / m if sizes else scales[i]
        limit = 1 << 16 if how["mode"] == "nearest" else 1 << 13
        if not 0 < size < limit or not 0 < m < limit:
            raise b.fail(f"{m} to {size} elements")
        if size != m or scale != 1.0:
            x = _resized(b, n, x, axis, size, scale, how)
    return x


def _resized(
    b: Lowering, n: OnnxNode, x: Operand, axis: int, size: int, scale: float, how: dict[str, Any]
) -> Shaped:
    """Resample along one axis, by indices (nearest) or a matrix, which ONNX's reference computes."""
    m, is_nearest = x.shape[axis], how["mode"] == "nearest"
    places = how.get("coordinate_transformation_mode"), how.get("nearest_mode")
    if is_nearest and size % m == 0 and places == ("asymmetric", "floor"):
        v, outer, _, inner = b.parted(x, axis)
        many = b.expand(b.reshape(v, (outer, m, 1, inner)), (outer, m, size // m, inner))
        return b.reshape(many, (*x.shape[:axis], size, *x.shape[axis + 1 :]))
    node = replace(n, op="Resize", attrs={**how, "axes": [1]}, version=max(n.version, 18))
    rows = np.arange(m, dtype=np.float32)[None] if is_nearest else np.eye(m, dtype=np.float32)
    extent = (None, np.array([size])) if scale * m == size else (np.array([scale], np.float32), None)
    (found,) = fold(node, [rows, None, *extent])
    if is_nearest:
        return b.take(x, found[0].astype(np.int64), axis)
    matrix = Shaped(b.weight(found.T, "f32"), (size, m), FLOAT)
    return b.along(x, [axis], lambda rows: b.matmul(rows, matrix))[0]


# -- recurrent ----------------------------------------------------------------------------------


@onnx_op("LSTM")
def lstm(
    b: Lowering, n: OnnxNode, x: Operand, w: Operand, r: Operand, bias: Maybe = None, lengths: Maybe = None,
    h0: Maybe = None, c0: Maybe = None, peephole: Maybe = None
) -> Results:  # fmt: skip
    """One or both directions, a step at a time; gates in ONNX's order: input, output, forget, cell."""
    options = (lengths is not None, peephole is not None, *map(n.get, ("layout", "clip", "input_forget")))
    if any(options):
        raise b.fail("sequence_lens, peepholes, layout, clip and input_forget")
    (steps, batch, width), hidden, directions = x.shape, n.get("hidden_size", r.shape[-1]), w.shape[0]
    usual = ["Sigmoid", "Tanh", "Tanh"] * directions
    if steps > 1024 or (n.get("activations") or usual) != usual:
        raise b.fail("more than 1024 steps, and other activations")

    def part(v: Operand, d: int) -> Operand:
        return v[d] if isinstance(v, np.ndarray) else b.reshape(b.slice(v, 0, d, d + 1), v.shape[1:])

    results: list[list[Shaped]] = [[], [], []]
    for d in range(directions):
        inputs = b.matmul(b.reshape(x, (steps * batch, width)), b.rows(part(w, d)))
        if bias is not None:
            for i in range(2):  # of the inputs and of the state
                inputs = b.add(inputs, b.slice(part(bias, d), 0, 4 * hidden * i, 4 * hidden * (i + 1)))
        zero: Operand = np.zeros((batch, hidden), np.float32)
        h, c = (zero if v is None else part(v, d) for v in (h0, c0))
        order = range(steps)[:: -1 if d == 1 or n.get("direction") == "reverse" else 1]
        states: dict[int, Operand] = {}
        for step in order:
            state = b.matmul(h, b.rows(part(r, d)))
            gates = b.add(b.slice(inputs, 0, step * batch, (step + 1) * batch), state)
            first, out, forget, cell = (b.slice(gates, 1, i * hidden, (i + 1) * hidden) for i in range(4))
            kept = b.mul(b.unary("sigmoid", forget), c)
            c = b.add(kept, b.mul(b.unary("sigmoid", first), b.unary("tanh", cell)))
            states[step] = h = b.mul(b.unary("sigmoid", out), b.unary("tanh", c))
        rows = b.concat([b.reshape(states[i], (1, batch, hidden)) for i in range(steps)], 0)
        results[0].append(b.reshape(rows, (steps, 1, batch, hidden)))
        for found, last in zip(results[1:], (h, c), strict=True):
            found.append(b.reshape(last, (1, batch, hidden)))
    return b.concat(results[0], 1), b.concat(results[1], 0), b.concat(results[2], 0)
