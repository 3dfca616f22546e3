"""Functions of one tensor, element by element; the result has type and shape of the operand.

`Op.UNARY` nodes have the param `op`, a `UnaryOp`; XIELU adds `alpha_n, alpha_p, beta, eps`. The functions
that ggml has as ops of their own (SQR, SQRT, LOG, SIN, COS) have none.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from ggmlb.core.enums import Op, UnaryOp, as_enum
from ggmlb.core.ops.base import OpBase, fail_contiguous, method, require_same_shape
from ggmlb.core.tensor import Tensor

Unary = Callable[["UnaryOps", Tensor], Tensor]

_ROWS = "contiguous within its rows"


def _unary(op: UnaryOp, what: str) -> tuple[Unary, Unary]:
    """Make the method of a function and its in-place twin."""
    fn = op.name.lower()
    fn_inplace = f"{fn}_inplace"
    params = {"op": op}

    def new(self: UnaryOps, a: Tensor) -> Tensor:
        if not a.is_contiguous_rows():
            fail_contiguous(fn, "a", a, _ROWS)
        return self._op(Op.UNARY, a.dtype, a.ne, (a,), params)

    def inplace(self: UnaryOps, a: Tensor) -> Tensor:
        if not a.is_contiguous_rows():
            fail_contiguous(fn_inplace, "a", a, _ROWS)
        return self._op_into(Op.UNARY, a, (a,), params)

    return (
        method(new, fn, f"Return {what}, element by element"),
        method(inplace, fn_inplace, f"Return {what}, written into the memory of `a`"),
    )


def _plain(op: Op, what: str) -> tuple[Unary, Unary]:
    """Make the method of a function that is an op of its own, and its in-place twin."""
    fn = op.value.lower()

    def new(self: UnaryOps, a: Tensor) -> Tensor:
        return self._op(op, a.dtype, a.ne, (a,))

    def inplace(self: UnaryOps, a: Tensor) -> Tensor:
        return self._op_into(op, a, (a,))

    return (
        method(new, fn, f"Return {what}, element by element"),
        method(inplace, f"{fn}_inplace", f"Return {what}, written into the memory of `a`"),
    )


class UnaryOps(OpBase):
    """unary and its shortcuts, sqr, sqrt, log, sin, cos, leaky_relu, xielu.

    Raises:
        ShapeError: The rows of `a` are not contiguous, for `unary` and its shortcuts.
    """

    abs, abs_inplace = _unary(UnaryOp.ABS, "`|a|`")
    sgn, sgn_inplace = _unary(UnaryOp.SGN, "the sign of `a`: -1, 0 or 1")
    neg, neg_inplace = _unary(UnaryOp.NEG, "`-a`")
    step, step_inplace = _unary(UnaryOp.STEP, "1 where `a > 0`, else 0")
    tanh, tanh_inplace = _unary(UnaryOp.TANH, "`tanh(a)`")
    elu, elu_inplace = _unary(UnaryOp.ELU, "`a` where positive, else `exp(a) - 1`")
    relu, relu_inplace = _unary(UnaryOp.RELU, "`max(a, 0)`")
    sigmoid, sigmoid_inplace = _unary(UnaryOp.SIGMOID, "`1 / (1 + exp(-a))`")
    gelu, gelu_inplace = _unary(UnaryOp.GELU, "GELU by its tanh approximation")
    gelu_erf, gelu_erf_inplace = _unary(UnaryOp.GELU_ERF, "GELU by the error function")
    gelu_quick, gelu_quick_inplace = _unary(UnaryOp.GELU_QUICK, "`a * sigmoid(1.702 * a)`")
    silu, silu_inplace = _unary(UnaryOp.SILU, "`a * sigmoid(a)`")
    hardswish, _ = _unary(UnaryOp.HARDSWISH, "`a * min(max(a + 3, 0), 6) / 6`")
    hardsigmoid, _ = _unary(UnaryOp.HARDSIGMOID, "`min(max(a + 3, 0), 6) / 6`")
    exp, exp_inplace = _unary(UnaryOp.EXP, "`exp(a)`")
    expm1, expm1_inplace = _unary(UnaryOp.EXPM1, "`exp(a) - 1`")
    softplus, softplus_inplace = _unary(UnaryOp.SOFTPLUS, "`log(1 + exp(a))`")
    floor, floor_inplace = _unary(UnaryOp.FLOOR, "the largest integer not above `a`")
    ceil, ceil_inplace = _unary(UnaryOp.CEIL, "the smallest integer not below `a`")
    round, round_inplace = _unary(UnaryOp.ROUND, "the nearest integer, halves away from zero")
    trunc, trunc_inplace = _unary(UnaryOp.TRUNC, "the integer part of `a`")

    sqr, sqr_inplace = _plain(Op.SQR, "`a * a`")
    sqrt, sqrt_inplace = _plain(Op.SQRT, "the square root of `a`")
    log, log_inplace = _plain(Op.LOG, "the natural logarithm of `a`")
    sin, sin_inplace = _plain(Op.SIN, "`sin(a)`")
    cos, cos_inplace = _plain(Op.COS, "`cos(a)`")
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
        """Return `unary`, written into the memory of `a`; raises as it (ggml_unary_inplace)."""
        if not a.is_contiguous_rows():
            fail_contiguous("unary_inplace", "a", a, _ROWS)
        return self._op_into(Op.UNARY, a, (a,), {"op": as_enum("unary_inplace", UnaryOp, op)})

    def leaky_relu(self, a: Tensor, negative_slope: float, inplace: bool = False) -> Tensor:
        """Return `a` where positive, else `negative_slope * a`; param `negative_slope` (ggml_leaky_relu)."""
        return self._like(inplace, Op.LEAKY_RELU, a, (a,), {"negative_slope": negative_slope})

    def xielu(self, a: Tensor, alpha_n: float, alpha_p: float, beta: float, eps: float) -> Tensor:
        """Return the xIELU activation of `a` (ggml_xielu).

        The node's params hold the constrained slopes: `alpha_n` is `beta + softplus(alpha_n)` and
        `alpha_p` is `softplus(alpha_p)`.
        """
        params = {
            "op": UnaryOp.XIELU,
            "alpha_n": beta + _softplus(alpha_n),
            "alpha_p": _softplus(alpha_p),
            "beta": beta,
            "eps": eps,
        }
        return self._op(Op.UNARY, a.dtype, a.ne, (a,), params)

    def silu_back(self, a: Tensor, b: Tensor) -> Tensor:
        """Return the gradient of `silu` at `b`, times the gradient `a` of its result (ggml_silu_back).

        Raises:
            ShapeError: The shapes differ.
        """
        require_same_shape("silu_back", a, b)
        return self._op(Op.SILU_BACK, a.dtype, a.ne, (a, b))


def _softplus(x: float) -> float:
    return x if x > 20 else math.log1p(math.exp(x))
