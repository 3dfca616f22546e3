"""Gated linear units: an activated half times the other half."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from ggmlb.backends.common.rules import FLOATS, operands
from ggmlb.backends.cpu.ops import unary
from ggmlb.backends.cpu.rules import RULES
from ggmlb.backends.cpu.views import View
from ggmlb.core.enums import GluOp, Op
from ggmlb.core.tensor import Tensor

if TYPE_CHECKING:
    from ggmlb.backends.common.workspace import Array
    from ggmlb.backends.cpu.lowering import CpuLowering, Kernel

ACTIVATIONS: dict[GluOp, tuple[Kernel, int, int]] = {
    GluOp.GEGLU: (unary.gelu, 1, 2 * unary.EXP),
    GluOp.SWIGLU: (unary.silu, 1, unary.EXP),
    GluOp.GEGLU_ERF: (unary.gelu_erf, 2, 3 * unary.EXP),
    GluOp.GEGLU_QUICK: (unary.gelu_quick, 1, unary.EXP),
}
"""The function of the gate, how many scratch arrays it wants, and its work per element in additions."""


def _is_known(node: Tensor) -> str | None:
    op = node.params["op"]
    return (
        None if op in ACTIVATIONS or op in (GluOp.REGLU, GluOp.SWIGLU_OAI) else f"it has no function {op!r}"
    )


@RULES.rule(Op.GLU, operands(FLOATS, FLOATS), _is_known)
def glu(lw: CpuLowering, t: Tensor) -> None:
    """`act(gate) * up`; gate and up are two tensors, or the halves of each row of one."""
    a = t.operand(0)
    b = t.optional(1)
    gate = View.of(a)
    if b is not None:
        up = View.of(b)
    else:
        n = t.ne[0]
        gate, up = gate.cut(3, 0, n), gate.cut(3, n, n)
        if t.params["swapped"]:
            gate, up = up, gate
    if t.params["op"] == GluOp.SWIGLU_OAI:
        kernel = partial(swiglu_oai, alpha=t.params["alpha"], limit=t.params["limit"])
        lw.tiled(kernel, View.of(t), gate, up, scratch=2, work=2 * unary.EXP)
        return
    if t.params["op"] == GluOp.REGLU:
        lw.tiled(reglu, View.of(t), gate, up)
        return
    activation, n_scratch, work = ACTIVATIONS[t.params["op"]]

    def kernel_of(y: Array, gate: Array, up: Array, tmp: Array, *scratch: Array) -> None:
        activation(tmp, gate, *scratch)
        np.multiply(tmp, up, out=y)

    lw.tiled(kernel_of, View.of(t), gate, up, scratch=1 + n_scratch, work=work)


def reglu(y: Array, gate: Array, up: Array) -> None:
    """`gate * up` where the gate is above 0, else 0, of an infinite or NaN `up` too."""
    is_open = gate > 0
    np.multiply(gate, up, out=y)
    np.copyto(y, 0, where=~is_open)


def swiglu_oai(y: Array, gate: Array, up: Array, tmp: Array, g: Array, *, alpha: float, limit: float) -> None:
    """`g * sigmoid(alpha g) * (clip(up, -limit, limit) + 1)` with `g = min(gate, limit)`."""
    np.minimum(gate, limit, out=g)
    unary.one_plus_exp(tmp, g, -alpha)
    np.divide(g, tmp, out=g)
    np.clip(up, -limit, limit, out=tmp)
    np.add(tmp, 1, out=tmp)
    np.multiply(tmp, g, out=y)
