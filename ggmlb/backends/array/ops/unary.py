"""Functions of one element: `f(xp, y, x, *scratch)` fills `y`, which may be the memory of `x`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from ggmlb.backends.array.rules import FLOAT, operands, rule, sources
from ggmlb.enums import Op, UnaryOp

if TYPE_CHECKING:
    from ggmlb.backends.array.casts import Casts
    from ggmlb.backends.array.lowering import Lowering
    from ggmlb.backends.array.workspace import Array
    from ggmlb.tensor import Tensor

Function = Callable[..., Any]

SQRT_2_OVER_PI = 0.79788456080286535588
GELU_COEF = 0.044715
GELU_QUICK_COEF = 1.702

# atanh(erf(x / sqrt(2))) / x as a polynomial in x^2, highest power first: a minimax fit that leaves an
# error of 7e-8 in x/2 * (1 + tanh(..)). It grows without bound, so that the tanh saturates.
ATANH_ERF = (
    1.805623655554211e-09,
    -1.3344673411343746e-07,
    3.9691147366337246e-06,
    -5.524019716630813e-05,
    -3.3129864849316525e-05,
    0.03633428334553507,
    0.7978842161663176,
)


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
    """`x / (1 + exp(-x))`."""
    one_plus_exp(xp, tmp, x, -1)
    xp.divide(x, tmp, out=y)


def gelu_quick(xp: Any, y: Array, x: Array, tmp: Array) -> None:
    """`x / (1 + exp(-1.702 x))`."""
    one_plus_exp(xp, tmp, x, -GELU_QUICK_COEF)
    xp.divide(x, tmp, out=y)


def half_x_plus_x_tanh(xp: Any, y: Array, x: Array, t: Array) -> None:
    """`x/2 * (1 + tanh(t))`; destroys `t`."""
    xp.tanh(t, out=t)
    xp.add(t, 1, out=t)
    xp.multiply(t, x, out=t)
    xp.multiply(t, 0.5, out=y)


def gelu(xp: Any, y: Array, x: Array, tmp: Array) -> None:
    """`x/2 * (1 + tanh(sqrt(2/pi) * x * (1 + 0.044715 x^2)))`."""
    xp.multiply(x, x, out=tmp)
    xp.multiply(tmp, SQRT_2_OVER_PI * GELU_COEF, out=tmp)
    xp.add(tmp, SQRT_2_OVER_PI, out=tmp)
    xp.multiply(tmp, x, out=tmp)
    half_x_plus_x_tanh(xp, y, x, tmp)


def gelu_erf(xp: Any, y: Array, x: Array, tmp: Array, square: Array) -> None:
    """`x/2 * (1 + erf(x / sqrt(2)))`; array libraries have `tanh`, but no `erf`."""
    xp.multiply(x, x, out=square)
    xp.multiply(square, ATANH_ERF[0], out=tmp)
    for coefficient in ATANH_ERF[1:-1]:
        xp.add(tmp, coefficient, out=tmp)
        xp.multiply(tmp, square, out=tmp)
    xp.add(tmp, ATANH_ERF[-1], out=tmp)
    xp.multiply(tmp, x, out=tmp)
    half_x_plus_x_tanh(xp, y, x, tmp)


def relu(xp: Any, y: Array, x: Array) -> None:
    """`max(x, 0)`."""
    xp.maximum(x, 0, out=y)


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
    xp.clip(y, 0, 1, out=y)


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


FUNCTIONS: dict[UnaryOp, tuple[Function, int]] = {
    UnaryOp.ABS: (ufunc("abs"), 0),
    UnaryOp.SGN: (ufunc("sign"), 0),
    UnaryOp.NEG: (ufunc("negative"), 0),
    UnaryOp.STEP: (step, 0),
    UnaryOp.TANH: (ufunc("tanh"), 0),
    UnaryOp.ELU: (elu, 1),
    UnaryOp.RELU: (relu, 0),
    UnaryOp.SIGMOID: (sigmoid, 0),
    UnaryOp.GELU: (gelu, 1),
    UnaryOp.GELU_QUICK: (gelu_quick, 1),
    UnaryOp.SILU: (silu, 1),
    UnaryOp.HARDSWISH: (hardswish, 1),
    UnaryOp.HARDSIGMOID: (hardsigmoid, 0),
    UnaryOp.EXP: (ufunc("exp"), 0),
    UnaryOp.EXPM1: (ufunc("expm1"), 0),
    UnaryOp.SOFTPLUS: (softplus, 1),
    UnaryOp.GELU_ERF: (gelu_erf, 2),
    UnaryOp.XIELU: (xielu, 1),
    UnaryOp.FLOOR: (ufunc("floor"), 0),
    UnaryOp.CEIL: (ufunc("ceil"), 0),
    UnaryOp.ROUND: (round_half_away, 1),
    UnaryOp.TRUNC: (ufunc("trunc"), 0),
}
"""Each function, and how many scratch arrays it wants."""


def _is_known(node: Tensor, casts: Casts) -> str | None:
    op = node.params["op"]
    return None if op in FUNCTIONS else f"it has no function {op!r}"


@rule(Op.UNARY, operands(FLOAT), _is_known)
def unary(lw: Lowering, t: Tensor) -> None:
    """The function that `op` names; its other parameters by name."""
    function, n_scratch = FUNCTIONS[t.params["op"]]
    params = {name: value for name, value in t.params.items() if name != "op"}
    _apply(lw, t, function, n_scratch, **params)


def _apply(lw: Lowering, t: Tensor, function: Function, n_scratch: int = 0, **params: float) -> None:
    lw.elementwise(partial(function, lw.xp, **params), t, *sources(t), scratch=n_scratch)


for _op, _name in ((Op.SQR, "square"), (Op.SQRT, "sqrt"), (Op.LOG, "log"), (Op.SIN, "sin"), (Op.COS, "cos")):
    rule(_op, operands(FLOAT))(partial(_apply, function=ufunc(_name)))


@rule(Op.SCALE, operands(FLOAT))
def scale(lw: Lowering, t: Tensor) -> None:
    """`x * scale + bias`."""
    xp, factor, bias = lw.xp, t.params["scale"], t.params["bias"]

    def kernel(y: Array, x: Array) -> None:
        xp.multiply(x, factor, out=y)
        if bias:
            xp.add(y, bias, out=y)

    lw.elementwise(kernel, t, *sources(t))


@rule(Op.CLAMP, operands(FLOAT))
def clamp(lw: Lowering, t: Tensor) -> None:
    """`x` between `min` and `max`."""
    low, high = t.params["min"], t.params["max"]
    lw.elementwise(lambda y, x: lw.xp.clip(x, low, high, out=y), t, *sources(t))


@rule(Op.LEAKY_RELU, operands(FLOAT))
def leaky_relu(lw: Lowering, t: Tensor) -> None:
    """`x` above 0, else `x * negative_slope`."""
    xp, slope = lw.xp, t.params["negative_slope"]

    def kernel(y: Array, x: Array, tmp: Array) -> None:
        xp.minimum(x, 0, out=tmp)
        xp.multiply(tmp, slope, out=tmp)
        xp.maximum(x, 0, out=y)
        xp.add(y, tmp, out=y)

    lw.elementwise(kernel, t, *sources(t), scratch=1)


@rule(Op.SILU_BACK, operands(FLOAT, FLOAT))
def silu_back(lw: Lowering, t: Tensor) -> None:
    """`dy s (1 + x (1 - s))` with `s = sigmoid(x)`, from the gradient `dy` and the operand `x`."""
    xp = lw.xp

    def kernel(dx: Array, dy: Array, x: Array, s: Array, tmp: Array) -> None:
        sigmoid(xp, s, x)
        xp.subtract(1, s, out=tmp)
        xp.multiply(tmp, x, out=tmp)
        xp.add(tmp, 1, out=tmp)
        xp.multiply(tmp, s, out=tmp)
        xp.multiply(tmp, dy, out=dx)

    lw.elementwise(kernel, t, *sources(t), scratch=2)
