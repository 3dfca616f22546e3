"""Functions of one element: `f(xp, y, x, *scratch)` fills `y`, which may be the memory of `x`.

Where ggml compares, NaN compares as false: `fmax(x, 0)` is its `x > 0 ? x : 0`, and 0 for NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from ggmlb.backends.common.formulas import (
    GELU_COEF,
    GELU_IS_ZERO,
    GELU_QUICK_COEF,
    NORMAL_AS_SIGMOID,
    SQRT_2_OVER_PI,
)
from ggmlb.backends.cpu.array.rules import FLOAT, operands, rule
from ggmlb.core.enums import Op, UnaryOp
from ggmlb.core.tensor import Tensor

if TYPE_CHECKING:
    from ggmlb.backends.common.workspace import Array
    from ggmlb.backends.cpu.array.casts import Casts
    from ggmlb.backends.cpu.array.lowering import Lowering

Function = Callable[..., Any]


def one_plus_exp(xp: Any, y: Array, x: Array, factor: float) -> None:
    """`1 + exp(factor x)`: with a negative factor, the denominator of a sigmoid."""
    xp.multiply(x, factor, out=y)
    xp.exp(y, out=y)
    xp.add(y, 1, out=y)


def sigmoid(xp: Any, y: Array, x: Array) -> None:
    """`1 / (1 + exp(-x))`."""
    one_plus_exp(xp, y, x, -1)
    xp.reciprocal(y, out=y)


def silu(xp: Any, y: Array, x: Array, tmp: Array) -> None:
    """`x sigmoid(x)`."""
    one_plus_exp(xp, tmp, x, -1)
    xp.divide(x, tmp, out=y)


def gelu_quick(xp: Any, y: Array, x: Array, tmp: Array) -> None:
    """`x sigmoid(1.702 x)`."""
    one_plus_exp(xp, tmp, x, -GELU_QUICK_COEF)
    xp.divide(x, tmp, out=y)


def gelu(xp: Any, y: Array, x: Array, tmp: Array) -> None:
    """`x/2 (1 + tanh z) = x sigmoid(2 z)`, with `z = sqrt(2/pi) x (1 + 0.044715 x^2)`."""
    xp.maximum(x, GELU_IS_ZERO, out=y)
    xp.multiply(y, y, out=tmp)
    xp.multiply(tmp, GELU_COEF, out=tmp)
    xp.add(tmp, 1, out=tmp)
    xp.multiply(tmp, y, out=tmp)
    one_plus_exp(xp, tmp, tmp, -2 * SQRT_2_OVER_PI)
    xp.divide(y, tmp, out=y)


def gelu_erf(xp: Any, y: Array, x: Array, tmp: Array, square: Array) -> None:
    """`x/2 (1 + erf(x / sqrt(2))) = x Phi(x)`; array libraries have no error function."""
    xp.multiply(x, x, out=square)
    xp.multiply(square, NORMAL_AS_SIGMOID[0], out=tmp)
    for coefficient in NORMAL_AS_SIGMOID[1:-1]:
        xp.add(tmp, coefficient, out=tmp)
        xp.multiply(tmp, square, out=tmp)
    xp.add(tmp, NORMAL_AS_SIGMOID[-1], out=tmp)
    xp.multiply(tmp, x, out=tmp)
    one_plus_exp(xp, tmp, tmp, -1)
    xp.divide(x, tmp, out=y)


def relu(xp: Any, y: Array, x: Array) -> None:
    """`max(x, 0)`."""
    xp.fmax(x, 0, out=y)


def sign(xp: Any, y: Array, x: Array) -> None:
    """1 above 0, -1 below."""
    xp.subtract(x > 0, x < 0, out=y, dtype=y.dtype)


def step(xp: Any, y: Array, x: Array) -> None:
    """1 where `x > 0`, else 0."""
    y[...] = x > 0


def elu(xp: Any, y: Array, x: Array, tmp: Array) -> None:
    """`x` above 0, else `exp(x) - 1`."""
    xp.minimum(x, 0, out=tmp)
    xp.expm1(tmp, out=tmp)
    xp.maximum(x, 0, out=y)
    xp.add(y, tmp, out=y)


def hardsigmoid(xp: Any, y: Array, x: Array) -> None:
    """`(x + 3) / 6`, between 0 and 1."""
    xp.add(x, 3, out=y)
    xp.divide(y, 6, out=y)
    xp.fmax(y, 0, out=y)
    xp.minimum(y, 1, out=y)


def hardswish(xp: Any, y: Array, x: Array, tmp: Array) -> None:
    """`x * hardsigmoid(x)`."""
    hardsigmoid(xp, tmp, x)
    xp.multiply(x, tmp, out=y)


def softplus(xp: Any, y: Array, x: Array, tmp: Array) -> None:
    """`log(1 + exp(x))`, without overflow."""
    xp.abs(x, out=tmp)
    xp.negative(tmp, out=tmp)
    xp.exp(tmp, out=tmp)
    xp.log1p(tmp, out=tmp)
    xp.maximum(x, 0, out=y)
    xp.add(y, tmp, out=y)


def round_half_away(xp: Any, y: Array, x: Array, tmp: Array) -> None:
    """The nearest integer; halves go away from zero."""
    xp.trunc(x, out=tmp)
    away = xp.abs(x - tmp) >= 0.5
    xp.add(tmp, xp.copysign(away.astype(x.dtype), x), out=y)


def xielu(
    xp: Any, y: Array, x: Array, tmp: Array, *, alpha_n: float, alpha_p: float, beta: float, eps: float
) -> None:
    """`alpha_p x^2 + beta x` above 0, else `(expm1(min(x, eps)) - x) alpha_n + beta x`."""
    xp.minimum(x, eps, out=tmp)
    xp.expm1(tmp, out=tmp)
    xp.subtract(tmp, x, out=tmp)
    xp.multiply(tmp, alpha_n, out=tmp)
    xp.copyto(tmp, x * x * alpha_p, where=x > 0)
    xp.multiply(x, beta, out=y)
    xp.add(y, tmp, out=y)


def ufunc(name: str) -> Function:
    """Return the library's own function of that name as a `Function`."""

    def apply(xp: Any, y: Array, x: Array) -> None:
        getattr(xp, name)(x, out=y)

    return apply


EXP = 10
"""The work of an exponential, in additions."""

FUNCTIONS: dict[UnaryOp, tuple[Function, int, int]] = {
    UnaryOp.ABS: (ufunc("abs"), 0, 1),
    UnaryOp.SGN: (sign, 0, 2),
    UnaryOp.NEG: (ufunc("negative"), 0, 1),
    UnaryOp.STEP: (step, 0, 1),
    UnaryOp.TANH: (ufunc("tanh"), 0, 2 * EXP),
    UnaryOp.ELU: (elu, 1, 10 * EXP),
    UnaryOp.RELU: (relu, 0, 1),
    UnaryOp.SIGMOID: (sigmoid, 0, EXP),
    UnaryOp.GELU: (gelu, 1, 2 * EXP),
    UnaryOp.GELU_QUICK: (gelu_quick, 1, EXP),
    UnaryOp.SILU: (silu, 1, EXP),
    UnaryOp.HARDSWISH: (hardswish, 1, 3),
    UnaryOp.HARDSIGMOID: (hardsigmoid, 0, 3),
    UnaryOp.EXP: (ufunc("exp"), 0, EXP),
    UnaryOp.EXPM1: (ufunc("expm1"), 0, 10 * EXP),
    UnaryOp.SOFTPLUS: (softplus, 1, 10 * EXP),
    UnaryOp.GELU_ERF: (gelu_erf, 2, 3 * EXP),
    UnaryOp.XIELU: (xielu, 1, 10 * EXP),
    UnaryOp.FLOOR: (ufunc("floor"), 0, 1),
    UnaryOp.CEIL: (ufunc("ceil"), 0, 1),
    UnaryOp.ROUND: (round_half_away, 1, 6),
    UnaryOp.TRUNC: (ufunc("trunc"), 0, 1),
}
"""Each function, how many scratch arrays it wants, and its work per element in additions."""


def _is_known(node: Tensor, casts: Casts) -> str | None:
    op = node.params["op"]
    return None if op in FUNCTIONS else f"it has no function {op!r}"


@rule(Op.UNARY, operands(FLOAT), _is_known)
def unary(lw: Lowering, t: Tensor) -> None:
    """The function that `op` names; its other parameters by name."""
    function, scratch, work = FUNCTIONS[t.params["op"]]
    params = {name: value for name, value in t.params.items() if name != "op"}
    lw.elementwise(partial(function, lw.xp, **params), t, *t.sources, scratch=scratch, work=work)


def _ufunc(lw: Lowering, t: Tensor, name: str, work: int) -> None:
    lw.elementwise(partial(ufunc(name), lw.xp), t, *t.sources, work=work)


for _op, _name, _work in (
    (Op.SQR, "square", 1),
    (Op.SQRT, "sqrt", 2),
    (Op.LOG, "log", EXP),
    (Op.SIN, "sin", EXP),
    (Op.COS, "cos", EXP),
):
    rule(_op, operands(FLOAT))(partial(_ufunc, name=_name, work=_work))


@rule(Op.SCALE, operands(FLOAT))
def scale(lw: Lowering, t: Tensor) -> None:
    """`x * scale + bias`."""
    xp, factor, bias = lw.xp, t.params["scale"], t.params["bias"]

    def kernel(y: Array, x: Array) -> None:
        xp.multiply(x, factor, out=y)
        if bias:
            xp.add(y, bias, out=y)

    lw.elementwise(kernel, t, *t.sources)


@rule(Op.CLAMP, operands(FLOAT))
def clamp(lw: Lowering, t: Tensor) -> None:
    """`x` between `min` and `max`; `max` for NaN."""
    xp, low, high = lw.xp, t.params["min"], t.params["max"]

    def kernel(y: Array, x: Array) -> None:
        xp.fmin(x, high, out=y)
        xp.maximum(y, low, out=y)

    lw.elementwise(kernel, t, *t.sources)


@rule(Op.LEAKY_RELU, operands(FLOAT))
def leaky_relu(lw: Lowering, t: Tensor) -> None:
    """`x` above 0, else `x * negative_slope`."""
    xp, slope = lw.xp, t.params["negative_slope"]

    def kernel(y: Array, x: Array, tmp: Array) -> None:
        xp.fmin(x, 0, out=tmp)
        xp.multiply(tmp, slope, out=tmp)
        xp.fmax(x, 0, out=y)
        xp.add(y, tmp, out=y)

    lw.elementwise(kernel, t, *t.sources, scratch=1)
