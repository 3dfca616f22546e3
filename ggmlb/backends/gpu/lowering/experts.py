"""Mixtures of experts: routing, and the weighted sum of results; not on CPU-type devices."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ggmlb.backends.common.fusion import scores_of
from ggmlb.backends.common.rules import F32, FLOATS, operands
from ggmlb.backends.common.strided import Mem
from ggmlb.backends.gpu.launch import MAX_PER, Launch, Target, elementwise, in_registers
from ggmlb.backends.gpu.lowering.base import RULES

if TYPE_CHECKING:
    from ggmlb.backends.common.fusion import Group


def _soft_max_alone(group: Group) -> str | None:
    shares, p = group["shares"], group["shares"].params
    if len(shares.sources) > 1 or p["scale"] != 1 or p["max_bias"]:
        return "soft max with a mask, sinks or a scale"
    return operands(F32, out=F32)(shares)


def _in_registers(group: Group, target: Target) -> str | None:
    n, n_used = scores_of(group).ne[0], group["chosen"].ne[0]
    if target.on_cpu or n > MAX_PER * target.max_wg:
        return "rows that do not fit in registers"
    return None if n_used <= (8 if n <= 128 else 32) else "more experts per token than work-items per row"


@RULES.rule("routing", _soft_max_alone, on=_in_registers)
def _route(group: Group, target: Target) -> list[Launch]:
    of_logits = group.result is group["shares"]
    logits = scores_of(group) if of_logits else group["shares"].operand(0)
    chosen, result = group["chosen"], group.result
    d = Mem.of(result).window(chosen.ne, (4, 4 * chosen.ne[0], result.nbytes, result.nbytes))
    p = group["clamp"].params if "clamp" in group else {"min": -math.inf, "max": math.inf}
    flags = {"OF_LOGITS": 1} if of_logits else {"DIVIDED": 1} if "div" in group else {}
    mems = [Mem.of(logits), Mem.of(chosen), d]
    return [in_registers(target, "route", mems, p["min"], p["max"], over=0, **flags)]


def _on_gpu(group: Group, target: Target) -> str | None:
    if target.on_cpu:
        return "a loop over slots is not vectorised"
    return operands(FLOATS, FLOATS)(group["weighted"])


@RULES.rule("experts_sum", on=_on_gpu)
def _experts_sum(group: Group, target: Target) -> list[Launch]:
    a, weights = group["weighted"].sources
    return [elementwise(target, "sum_slots", [Mem.of(a), Mem.of(weights), Mem.of(group.result)])]
