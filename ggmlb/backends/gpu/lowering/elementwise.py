"""Element-wise functions of one or two tensors, and gated linear units."""

from __future__ import annotations

from ggmlb.backends.common.rules import FLOATS, operands
from ggmlb.backends.common.strided import Mem
from ggmlb.backends.gpu.launch import Launch, Target, flattened, mapped
from ggmlb.backends.gpu.lowering.base import RULES
from ggmlb.core.enums import Op, UnaryOp
from ggmlb.core.tensor import Tensor

_NUMBERS: dict[Op | UnaryOp, tuple[str, ...]] = {
    Op.SCALE: ("scale", "bias"),
    Op.CLAMP: ("min", "max"),
    Op.LEAKY_RELU: ("negative_slope",),
    UnaryOp.XIELU: ("alpha_n", "alpha_p", "beta", "eps"),
}
"""Parameters of functions, in the order of the kernel's p0 to p3."""


@RULES.rule(
    (Op.UNARY, Op.SQR, Op.SQRT, Op.LOG, Op.SIN, Op.COS, Op.SCALE, Op.CLAMP, Op.LEAKY_RELU), operands(FLOATS)
)
def _map(node: Tensor, target: Target) -> list[Launch]:
    fn = node.params["op"] if node.op is Op.UNARY else node.op
    p = [node.params[key] for key in _NUMBERS.get(fn, ())]
    a, d = flattened(target, [Mem.of(node.sources[0]), Mem.of(node)])
    return [mapped(target, "map", [a, d], *(*p, 0.0, 0.0, 0.0, 0.0)[:4], FN=f"fn_{fn.name.lower()}")]


def combine(target: Target, fn: str, a: Mem, b: Mem, d: Mem) -> Launch:
    """Return the launch that computes `d = fn(a, b)` element by element, with `b` broadcast to `a`."""
    if any(nb != 1 and nb != na for na, nb in zip(a.ne, b.ne, strict=True)):
        return mapped(target, "combine", [a, b, d], FN=f"fn2_{fn}", TILED=1)
    return mapped(target, "combine", flattened(target, [a, b.tiled_to(a.ne), d]), FN=f"fn2_{fn}")


@RULES.rule((Op.ADD, Op.ADD1, Op.SUB, Op.MUL, Op.DIV, Op.SILU_BACK), operands(FLOATS, FLOATS))
def _combine(node: Tensor, target: Target) -> list[Launch]:
    a, b = node.sources
    fn = "add" if node.op is Op.ADD1 else node.op.lower()
    return [combine(target, fn, Mem.of(a), Mem.of(b), Mem.of(node))]


@RULES.rule(Op.GLU, operands(FLOATS, FLOATS))
def _glu(node: Tensor, target: Target) -> list[Launch]:
    a = node.operand(0)
    gate = node.optional(1)
    x = Mem.of(a)
    if gate is None:
        half = a.ne[0] // 2 * a.nb[0]
        first, second = x.window(node.ne), x.window(node.ne, offset=half)
        x, g = (second, first) if node.params["swapped"] else (first, second)
    else:
        g = Mem.of(gate)
    numbers = node.params.get("alpha", 0.0), node.params.get("limit", 0.0)
    mems = flattened(target, [x, g, Mem.of(node)])
    return [mapped(target, "glu", mems, *numbers, FN=f"glu_{node.params['op'].name.lower()}")]
