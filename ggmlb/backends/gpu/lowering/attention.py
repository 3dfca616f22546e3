"""Fused attention (FLASH_ATTN_EXT)."""

from __future__ import annotations

from typing import Final

from ggmlb.backends.common.formulas import alibi
from ggmlb.backends.common.rules import F32, FLOATS, in_rows, operands
from ggmlb.backends.common.strided import Mem
from ggmlb.backends.gpu.launch import Launch, Target, launch
from ggmlb.backends.gpu.lowering.base import RULES
from ggmlb.backends.gpu.lowering.matmul import READ_IN_EIGHTS
from ggmlb.core.enums import Op
from ggmlb.core.tensor import Tensor

MAX_HEAD_SIZE = 576
"""Largest head size that fits in local memory."""

MAX_QUERIES = 8
"""Most queries per work-group, on CPUs."""


def _head_sizes(node: Tensor) -> str | None:
    for t in node.sources[1:3]:
        if t.ne[0] % 8 or t.ne[0] > MAX_HEAD_SIZE:
            return f"a head size of {t.ne[0]}: only multiples of 8 up to {MAX_HEAD_SIZE}"
    return None


ATTENTION: Final = (
    operands(FLOATS, READ_IN_EIGHTS, READ_IN_EIGHTS, FLOATS, F32, out=F32),
    in_rows(0, 1, 2),
    _head_sizes,
)
"""Conditions on the operands of an attention."""


@RULES.rule(Op.FLASH_ATTN_EXT, *ATTENTION)
def _flash_attn(node: Tensor, target: Target) -> list[Launch]:
    q, k, v = node.operand(0), node.operand(1), node.operand(2)
    mask, sinks = node.optional(3), node.optional(4)
    p = node.params
    mems = [Mem.of(t or q) for t in (q, k, v, mask, sinks)]
    numbers = p["scale"], p["logit_softcap"], p["max_bias"], *alibi(q.ne[2], p["max_bias"])
    flags = {"D_K": k.ne[0], "D_V": v.ne[0]}
    if mask is not None:
        flags["MASK"] = 1
    if sinks is not None:
        flags["SINKS"] = 1
    n_groups = max(k.ne[2], v.ne[2]) * q.ne[3]
    n_queries = q.ne[1] * q.ne[2] * q.ne[3] // n_groups  # per KV head
    at_once = queries_at_once(target, n_queries, n_groups)
    work = k.ne[1] * (k.ne[0] + v.ne[0])  # per query
    groups = target.groups_for(n_groups * -(-n_queries // at_once), work * at_once)
    return [
        launch(
            "flash_attn", [*mems, Mem.of(node), *numbers], (groups, 1, 1), target.wg, QUERIES=at_once, **flags
        )
    ]


def queries_at_once(target: Target, n_queries: int, n_groups: int) -> int:
    """Return how many of a KV head's `n_queries` a work-group computes at once (2^i); `n_groups`: KV heads.

    Keys and values are read once for all of them. Limited by registers and local memory for sums, and by
    the number of groups needed for all cores.
    """
    at_once = MAX_QUERIES if target.on_cpu else MAX_QUERIES // 2
    while at_once > 1 and (
        at_once // 2 >= n_queries or n_groups * -(-n_queries // at_once) < 2 * target.n_units
    ):
        at_once //= 2
    return at_once
