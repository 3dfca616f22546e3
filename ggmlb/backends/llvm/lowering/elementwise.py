"""Lowering of element-wise ops: functions of one and two tensors, and gated linear units."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ggmlb.backends.common.rules import FLOATS, RESULT, Condition, in_rows, operands
from ggmlb.backends.common.strided import Mem
from ggmlb.backends.llvm.kernels.elementwise import FUNCTIONS
from ggmlb.backends.llvm.kernels.elementwise import elementwise as kernel
from ggmlb.backends.llvm.lowering.context import RULES, LoweringContext, name, past_caches
from ggmlb.core.enums import GluOp, Op, UnaryOp
from ggmlb.core.tensor import Tensor

PARAMS: Final[dict[str, tuple[str, ...]]] = {
    "scale": ("scale", "bias"),
    "clamp": ("min", "max"),
    "fill": ("value",),
    "leaky_relu": ("negative_slope",),
    "swiglu_clamp": ("limit",),
    "swiglu_oai": ("alpha", "limit"),
    "xielu": ("alpha_n", "alpha_p", "beta", "eps"),
}

_CHEAP = 0.08
_DEAR = 0.3
"""Time of an element on one thread [ns]: bound by memory, and with an exponential."""

_DEAR_NAMES = frozenset({
    "tanh", "elu", "sigmoid", "gelu", "gelu_quick", "gelu_erf", "silu", "exp", "expm1", "softplus", "xielu",
    "log", "sin", "cos",
})  # fmt: skip


def function_of(node: Tensor) -> str:
    """Name of a node's function in `kernels.elementwise.FUNCTIONS`, if it is there."""
    if node.op is Op.UNARY:
        return UnaryOp(node.params["op"]).name.lower()
    return str(node.op.value).lower()


def plain_function(node: Tensor) -> str | None:
    """Name in `FUNCTIONS` of a node's function; `None` if it is not there or has parameters."""
    fn = function_of(node)
    return fn if fn in FUNCTIONS and fn not in PARAMS else None


def _is_known(node: Tensor) -> str | None:
    fn = function_of(node)
    return None if fn in FUNCTIONS else f"no kernel for {fn}"


@RULES.rule(
    (Op.UNARY, Op.SQR, Op.SQRT, Op.LOG, Op.SIN, Op.COS, Op.SCALE, Op.CLAMP, Op.LEAKY_RELU, Op.FILL),
    _is_known,
    operands(FLOATS),
    in_rows(0, RESULT),
)
def _unary(node: Tensor, ctx: LoweringContext) -> None:
    a, fn = node.operand(0), function_of(node)
    args = [float(node.params[p]) for p in PARAMS.get(fn, ())]
    elementwise(fn, args, [node, a], _DEAR if fn in _DEAR_NAMES else _CHEAP, ctx)


def elementwise(
    fn: str,
    args: Sequence[float],
    tensors: Sequence[Tensor | Mem],
    work: float,
    ctx: LoweringContext,
    one_per_row: bool = False,
) -> None:
    """Append to `ctx` the step of element-wise function `fn` with parameters `args`; `tensors`: result first.

    Args:
        fn: The function's name in `FUNCTIONS`.
        args: Its parameters.
        tensors: The result and the operands.
        work: Estimated time of an element [ns].
        ctx: The context to emit to.
        one_per_row: Whether the last operand has one element per row.
    """
    params = (fn, len(args), tuple(map(name, tensors)), one_per_row, past_caches(tensors, ctx))
    ctx.launch_rows(kernel, params, args, tensors[0].ne, tensors, work, join=True, cut=True)


_TWO = operands(FLOATS, FLOATS), in_rows(0, 1, RESULT)


def repeats_one(i: int) -> Condition:
    """Return the condition that operand `i` is broadcast only along dimensions where its extent is 1."""

    def check(node: Tensor) -> str | None:
        b = node.operand(i)
        for n, m in zip(b.ne, node.ne, strict=True):
            if n not in (1, m):
                return f"{b.describe()} repeats over {node.describe()}: only extents of 1 do"
        return None

    return check


@RULES.rule((Op.ADD, Op.SUB, Op.MUL, Op.DIV, Op.SILU_BACK), *_TWO, repeats_one(1))
def _binary(node: Tensor, ctx: LoweringContext) -> None:
    a, b = node.operand(0), node.operand(1)
    elementwise(function_of(node), (), [node, a, b], _CHEAP, ctx, b.ne[0] == 1 and node.ne[0] > 1)


@RULES.rule(Op.GLU, *_TWO)
def _glu(node: Tensor, ctx: LoweringContext) -> None:
    a = node.operand(0)
    b = node.optional(1)
    gate: Tensor | Mem = a
    up: Tensor | Mem | None = b
    if up is None:
        halves = [ctx.mem(a).window(node.ne, offset=i * node.ne[0] * a.dtype.type_size) for i in (0, 1)]
        gate, up = halves[::-1] if node.params["swapped"] else halves
    fn = GluOp(node.params["op"]).name.lower()
    args = [float(node.params[p]) for p in PARAMS.get(fn, ())]
    elementwise(fn, args, [node, gate, up], _DEAR, ctx)
