"""The op families: operand checks and shape rules of each op, and its `OpSpec`.

A node's sources have ggml's order; an absent optional one is None. Where the order is not obvious:

    CPY          of `cpy`: (a, b), a view of b; of `cast`: (a,), a new tensor
    SET_ROWS     (b, c, a), a view of a
    GLU          (a, b or None)
    SOFT_MAX     (a, mask or None, sinks or None)
    ROPE, ROPE_BACK        (a, positions, frequency factors or None)
    FLASH_ATTN_EXT         (q, k, v, mask or None, sinks or None)

A node with `view_src` whose op is no view op writes into that tensor, which is one of its sources.
"""

from __future__ import annotations

from importlib import import_module
from typing import Final

from ggmlb.core.enums import Op
from ggmlb.core.ops.spec import OpSpec

_FAMILIES: Final = (
    "attention", "binary", "constant", "conv", "conv_direct", "copy", "custom", "deepseek", "glu",
    "matmul", "norm", "pool", "recurrent", "reduce", "resize", "rope", "rows", "scale", "select",
    "shape", "softmax", "train", "unary", "views", "window",
)  # fmt: skip


def _records() -> dict[Op, OpSpec]:
    specs: list[OpSpec] = []
    for family in _FAMILIES:
        specs += import_module(f"{__name__}.{family}").SPECS
    known = {spec.op: spec for spec in specs}
    return {op: known[op] for op in Op}


SPECS: Final = _records()
"""The `OpSpec` of each op, in ggml's order."""
