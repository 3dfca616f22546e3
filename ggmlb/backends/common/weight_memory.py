"""Checks of nodes that read memory for weights only, which stores them in another order or type."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from ggmlb.core.enums import NO_OPS, Op
from ggmlb.core.tensor import Tensor
from ggmlb.interface import BufferType

PRODUCTS: Final = frozenset({Op.MUL_MAT, Op.MUL_MAT_ID, Op.OUT_PROD})
"""Ops whose first operand is a weight."""


def weight_in(buft: BufferType, node: Tensor, readers: Collection[Op] = PRODUCTS) -> Tensor | None:
    """Return a node's first operand if it is a weight in such memory that the node may read; else `None`."""
    weight = node.src[0] if node.op in readers else None
    return weight if _lies_in(buft, weight) else None


def misplaced(
    buft: BufferType, node: Tensor, readers: Collection[Op] = PRODUCTS, who: str = "products"
) -> str | None:
    """Return why a node cannot use operands in such memory; `who` names the readers of `src0` in messages."""
    if node.op in NO_OPS:
        return None
    for i, src in enumerate(node.src):
        if _lies_in(buft, src) and (i or node.op not in readers):
            return f"src{i} lies in {buft.name} memory, which only {who} read"
    return None


def _lies_in(buft: BufferType, tensor: Tensor | None) -> bool:
    """Whether a tensor lies in such memory; a view lies where its source does, placed or not."""
    buffer = None if tensor is None else (tensor.view_src or tensor).buffer
    return buffer is not None and buffer.buft is buft
