"""Fused attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ggmlb.enums import Op
from ggmlb.kernels.launch import Mem, rowwise
from ggmlb.kernels.lowering.base import Rule, not_f32, not_floats, not_in_rows
from ggmlb.kernels.lowering.matmul import READ_IN_EIGHTS
from ggmlb.kernels.lowering.softmax import alibi

if TYPE_CHECKING:
    from ggmlb.kernels.launch import Launch, Target
    from ggmlb.tensor import Tensor

MAX_HEAD_SIZE = 576
"""Elements of a head that fit in local memory with what else is there."""


def _declines(node: Tensor) -> str | None:
    q, k, v, mask, sinks = (*node.src, None, None)[:5]
    assert q is not None and k is not None and v is not None
    for t in (k, v):
        if t.dtype not in READ_IN_EIGHTS:
            return f"no kernel reads {t.dtype.name.lower()} keys or values"
        if t.ne[0] % 8 or t.ne[0] > MAX_HEAD_SIZE:
            return f"a head size of {t.ne[0]}: only multiples of 8 up to {MAX_HEAD_SIZE}"
    return not_floats(q, mask) or not_f32(sinks, node) or not_in_rows(q, k, v)


def _flash_attn(node: Tensor, target: Target) -> list[Launch]:
    q, k, v, mask, sinks = (*node.src, None, None)[:5]
    assert q is not None and k is not None and v is not None
    p = node.params
    mems = [Mem.of(t or q) for t in (q, k, v, mask, sinks)]
    numbers = p["scale"], p["logit_softcap"], *alibi(p["max_bias"], q.ne[2])
    flags = {"D_K": k.ne[0], "D_V": v.ne[0]}
    if mask is not None:
        flags["MASK"] = 1
    if sinks is not None:
        flags["SINKS"] = 1
    work = k.ne[1] * (k.ne[0] + v.ne[0])  # of a query
    n_rows = q.ne[1] * q.ne[2] * q.ne[3]
    found = rowwise(target, "flash_attn", [*mems, Mem.of(node)], *numbers, over=0, **flags)
    found.groups = (target.groups_for(n_rows, work), 1, 1)
    return [found]


RULES = {Op.FLASH_ATTN_EXT: Rule(_declines, _flash_attn)}
