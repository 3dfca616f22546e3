"""Element-wise functions of one and of two operands, and gated linear units.

Comparisons are ggml's: false for NaN, so that `relu` and `clamp` of NaN are numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ggmlb.backends.common.formulas import (
    GELU_COEF,
    GELU_IS_ZERO,
    GELU_QUICK_COEF,
    NORMAL_AS_SIGMOID,
    SQRT_2_OVER_PI,
)
from ggmlb.backends.llvm.codegen.simd import (
    SIZES,
    exp,
    expm1,
    load_float,
    load_floats,
    log,
    over_one_plus_exp,
    polynomial,
    sigmoid,
    sin_cos,
    store_floats,
    tanh,
)
from ggmlb.backends.llvm.codegen.value import Value
from ggmlb.backends.llvm.kernels.row_loop import each_row, each_vector

if TYPE_CHECKING:
    from ggmlb.backends.llvm.codegen.emit import Emitter

    Function = Callable[..., Value]
    """`f(kernel, x, *params)`"""


def _sign(k: Emitter, x: Value) -> Value:
    return k.select(x > 0.0, k.const(x.type, 1.0), k.select(x < 0.0, k.const(x.type, -1.0), 0.0))


def _gelu(k: Emitter, x: Value) -> Value:
    x = k.select(x < GELU_IS_ZERO, k.const(x.type, GELU_IS_ZERO), x)
    z = x * (x * x * GELU_COEF + 1.0)
    return over_one_plus_exp(k, x, z * (2 * SQRT_2_OVER_PI))


def _gelu_erf(k: Emitter, x: Value) -> Value:
    return over_one_plus_exp(k, x, x * polynomial(k, x * x, NORMAL_AS_SIGMOID))


def _hardsigmoid(k: Emitter, x: Value) -> Value:
    return k.minimum(k.maximum((x + 3.0) / 6.0, 0.0), 1.0)


def _softplus(k: Emitter, x: Value) -> Value:
    t = exp(k, -k.generic("fabs", x))
    u = t + 1.0
    grown = log(k, u) * t / (u - 1.0)
    return k.maximum(x, 0.0) + k.select(u.equals(1.0), t, grown)


def _xielu(k: Emitter, x: Value, alpha_n: Value, alpha_p: Value, beta: Value, eps: Value) -> Value:
    below = (expm1(k, k.minimum(x, eps)) - x) * alpha_n
    return k.select(x > 0.0, x * x * alpha_p, below) + x * beta


def _positive(k: Emitter, x: Value) -> Value:
    return k.select(x > 0.0, x, 0.0)


def _leaky(k: Emitter, x: Value, slope: Value) -> Value:
    return k.select(x > 0.0, x, k.select(x < 0.0, x * slope, 0.0))


def _silu_back(k: Emitter, dy: Value, x: Value) -> Value:
    s = sigmoid(k, x)
    return dy * (s * (x * (1.0 - s) + 1.0))


def _round(k: Emitter, x: Value) -> Value:
    return k.generic("round", x)


FUNCTIONS: dict[str, Function] = {
    "abs": lambda k, x: k.generic("fabs", x),
    "sgn": _sign,
    "neg": lambda k, x: -x,
    "step": lambda k, x: k.select(x > 0.0, k.const(x.type, 1.0), 0.0),
    "tanh": tanh,
    "elu": lambda k, x: k.select(x > 0.0, x, expm1(k, k.select(x > 0.0, k.const(x.type, 0.0), x))),
    "relu": _positive,
    "sigmoid": sigmoid,
    "gelu": _gelu,
    "gelu_quick": lambda k, x: over_one_plus_exp(k, x, x * GELU_QUICK_COEF),
    "gelu_erf": _gelu_erf,
    "silu": lambda k, x: over_one_plus_exp(k, x, x),
    "hardswish": lambda k, x: x * _hardsigmoid(k, x),
    "hardsigmoid": _hardsigmoid,
    "exp": exp,
    "expm1": expm1,
    "softplus": _softplus,
    "xielu": _xielu,
    "floor": lambda k, x: k.generic("floor", x),
    "ceil": lambda k, x: k.generic("ceil", x),
    "round": _round,
    "trunc": lambda k, x: k.generic("trunc", x),
    "sqr": lambda k, x: x * x,
    "sqrt": lambda k, x: k.generic("sqrt", x),
    "log": log,
    "sin": lambda k, x: sin_cos(k, x)[0],
    "cos": lambda k, x: sin_cos(k, x)[1],
    "scale": lambda k, x, scale, bias: x * scale + bias,
    "clamp": lambda k, x, low, high: k.maximum(k.minimum(x, high), low),
    "leaky_relu": _leaky,
    "copy": lambda k, x: x,
    "fill": lambda k, x, value: value,
}
"""Functions by ggml's name in lower case."""

PAIRS: dict[str, Function] = {
    "add": lambda k, x, y: x + y,
    "sub": lambda k, x, y: x - y,
    "mul": lambda k, x, y: x * y,
    "div": lambda k, x, y: x / y,
    "silu_back": _silu_back,
}


def unary(k: Emitter, name: str, n_params: int, dtypes: Sequence[str], past_caches: bool) -> None:
    """Apply a function: its parameters, and the loop over `y, x`."""
    params = [k.float_arg().splat(k.level.lanes) for _ in range(n_params)]
    out, src = dtypes
    with each_row(k, 2) as row:

        def body(i: Value, mask: Value | None) -> None:
            x = load_floats(k, src, row.at[1] + i * SIZES[src], k.level.lanes, mask)
            y = FUNCTIONS[name](k, x, *params)
            store_floats(k, out, y, row.at[0] + i * SIZES[out], mask, past_caches)

        each_vector(k, row.start, row.stop, body)
    if past_caches:
        k.fence()


def binary(k: Emitter, name: str, one_per_row: bool, dtypes: Sequence[str], past_caches: bool) -> None:
    """Combine two operands: the loop over `y, a, b`; `b` may have one element per row."""
    out, a, b = dtypes
    n = k.level.lanes
    with each_row(k, 3) as row:
        same = load_float(k, b, row.at[2]).splat(n) if one_per_row else None

        def body(i: Value, mask: Value | None) -> None:
            x = load_floats(k, a, row.at[1] + i * SIZES[a], n, mask)
            y = load_floats(k, b, row.at[2] + i * SIZES[b], n, mask) if same is None else same
            store_floats(k, out, PAIRS[name](k, x, y), row.at[0] + i * SIZES[out], mask, past_caches)

        each_vector(k, row.start, row.stop, body)
    if past_caches:
        k.fence()


_GATES = {
    "geglu": "gelu", "swiglu": "silu", "geglu_erf": "gelu_erf", "geglu_quick": "gelu_quick",
}  # fmt: skip


def gated(k: Emitter, name: str, gate: Value, up: Value, params: Sequence[Value] = ()) -> Value:
    """A gated linear unit; swiglu_oai has `alpha` and `limit`."""
    if name == "reglu":
        return k.select(gate > 0.0, gate * up, 0.0)
    if not params:
        return FUNCTIONS[_GATES[name]](k, gate) * up
    alpha, limit = params
    g = k.select(gate > limit, limit, gate)
    up = k.select(up < -limit, -limit, k.select(up > limit, limit, up))
    return over_one_plus_exp(k, g, g * alpha) * (up + 1.0)


def glu(k: Emitter, name: str, dtypes: Sequence[str], past_caches: bool) -> None:
    """`f(gate) up`: `alpha, limit` of swiglu_oai, and the loop over `y, gate, up`."""
    out, src = dtypes
    n = k.level.lanes
    params = [k.float_arg().splat(n) for _ in range(2)] if name == "swiglu_oai" else []
    with each_row(k, 3) as row:

        def body(i: Value, mask: Value | None) -> None:
            gate, up = (load_floats(k, src, row.at[j] + i * SIZES[src], n, mask) for j in (1, 2))
            y = gated(k, name, gate, up, params)
            store_floats(k, out, y, row.at[0] + i * SIZES[out], mask, past_caches)

        each_vector(k, row.start, row.stop, body)
    if past_caches:
        k.fence()
