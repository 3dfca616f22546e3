"""Elementwise functions of one tensor; the result has its type and shape.

`Op.UNARY` nodes have the param `op`, a `UnaryOp`; XIELU adds `alpha_n, alpha_p, beta, eps`. SQR, SQRT,
LOG, SIN and COS are separate ops in ggml, without params.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from ggmlb.core.enums import Op, UnaryOp, as_enum
from ggmlb.core.ops.base import OpBase, fail_arg, fail_contiguous, method, require_finite, require_same_shape
from ggmlb.core.ops.spec import Backward, OpSpec, flat
from ggmlb.core.sharding import elementwise
from ggmlb.core.tensor import Tensor

if TYPE_CHECKING:
    from ggmlb.core.context import Context

Unary = Callable[["UnaryOps", Tensor], Tensor]

_ROWS = "contiguous within its rows"


def _function(op: UnaryOp | Op, what: str) -> tuple[Unary, Unary]:
    """Create the method of a function and its in-place form."""
    fn = op.name.lower()
    fn_inplace = f"{fn}_inplace"
    kind, params = (op, None) if isinstance(op, Op) else (Op.UNARY, {"op": op})

    def new(self: UnaryOps, a: Tensor) -> Tensor:
        if params is not None and not a.is_contiguous_rows():
            fail_contiguous(fn, "a", a, _ROWS)
        return self._op(kind, a.dtype, a.ne, (a,), params)

    def inplace(self: UnaryOps, a: Tensor) -> Tensor:
        if params is not None and not a.is_contiguous_rows():
            fail_contiguous(fn_inplace, "a", a, _ROWS)
        return self._op_into(kind, a, (a,), params)

    return (
        method(new, fn, f"Return {what}, element by element"),
        method(inplace, fn_inplace, f"Return {what}, written into the memory of `a`"),
    )


class UnaryOps(OpBase):
    """unary and its shortcuts, sqr, sqrt, log, sin, cos, leaky_relu, xielu.

    Raises:
        ShapeError: The rows of `a` are not contiguous, for `unary` and its shortcuts.
    """

    abs, abs_inplace = _function(UnaryOp.ABS, "`|a|`")
    sgn, sgn_inplace = _function(UnaryOp.SGN, "the sign of `a`: -1, 0 or 1")
    neg, neg_inplace = _function(UnaryOp.NEG, "`-a`")
    step, step_inplace = _function(UnaryOp.STEP, "1 where `a > 0`, else 0")
    tanh, tanh_inplace = _function(UnaryOp.TANH, "`tanh(a)`")
    elu, elu_inplace = _function(UnaryOp.ELU, "`a` where positive, else `exp(a) - 1`")
    relu, relu_inplace = _function(UnaryOp.RELU, "`max(a, 0)`")
    sigmoid, sigmoid_inplace = _function(UnaryOp.SIGMOID, "`1 / (1 + exp(-a))`")
    gelu, gelu_inplace = _function(UnaryOp.GELU, "GELU by its tanh approximation")
    gelu_erf, gelu_erf_inplace = _function(UnaryOp.GELU_ERF, "GELU by the error function")
    gelu_quick, gelu_quick_inplace = _function(UnaryOp.GELU_QUICK, "`a * sigmoid(1.702 * a)`")
    silu, silu_inplace = _function(UnaryOp.SILU, "`a * sigmoid(a)`")
    hardswish, _ = _function(UnaryOp.HARDSWISH, "`a * min(max(a + 3, 0), 6) / 6`")
    hardsigmoid, _ = _function(UnaryOp.HARDSIGMOID, "`min(max(a + 3, 0), 6) / 6`")
    exp, exp_inplace = _function(UnaryOp.EXP, "`exp(a)`")
    expm1, expm1_inplace = _function(UnaryOp.EXPM1, "`exp(a) - 1`")
    softplus, softplus_inplace = _function(UnaryOp.SOFTPLUS, "`log(1 + exp(a))`")
    floor, floor_inplace = _function(UnaryOp.FLOOR, "the largest integer not above `a`")
    ceil, ceil_inplace = _function(UnaryOp.CEIL, "the smallest integer not below `a`")
    round, round_inplace = _function(UnaryOp.ROUND, "the nearest integer, halves away from zero")
    trunc, trunc_inplace = _function(UnaryOp.TRUNC, "the integer part of `a`")

    sqr, sqr_inplace = _function(Op.SQR, "`a * a`")
    sqrt, sqrt_inplace = _function(Op.SQRT, "the square root of `a`")
    log, log_inplace = _function(Op.LOG, "the natural logarithm of `a`")
    sin, sin_inplace = _function(Op.SIN, "`sin(a)`")
    cos, cos_inplace = _function(Op.COS, "`cos(a)`")
    del _

    def unary(self, a: Tensor, op: UnaryOp | int | str) -> Tensor:
        """Return the function `op` of `a` (ggml_unary).

        Raises:
            ShapeError: The rows of `a` are not contiguous.
            ArgumentError: There is no such function.
        """
        if not a.is_contiguous_rows():
            fail_contiguous("unary", "a", a, _ROWS)
        return self._op(Op.UNARY, a.dtype, a.ne, (a,), {"op": as_enum("unary", UnaryOp, op)})

    def unary_inplace(self, a: Tensor, op: UnaryOp | int | str) -> Tensor:
        """Return `unary`, written into the memory of `a`; same errors (ggml_unary_inplace)."""
        if not a.is_contiguous_rows():
            fail_contiguous("unary_inplace", "a", a, _ROWS)
        return self._op_into(Op.UNARY, a, (a,), {"op": as_enum("unary_inplace", UnaryOp, op)})

    def leaky_relu(self, a: Tensor, negative_slope: float, inplace: bool = False) -> Tensor:
        """Return `a` where positive, else `negative_slope * a` (ggml_leaky_relu).

        The node's param is `negative_slope`; with `inplace`, it writes into the memory of `a`.
        """
        require_finite("leaky_relu", negative_slope=negative_slope)
        return self._like(inplace, Op.LEAKY_RELU, a, (a,), {"negative_slope": negative_slope})

    def xielu(self, a: Tensor, alpha_n: float, alpha_p: float, beta: float, eps: float) -> Tensor:
        """Return the xIELU activation of `a` (ggml_xielu).

        The node's params hold the constrained slopes: `alpha_n` is `beta + softplus(alpha_n)` and
        `alpha_p` is `softplus(alpha_p)`.
        """
        require_finite("xielu", alpha_n=alpha_n, alpha_p=alpha_p, beta=beta, eps=eps)
        params = {
            "op": UnaryOp.XIELU,
            "alpha_n": beta + _softplus(alpha_n),
            "alpha_p": _softplus(alpha_p),
            "beta": beta,
            "eps": eps,
        }
        return self._op(Op.UNARY, a.dtype, a.ne, (a,), params)

    def silu_back(self, a: Tensor, b: Tensor) -> Tensor:
        """Return the gradient of `b`, given the gradient `a` of `silu(b)` (ggml_silu_back).

        Raises:
            ShapeError: The shapes differ.
        """
        require_same_shape("silu_back", a, b)
        return self._op(Op.SILU_BACK, a.dtype, a.ne, (a, b))


def _softplus(x: float) -> float:
    return x if x > 20 else math.log1p(math.exp(x))


# -- gradients ---


Derivative = Callable[["Context", Tensor, Tensor, Tensor], "Tensor | None"]
"""Returns the gradient of the operand, given it, the result and its gradient; `None` if it is 0."""


def _gate(c: Context, x: Tensor, g: Tensor, p: Tensor, slope: Tensor) -> Tensor:
    """Gradient of `x * p`, where `p` is a sigmoid whose argument changes by `slope` with `x`."""
    return c.mul(g, c.mul(p, c.scale_bias(c.mul(c.mul(x, slope), c.scale_bias(p, -1, 1)), 1, 1)))


def _gelu(c: Context, x: Tensor, y: Tensor, g: Tensor) -> Tensor:
    s, cubic = math.sqrt(8 / math.pi), 0.044715
    square = c.sqr(x)
    p = c.sigmoid(c.mul(x, c.scale_bias(square, s * cubic, s)))
    return _gate(c, x, g, p, c.scale_bias(square, 3 * s * cubic, s))


def _gelu_quick(c: Context, x: Tensor, y: Tensor, g: Tensor) -> Tensor:
    p = c.sigmoid(c.scale(x, 1.702))
    return c.mul(g, c.add(p, c.mul(c.scale(y, 1.702), c.scale_bias(p, -1, 1))))


def _gelu_erf(c: Context, x: Tensor, y: Tensor, g: Tensor) -> Tensor:
    zero = c.scale_bias(c.abs(c.sgn(x)), -1, 1)  # 1 where x is 0; the distribution there is 1/2
    distribution = c.div(c.add(y, c.scale(zero, 0.5)), c.add(x, zero))
    density = c.scale(c.exp(c.scale(c.sqr(x), -0.5)), 1 / math.sqrt(2 * math.pi))
    return c.mul(g, c.add(distribution, c.mul(x, density)))


def _hardsigmoid(c: Context, x: Tensor, y: Tensor, g: Tensor) -> Tensor:
    return c.scale(c.mul(g, c.step(c.scale_bias(c.abs(x), -1, 3))), 1 / 6)


def _hardswish(c: Context, x: Tensor, y: Tensor, g: Tensor) -> Tensor:
    return c.add(c.mul(g, c.hardsigmoid(x)), c.mul(x, _hardsigmoid(c, x, y, g)))


DERIVATIVES: dict[UnaryOp, Derivative] = {
    UnaryOp.ABS: lambda c, x, y, g: c.mul(g, c.sgn(x)),
    UnaryOp.SGN: lambda c, x, y, g: None,
    UnaryOp.NEG: lambda c, x, y, g: c.neg(g),
    UnaryOp.STEP: lambda c, x, y, g: None,
    UnaryOp.TANH: lambda c, x, y, g: c.mul(g, c.scale_bias(c.sqr(y), -1, 1)),
    UnaryOp.ELU: lambda c, x, y, g: c.mul(g, c.scale_bias(c.clamp(y, -1, 0), 1, 1)),
    UnaryOp.RELU: lambda c, x, y, g: c.mul(g, c.step(x)),
    UnaryOp.SIGMOID: lambda c, x, y, g: c.mul(g, c.mul(y, c.scale_bias(y, -1, 1))),
    UnaryOp.GELU: _gelu,
    UnaryOp.GELU_ERF: _gelu_erf,
    UnaryOp.GELU_QUICK: _gelu_quick,
    UnaryOp.SILU: lambda c, x, y, g: c.silu_back(g, x),
    UnaryOp.HARDSWISH: _hardswish,
    UnaryOp.HARDSIGMOID: _hardsigmoid,
    UnaryOp.EXP: lambda c, x, y, g: c.mul(g, y),
    UnaryOp.EXPM1: lambda c, x, y, g: c.mul(g, c.exp(x)),
    UnaryOp.SOFTPLUS: lambda c, x, y, g: c.mul(g, c.sigmoid(x)),
    UnaryOp.FLOOR: lambda c, x, y, g: None,
    UnaryOp.CEIL: lambda c, x, y, g: None,
    UnaryOp.ROUND: lambda c, x, y, g: None,
    UnaryOp.TRUNC: lambda c, x, y, g: None,
}
"""Derivative of each function except XIELU."""


def _back_unary(c: Context, node: Tensor, grad: Tensor) -> Tensor | None:
    op = node.params["op"]
    if op not in DERIVATIVES:
        fail_arg("unary", f"{op.name} has no gradient")
    return DERIVATIVES[op](c, flat(c, node.operand(0)), node, grad)


def _back_leaky_relu(c: Context, node: Tensor, grad: Tensor) -> Tensor:
    slope = node.params["negative_slope"]
    return c.mul(grad, c.scale_bias(c.step(flat(c, node.operand(0))), 1 - slope, slope))


_BACK: dict[Op, Backward] = {
    Op.SQR: lambda c, t, g: c.scale(c.mul(g, t.operand(0)), 2),
    Op.SQRT: lambda c, t, g: c.scale(c.div(g, t), 0.5),
    Op.LOG: lambda c, t, g: c.div(g, t.operand(0)),
    Op.SIN: lambda c, t, g: c.mul(g, c.cos(t.operand(0))),
    Op.COS: lambda c, t, g: c.neg(c.mul(g, c.sin(t.operand(0)))),
}

_INPLACE = (Op.SQR, Op.SQRT, Op.LOG)


SPECS = (
    *(
        OpSpec(op, backward={0: rule}, inplace=int(op in _INPLACE), shard=elementwise)
        for op, rule in _BACK.items()
    ),
    OpSpec(Op.SILU_BACK, inplace=2, shard=elementwise),
    OpSpec(Op.LEAKY_RELU, backward={0: _back_leaky_relu}, params=("negative_slope",), shard=elementwise),
    OpSpec(Op.UNARY, backward={0: _back_unary}, params=("op",), inplace=1, shard=elementwise),
)
