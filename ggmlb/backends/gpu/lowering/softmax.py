"""Soft max and its gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ggmlb.backends.common.formulas import alibi
from ggmlb.backends.common.rules import F32, FLOATS, operands
from ggmlb.backends.common.strided import Mem
from ggmlb.backends.gpu.launch import in_registers
from ggmlb.backends.gpu.lowering.base import RULES
from ggmlb.core.enums import Op

if TYPE_CHECKING:
    from ggmlb.backends.gpu.launch import Launch, Target
    from ggmlb.core.tensor import Tensor


@RULES.rule(Op.SOFT_MAX, operands(F32, FLOATS, F32, out=F32))
def _soft_max(node: Tensor, target: Target) -> list[Launch]:
    a = node.operand(0)
    mask, sinks = node.optional(1), node.optional(2)
    mems = [Mem.of(t or node) for t in (a, mask, sinks, node)]  # an absent one is not read
    flags = {"MASK": 1} if mask is not None else {}
    if sinks is not None:
        flags["SINKS"] = 1
    p = node.params
    return [
        in_registers(
            target, "soft_max", mems, p["scale"], p["max_bias"], *alibi(a.ne[2], p["max_bias"]), **flags
        )
    ]


@RULES.rule(Op.SOFT_MAX_BACK, operands(FLOATS, FLOATS))
def _soft_max_back(node: Tensor, target: Target) -> list[Launch]:
    mems = Mem.all_of(node)
    return [in_registers(target, "soft_max_back", mems, node.params["scale"])]
