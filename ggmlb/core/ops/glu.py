"""Gated linear units: one half of the operand, activated, times the other half.

`Op.GLU` nodes have `src = (a, b)`, with `b` None where the rows of `a` hold both halves, and the params
`op` (a `GluOp`) and `swapped` (the second half is activated); SWIGLU_OAI adds `alpha, limit`, and
SWIGLU_CLAMP `limit`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from ggmlb.core.enums import GluOp, Op, UnaryOp, as_enum
from ggmlb.core.ops.base import (
    OpBase,
    fail_arg,
    fail_contiguous,
    fail_dtype,
    fail_shape,
    method,
    require_finite,
)
from ggmlb.core.ops.spec import OpSpec, flat
from ggmlb.core.ops.unary import DERIVATIVES
from ggmlb.core.sharding import ShardOutcome, SplitState, States, elementwise, per_row
from ggmlb.core.tensor import Tensor

if TYPE_CHECKING:
    from ggmlb.core.context import Context

Glu = Callable[["GluOps", Tensor], Tensor]
GluSplit = Callable[["GluOps", Tensor, Tensor], Tensor]


def _variants(op: GluOp, act: str) -> tuple[Glu, Glu, GluSplit]:
    """Create the three methods of a gated unit."""
    fn = op.name.lower()

    def halves(self: GluOps, a: Tensor) -> Tensor:
        return self._glu(fn, a, None, {"op": op, "swapped": False})

    def swapped(self: GluOps, a: Tensor) -> Tensor:
        return self._glu(f"{fn}_swapped", a, None, {"op": op, "swapped": True})

    def split(self: GluOps, a: Tensor, b: Tensor) -> Tensor:
        return self._glu(f"{fn}_split", a, b, {"op": op, "swapped": False})

    return (
        method(halves, fn, f"Return {act} of each row's first half times its second half"),
        method(swapped, f"{fn}_swapped", f"Return {act} of each row's second half times its first half"),
        method(split, f"{fn}_split", f"Return {act} of `a` times `b`"),
    )


class GluOps(OpBase):
    """glu, glu_split and their shortcuts, with the same errors."""

    reglu, reglu_swapped, reglu_split = _variants(GluOp.REGLU, "relu")
    geglu, geglu_swapped, geglu_split = _variants(GluOp.GEGLU, "gelu")
    swiglu, swiglu_swapped, swiglu_split = _variants(GluOp.SWIGLU, "silu")
    geglu_erf, geglu_erf_swapped, geglu_erf_split = _variants(GluOp.GEGLU_ERF, "gelu_erf")
    geglu_quick, geglu_quick_swapped, geglu_quick_split = _variants(GluOp.GEGLU_QUICK, "gelu_quick")

    def glu(self, a: Tensor, op: GluOp | int | str, swapped: bool = False) -> Tensor:
        """Return act(first half of each row) * second half; with `swapped`, act(second) * first (ggml_glu).

        Raises:
            ShapeError: The rows of `a` have gaps, or their length is odd.
            ArgumentError: There is no such gated unit, or it takes limits: SWIGLU_OAI, SWIGLU_CLAMP.
        """
        return self._glu("glu", a, None, {"op": _unit("glu", op), "swapped": bool(swapped)})

    def glu_split(self, a: Tensor, b: Tensor, op: GluOp | int | str) -> Tensor:
        """Return act(a) * b, with the activation of the gated unit `op` (ggml_glu_split).

        Raises:
            ShapeError: The rows of an operand have gaps, or the shapes differ.
            DTypeError: The types differ.
            ArgumentError: As `glu`.
        """
        return self._glu("glu_split", a, b, {"op": _unit("glu_split", op), "swapped": False})

    def swiglu_oai(self, a: Tensor, b: Tensor, alpha: float, limit: float) -> Tensor:
        """Return `g * sigmoid(alpha * g) * (u + 1)`, with `g = a` and `u = b` clamped (ggml_swiglu_oai).

        Here `g` is `a`, at most `limit`, and `u` is `b`, clamped to plus or minus `limit`.

        Raises:
            ArgumentError: `limit` is negative, or a number is not finite.
        """
        require_finite("swiglu_oai", alpha=alpha)
        require_finite("swiglu_oai", 0, limit=limit)
        params = {"op": GluOp.SWIGLU_OAI, "swapped": False, "alpha": alpha, "limit": limit}
        return self._glu("swiglu_oai", a, b, params)

    def swiglu_clamp(self, a: Tensor, b: Tensor, limit: float) -> Tensor:
        """Return `silu(g) * u`, with `g = a` and `u = b` clamped (ggml_swiglu_clamp).

        Here `g` is `a`, at most `limit`, and `u` is `b`, clamped to plus or minus `limit`.

        Raises:
            ArgumentError: `limit` is negative or not finite.
        """
        require_finite("swiglu_clamp", 0, limit=limit)
        return self._glu("swiglu_clamp", a, b, {"op": GluOp.SWIGLU_CLAMP, "swapped": False, "limit": limit})

    def _glu(self, fn: str, a: Tensor, b: Tensor | None, params: Mapping[str, object]) -> Tensor:
        if not a.is_contiguous(1):
            fail_contiguous(fn, "a", a, "contiguous but for gaps between rows")
        if b is None:
            if a.ne[0] % 2:
                fail_shape(fn, f"the row length {a.ne[0]} must be even", a)
            return self._op(Op.GLU, a.dtype, (a.ne[0] // 2, a.ne[1], a.ne[2], a.ne[3]), (a, None), params)
        if not b.is_contiguous(1):
            fail_contiguous(fn, "b", b, "contiguous but for gaps between rows")
        if a.ne != b.ne:
            fail_shape(fn, f"ne {list(b.ne)} must equal ne {list(a.ne)}", a, b)
        if a.dtype is not b.dtype:
            fail_dtype(fn, "b", b, a.dtype)
        return self._op(Op.GLU, a.dtype, a.ne, (a, b), params)


def _unit(fn: str, op: GluOp | int | str) -> GluOp:
    unit = as_enum(fn, GluOp, op)
    if unit is GluOp.SWIGLU_OAI:
        fail_arg(fn, "SWIGLU_OAI needs alpha and limit; use swiglu_oai(a, b, alpha, limit)")
    if unit is GluOp.SWIGLU_CLAMP:
        fail_arg(fn, "SWIGLU_CLAMP needs a limit; use swiglu_clamp(a, b, limit)")
    return unit


# -- how results are sharded over devices ---


def _shard_glu(node: Tensor, states: States) -> ShardOutcome | None:
    """Shard two operands elementwise; the two halves of one operand as two segments."""
    if node.src[1] is not None:
        found = elementwise(node, states)
        if found is None or not 0 < int(found.result.axis) < node.n_dims - 1:
            return found
        # `glu_split` declines gaps between planes, as slices of mirrored operands and views have.
        own = [
            s.layout.is_plain and state == found.result for s, state in zip(node.sources, states, strict=True)
        ]
        return found if all(own) else None
    if states[0].axis != 0:
        return per_row(node, states)
    segments = states[0].segments
    if len(segments) % 2 or segments[: len(segments) // 2] != segments[len(segments) // 2 :]:
        return None
    return ShardOutcome(SplitState(states[0].axis, segments[: len(segments) // 2]), tuple(states))


# -- gradients ---


ACTIVATIONS: Mapping[GluOp, UnaryOp] = {
    GluOp.REGLU: UnaryOp.RELU,
    GluOp.GEGLU: UnaryOp.GELU,
    GluOp.SWIGLU: UnaryOp.SILU,
    GluOp.GEGLU_ERF: UnaryOp.GELU_ERF,
    GluOp.GEGLU_QUICK: UnaryOp.GELU_QUICK,
}
"""Activation of each gated unit except those with limits."""


def _back_part(part: int, c: Context, node: Tensor, grad: Tensor) -> Tensor:
    """Gradient of the activated operand (0), or of the other (1)."""
    a, b = node.src
    if b is None:
        return _back_halves(c, node, grad)
    assert a is not None
    return _part(c, node, flat(c, a), flat(c, b), grad, part)


def _back_halves(c: Context, node: Tensor, grad: Tensor) -> Tensor:
    a, n = node.operand(0), node.ne[0]
    x, u = (c.cont(c.view_4d(a, *node.ne, *a.nb[1:], i * n * a.nb[0])) for i in (0, 1))
    if node.params["swapped"]:
        return c.concat(_part(c, node, u, x, grad, 1), _part(c, node, u, x, grad, 0))
    return c.concat(_part(c, node, x, u, grad, 0), _part(c, node, x, u, grad, 1))


def _part(c: Context, node: Tensor, x: Tensor, u: Tensor, grad: Tensor, part: int) -> Tensor:
    op = node.params["op"]
    if op not in ACTIVATIONS:
        fail_arg("glu", f"{op.name} has no gradient")
    act = ACTIVATIONS[op]
    if part:
        return c.mul(grad, c.unary(x, act))
    # Other derivatives do not read the result.
    y = c.unary(x, act) if act in (UnaryOp.GELU_ERF, UnaryOp.GELU_QUICK) else x
    slope = DERIVATIVES[act](c, x, y, c.mul(grad, u))
    assert slope is not None
    return slope


SPECS = (
    OpSpec(
        Op.GLU,
        backward={0: partial(_back_part, 0), 1: partial(_back_part, 1)},
        params=("op", "swapped"),
        shard=_shard_glu,
    ),
)
