"""Element-wise functions and arithmetic, and gated linear units.

A kernel `f(y, x, *scratch)` fills `y`, which may alias `x`. Where ggml compares, NaN compares as
false: `fmax(x, 0)` is its `x > 0 ? x : 0`, and 0 for NaN.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from ggmlb.backends.common.formulas import (
    GELU_COEF,
    GELU_IS_ZERO,
    GELU_QUICK_COEF,
    NORMAL_AS_SIGMOID,
    SQRT_2_OVER_PI,
)
from ggmlb.backends.common.rules import FLOATS, operands
from ggmlb.backends.common.workspace import Array
from ggmlb.backends.cpu.lowering import RULES, STORED, VALUES, Kernel, NodeLowering
from ggmlb.core.enums import GluOp, Op, UnaryOp
from ggmlb.core.tensor import Tensor


def one_plus_exp(y: Array, x: Array, factor: float) -> None:
    """`1 + exp(factor x)`: with a negative factor, the denominator of a sigmoid."""
    np.multiply(x, factor, out=y)
    np.exp(y, out=y)
    np.add(y, 1, out=y)


def sigmoid(y: Array, x: Array) -> None:
    """`1 / (1 + exp(-x))`."""
    one_plus_exp(y, x, -1)
    np.reciprocal(y, out=y)


def silu(y: Array, x: Array, tmp: Array) -> None:
    """`x sigmoid(x)`."""
    one_plus_exp(tmp, x, -1)
    np.divide(x, tmp, out=y)


def gelu_quick(y: Array, x: Array, tmp: Array) -> None:
    """`x sigmoid(1.702 x)`."""
    one_plus_exp(tmp, x, -GELU_QUICK_COEF)
    np.divide(x, tmp, out=y)


def gelu(y: Array, x: Array, tmp: Array) -> None:
    """`x/2 (1 + tanh z) = x sigmoid(2 z)`, with `z = sqrt(2/pi) x (1 + 0.044715 x^2)`."""
    np.maximum(x, GELU_IS_ZERO, out=y)
    np.multiply(y, y, out=tmp)
    np.multiply(tmp, GELU_COEF, out=tmp)
    np.add(tmp, 1, out=tmp)
    np.multiply(tmp, y, out=tmp)
    one_plus_exp(tmp, tmp, -2 * SQRT_2_OVER_PI)
    np.divide(y, tmp, out=y)


def gelu_erf(y: Array, x: Array, tmp: Array, square: Array) -> None:
    """`x/2 (1 + erf(x / sqrt(2))) = x Phi(x)`; NumPy has no error function."""
    np.multiply(x, x, out=square)
    np.multiply(square, NORMAL_AS_SIGMOID[0], out=tmp)
    for coefficient in NORMAL_AS_SIGMOID[1:-1]:
        np.add(tmp, coefficient, out=tmp)
        np.multiply(tmp, square, out=tmp)
    np.add(tmp, NORMAL_AS_SIGMOID[-1], out=tmp)
    np.multiply(tmp, x, out=tmp)
    one_plus_exp(tmp, tmp, -1)
    np.divide(x, tmp, out=y)


def relu(y: Array, x: Array) -> None:
    """`max(x, 0)`."""
    np.fmax(x, 0, out=y)


def sign(y: Array, x: Array) -> None:
    """1 above 0, -1 below, 0 for 0 and NaN."""
    np.subtract(x > 0, x < 0, out=y, dtype=y.dtype)


def step(y: Array, x: Array) -> None:
    """1 where `x > 0`, else 0."""
    y[...] = x > 0


def elu(y: Array, x: Array, tmp: Array) -> None:
    """`x` above 0, else `exp(x) - 1`."""
    np.minimum(x, 0, out=tmp)
    np.expm1(tmp, out=tmp)
    np.maximum(x, 0, out=y)
    np.add(y, tmp, out=y)


def hardsigmoid(y: Array, x: Array) -> None:
    """`(x + 3) / 6`, between 0 and 1."""
    np.add(x, 3, out=y)
    np.divide(y, 6, out=y)
    np.fmax(y, 0, out=y)
    np.minimum(y, 1, out=y)


def hardswish(y: Array, x: Array, tmp: Array) -> None:
    """`x * hardsigmoid(x)`."""
    hardsigmoid(tmp, x)
    np.multiply(x, tmp, out=y)


def softplus(y: Array, x: Array, tmp: Array) -> None:
    """`log(1 + exp(x))`, without overflow."""
    np.abs(x, out=tmp)
    np.negative(tmp, out=tmp)
    np.exp(tmp, out=tmp)
    np.log1p(tmp, out=tmp)
    np.maximum(x, 0, out=y)
    np.add(y, tmp, out=y)


def round_half_away(y: Array, x: Array, tmp: Array) -> None:
    """The nearest integer; halves go away from zero."""
    np.trunc(x, out=tmp)
    away = np.abs(x - tmp) >= 0.5
    np.add(tmp, np.copysign(away.astype(x.dtype), x), out=y)


def xielu(y: Array, x: Array, tmp: Array, *, alpha_n: float, alpha_p: float, beta: float, eps: float) -> None:
    """`alpha_p x^2 + beta x` above 0, else `(expm1(min(x, eps)) - x) alpha_n + beta x`."""
    np.minimum(x, eps, out=tmp)
    np.expm1(tmp, out=tmp)
    np.subtract(tmp, x, out=tmp)
    np.multiply(tmp, alpha_n, out=tmp)
    np.copyto(tmp, x * x * alpha_p, where=x > 0)
    np.multiply(x, beta, out=y)
    np.add(y, tmp, out=y)


def ufunc(function: np.ufunc) -> Kernel:
    """Return the kernel `kernel(y, x)` that applies a NumPy ufunc of one argument."""

    def apply(y: Array, x: Array) -> None:
        function(x, out=y)

    return apply


EXP = 10
"""Cost of an exponential, in additions."""

FUNCTIONS: dict[Op | UnaryOp, tuple[Kernel, int, int]] = {
    UnaryOp.ABS: (ufunc(np.abs), 0, 1),
    UnaryOp.SGN: (sign, 0, 2),
    UnaryOp.NEG: (ufunc(np.negative), 0, 1),
    UnaryOp.STEP: (step, 0, 1),
    UnaryOp.TANH: (ufunc(np.tanh), 0, 2 * EXP),
    UnaryOp.ELU: (elu, 1, 10 * EXP),
    UnaryOp.RELU: (relu, 0, 1),
    UnaryOp.SIGMOID: (sigmoid, 0, EXP),
    UnaryOp.GELU: (gelu, 1, 2 * EXP),
    UnaryOp.GELU_QUICK: (gelu_quick, 1, EXP),
    UnaryOp.SILU: (silu, 1, EXP),
    UnaryOp.HARDSWISH: (hardswish, 1, 3),
    UnaryOp.HARDSIGMOID: (hardsigmoid, 0, 3),
    UnaryOp.EXP: (ufunc(np.exp), 0, EXP),
    UnaryOp.EXPM1: (ufunc(np.expm1), 0, 10 * EXP),
    UnaryOp.SOFTPLUS: (softplus, 1, 10 * EXP),
    UnaryOp.GELU_ERF: (gelu_erf, 2, 3 * EXP),
    UnaryOp.XIELU: (xielu, 1, 10 * EXP),
    UnaryOp.FLOOR: (ufunc(np.floor), 0, 1),
    UnaryOp.CEIL: (ufunc(np.ceil), 0, 1),
    UnaryOp.ROUND: (round_half_away, 1, 6),
    UnaryOp.TRUNC: (ufunc(np.trunc), 0, 1),
    Op.SQR: (ufunc(np.square), 0, 1),
    Op.SQRT: (ufunc(np.sqrt), 0, 2),
    Op.LOG: (ufunc(np.log), 0, EXP),
    Op.SIN: (ufunc(np.sin), 0, EXP),
    Op.COS: (ufunc(np.cos), 0, EXP),
}
"""Kernel, number of scratch arrays, and cost per element in additions."""


def _is_known(node: Tensor) -> str | None:
    op = node.params.get("op", node.op)
    return None if op in FUNCTIONS else f"no kernel for function {op!r}"


@RULES.rule((Op.UNARY, Op.SQR, Op.SQRT, Op.LOG, Op.SIN, Op.COS), operands(FLOATS), _is_known)
def unary(lw: NodeLowering, t: Tensor) -> None:
    """The element-wise function of the op, or of a UNARY node's parameter `op`."""
    function, scratch, work = FUNCTIONS[t.params.get("op", t.op)]
    params = dict(t.params)
    params.pop("op", None)
    kernel = partial(function, **params) if params else function
    lw.elementwise(kernel, t, *t.sources, scratch=scratch, work=work)


@RULES.rule(Op.SCALE, operands(FLOATS))
def scale(lw: NodeLowering, t: Tensor) -> None:
    """`x * scale + bias`."""
    factor, bias = t.params["scale"], t.params["bias"]

    def kernel(y: Array, x: Array) -> None:
        np.multiply(x, factor, out=y)
        if bias:
            np.add(y, bias, out=y)

    lw.elementwise(kernel, t, *t.sources)


@RULES.rule(Op.CLAMP, operands(FLOATS))
def clamp(lw: NodeLowering, t: Tensor) -> None:
    """`x` between `min` and `max`; `max` for NaN."""
    low, high = t.params["min"], t.params["max"]

    def kernel(y: Array, x: Array) -> None:
        np.fmin(x, high, out=y)
        np.maximum(y, low, out=y)

    lw.elementwise(kernel, t, *t.sources)


@RULES.rule(Op.LEAKY_RELU, operands(FLOATS))
def leaky_relu(lw: NodeLowering, t: Tensor) -> None:
    """`x` above 0, else `x * negative_slope`."""
    slope = t.params["negative_slope"]

    def kernel(y: Array, x: Array, tmp: Array) -> None:
        np.fmin(x, 0, out=tmp)
        np.multiply(tmp, slope, out=tmp)
        np.fmax(x, 0, out=y)
        np.add(y, tmp, out=y)

    lw.elementwise(kernel, t, *t.sources, scratch=1)


@RULES.rule(Op.SILU_BACK, operands(FLOATS, FLOATS))
def silu_back(lw: NodeLowering, t: Tensor) -> None:
    """`dy s (1 + x (1 - s))`, with `s = 1 / (1 + exp(-x))`."""

    def kernel(dx: Array, dy: Array, x: Array, s: Array, tmp: Array) -> None:
        np.negative(x, out=s)
        np.exp(s, out=s)
        np.add(s, 1, out=s)
        np.reciprocal(s, out=s)
        np.subtract(1, s, out=tmp)
        np.multiply(tmp, x, out=tmp)
        np.add(tmp, 1, out=tmp)
        np.multiply(tmp, s, out=tmp)
        np.multiply(tmp, dy, out=dx)

    lw.elementwise(kernel, t, *t.sources, scratch=2, work=2 * EXP)


def _whole_rows(node: Tensor) -> str | None:
    a, b = node.sources
    if b.ne[0] == node.ne[0] or not (a.dtype.is_quantized or b.dtype.is_quantized or node.dtype.is_quantized):
        return None
    return "src1 repeats along rows, which is impossible with quantised operands"


_UFUNCS = {Op.ADD: np.add, Op.ADD1: np.add, Op.SUB: np.subtract, Op.MUL: np.multiply, Op.DIV: np.divide}


@RULES.rule(_UFUNCS, operands(VALUES, VALUES, out=STORED & VALUES), _whole_rows)
def binary(lw: NodeLowering, t: Tensor) -> None:
    """`a + b`, `a - b`, `a b` or `a / b`, by the op."""
    fn = _UFUNCS[t.op]

    def kernel(y: Array, a: Array, b: Array) -> None:
        fn(a, b, out=y)

    lw.elementwise(kernel, t, *t.sources)


ACTIVATIONS: dict[GluOp, tuple[Kernel, int, int]] = {
    GluOp.GEGLU: (gelu, 1, 2 * EXP),
    GluOp.SWIGLU: (silu, 1, EXP),
    GluOp.GEGLU_ERF: (gelu_erf, 2, 3 * EXP),
    GluOp.GEGLU_QUICK: (gelu_quick, 1, EXP),
}
"""Kernel of the gate, number of scratch arrays, and cost per element in additions."""


def _has_activation(node: Tensor) -> str | None:
    op = node.params["op"]
    return (
        None
        if op in ACTIVATIONS or op in (GluOp.REGLU, GluOp.SWIGLU_OAI, GluOp.SWIGLU_CLAMP)
        else f"no kernel for function {op!r}"
    )


@RULES.rule(Op.GLU, operands(FLOATS, FLOATS), _has_activation)
def glu(lw: NodeLowering, t: Tensor) -> None:
    """`act(gate) * up`; gate and up are two tensors, or the halves of each row of one."""
    a = t.operand(0)
    b = t.optional(1)
    gate = lw.view(a)
    if b is not None:
        up = lw.view(b)
    else:
        n = t.ne[0]
        gate, up = gate.cut(3, 0, n), gate.cut(3, n, n)
        if t.params["swapped"]:
            gate, up = up, gate
    if t.params["op"] == GluOp.SWIGLU_OAI:
        kernel = partial(swiglu_oai, alpha=t.params["alpha"], limit=t.params["limit"])
        lw.tiled(kernel, lw.view(t), gate, up, scratch=2, work=2 * EXP)
        return
    if t.params["op"] == GluOp.SWIGLU_CLAMP:
        clamped = partial(swiglu_clamp, limit=t.params["limit"])
        lw.tiled(clamped, lw.view(t), gate, up, scratch=2, work=2 * EXP)
        return
    if t.params["op"] == GluOp.REGLU:
        lw.tiled(reglu, lw.view(t), gate, up)
        return
    activation, n_scratch, work = ACTIVATIONS[t.params["op"]]

    def kernel_of(y: Array, gate: Array, up: Array, tmp: Array, *scratch: Array) -> None:
        activation(tmp, gate, *scratch)
        np.multiply(tmp, up, out=y)

    lw.tiled(kernel_of, lw.view(t), gate, up, scratch=1 + n_scratch, work=work)


def reglu(y: Array, gate: Array, up: Array) -> None:
    """`gate * up` where the gate is above 0, else 0 (also if `up` is infinite or NaN)."""
    is_open = gate > 0
    np.multiply(gate, up, out=y)
    np.copyto(y, 0, where=~is_open)


def swiglu_clamp(y: Array, gate: Array, up: Array, tmp: Array, g: Array, *, limit: float) -> None:
    """`silu(min(gate, limit)) * clip(up, -limit, limit)`."""
    np.minimum(gate, limit, out=g)
    one_plus_exp(tmp, g, -1.0)
    np.divide(g, tmp, out=g)
    np.clip(up, -limit, limit, out=tmp)
    np.multiply(tmp, g, out=y)


def swiglu_oai(y: Array, gate: Array, up: Array, tmp: Array, g: Array, *, alpha: float, limit: float) -> None:
    """`g * sigmoid(alpha g) * (clip(up, -limit, limit) + 1)` with `g = min(gate, limit)`."""
    np.minimum(gate, limit, out=g)
    one_plus_exp(tmp, g, -alpha)
    np.divide(g, tmp, out=g)
    np.clip(up, -limit, limit, out=tmp)
    np.add(tmp, 1, out=tmp)
    np.multiply(tmp, g, out=y)
