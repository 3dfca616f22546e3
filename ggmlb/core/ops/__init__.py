"""The op families: what each op takes, checks and gives, and a record of each op.

A node keeps ggml's sources in ggml's places; an optional one that is absent is None. Some families say more:

    CPY          of `cpy`: (a, b), a view of b; of `cast`: (a,), a new tensor
    SET_ROWS     (b, c, a), a view of a
    GLU          (a, b or None)
    SOFT_MAX     (a, mask or None, sinks or None)
    ROPE, ROPE_BACK        (a, positions, frequency factors or None)
    FLASH_ATTN_EXT         (q, k, v, mask or None, sinks or None)

A node with `view_src` that is no view op writes into that tensor, which is among its sources.
"""

from __future__ import annotations

from typing import Final

from ggmlb.core.enums import Op
from ggmlb.core.ops import (
    attention,
    binary,
    constant,
    conv,
    conv_direct,
    copy,
    custom,
    deepseek,
    glu,
    matmul,
    norm,
    pool,
    recurrent,
    reduce,
    resize,
    rope,
    rows,
    scale,
    select,
    shape,
    softmax,
    train,
    unary,
    views,
    window,
)
from ggmlb.core.ops.spec import OpSpec

_FAMILIES = (
    attention,
    binary,
    constant,
    conv,
    conv_direct,
    copy,
    custom,
    deepseek,
    glu,
    matmul,
    norm,
    pool,
    recurrent,
    reduce,
    resize,
    rope,
    rows,
    scale,
    select,
    shape,
    softmax,
    train,
    unary,
    views,
    window,
)
_RECORDS = {spec.op: spec for family in _FAMILIES for spec in family.SPECS}

SPECS: Final[dict[Op, OpSpec]] = {op: _RECORDS[op] for op in Op}
"""The record of each op, in ggml's order."""
