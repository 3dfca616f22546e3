"""Element-wise functions of one and two operands, and gated linear units.

As in ggml, comparisons with NaN are false, so that `relu` and `clamp` of NaN are numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from ggmlb.backends.common.formulas import (
    GELU_COEF,
    GELU_IS_ZERO,
    GELU_QUICK_COEF,
    NORMAL_AS_SIGMOID,
    SQRT_2_OVER_PI,
)
from ggmlb.backends.llvm.codegen.emit import I32, Emitter, Value, like
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
from ggmlb.backends.llvm.kernels.row_loop import each_row, each_vector

if TYPE_CHECKING:
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


def _gelu_quick(k: Emitter, x: Value) -> Value:
    return over_one_plus_exp(k, x, x * GELU_QUICK_COEF)


def _silu(k: Emitter, x: Value) -> Value:
    return over_one_plus_exp(k, x, x)


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


def _swiglu_oai(k: Emitter, gate: Value, up: Value, alpha: Value, limit: Value) -> Value:
    g = k.select(gate > limit, limit, gate)
    up = k.select(up < -limit, -limit, k.select(up > limit, limit, up))
    return over_one_plus_exp(k, g, g * alpha) * (up + 1.0)


def _swiglu_clamp(k: Emitter, gate: Value, up: Value, limit: Value) -> Value:
    up = k.select(up < -limit, -limit, k.select(up > limit, limit, up))
    return _silu(k, k.select(gate > limit, limit, gate)) * up


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
    "gelu_quick": _gelu_quick,
    "gelu_erf": _gelu_erf,
    "silu": _silu,
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
    "to_int": lambda k, x: x.to_int().bits(x.type),
    "of_int": lambda k, x: x.bits(like(x.type, I32)).to_float(),
    "fill": lambda k, x, value: value,
    "add": lambda k, x, y: x + y,
    "sub": lambda k, x, y: x - y,
    "mul": lambda k, x, y: x * y,
    "div": lambda k, x, y: x / y,
    "silu_back": _silu_back,
    "reglu": lambda k, gate, up: k.select(gate > 0.0, gate * up, 0.0),
    "geglu": lambda k, gate, up: _gelu(k, gate) * up,
    "geglu_erf": lambda k, gate, up: _gelu_erf(k, gate) * up,
    "geglu_quick": lambda k, gate, up: _gelu_quick(k, gate) * up,
    "swiglu": lambda k, gate, up: _silu(k, gate) * up,
    "swiglu_clamp": _swiglu_clamp,
    "swiglu_oai": _swiglu_oai,
}
"""Functions `f(kernel, *operands, *params)` by ggml's name in lower case."""

N_LIMITS: Final = {"swiglu_clamp": 1, "swiglu_oai": 2}
"""Number of parameters of gated linear units that have any."""


def elementwise(
    k: Emitter, name: str, n_params: int, dtypes: Sequence[str], one_per_row: bool, past_caches: bool
) -> None:
    """Apply the element-wise function `name`; `one_per_row`: the last operand has one element per row.

    Arguments: its parameters, then `row_loop`'s for result and operands.

    Args:
        k: The emitted kernel.
        name: The function's name.
        n_params: Number of its parameters.
        dtypes: Types of the result and of the operands.
        one_per_row: Whether the last operand has one element per row.
        past_caches: Whether to use non-temporal stores.
    """
    n, (out, *sources) = k.level.lanes, dtypes
    params = [k.float_arg().splat(n) for _ in range(n_params)]
    with each_row(k, len(dtypes)) as row:
        same = [load_float(k, sources.pop(), row.at[-1]).splat(n)] if one_per_row else []

        def body(i: Value, mask: Value | None) -> None:
            operands = [
                load_floats(k, dtype, at + i * SIZES[dtype], n, mask)
                for dtype, at in zip(sources, row.at[1:], strict=False)
            ]
            y = FUNCTIONS[name](k, *operands, *same, *params)
            store_floats(k, out, y, row.at[0] + i * SIZES[out], mask, past_caches)

        each_vector(k, row.start, row.stop, body)
    if past_caches:
        k.fence()
