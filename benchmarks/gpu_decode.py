"""The nodes of a decode step by kind, to be computed whole, or each kind without the others."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from decode import Sizes, decode

from ggmlb import Context, DType, Op, Tensor

KINDS = (Op.RMS_NORM, Op.MUL, Op.MUL_MAT, Op.ROPE, Op.SET_ROWS, Op.FLASH_ATTN_EXT, Op.ADD, Op.GLU)


class Decoder:
    """The graph's tensors; what `decode` builds with.

    With `apart`, a node's inputs from other nodes are leafs of the same shape, so that a kind can be computed
    without the others.

    Attributes:
        ctx: Has the leafs and the nodes.
        kinds: The nodes of an op, and of products those with weights of one shape, in order.
        result: The last node.
    """

    def __init__(self, sizes: Sizes, weights: DType, apart: bool) -> None:
        self.ctx = Context()
        self.kinds: dict[object, list[Tensor]] = {}
        self._apart = apart
        self._values: list[tuple[Tensor, Any]] = []
        self.result: Tensor = decode(sizes, weights, self)

    def fill(self) -> None:
        """Write positions, row numbers and masks."""
        for tensor, values in self._values:
            tensor.set_array(values)

    def leaf(self, dtype: DType, *ne: int, values: Any = None, **bounds: float) -> Tensor:
        """A tensor; those without values keep what their memory holds."""
        tensor = self.ctx.new_tensor(dtype, ne)
        if values is not None:
            self._values.append((tensor, values))
        return tensor

    def __getattr__(self, name: str) -> Callable[..., Tensor]:
        return partial(self._node, getattr(self.ctx, name))

    def _node(self, op: Callable[..., Tensor], *args: Any) -> Tensor:
        """Build a node and note it; return what the next nodes read: itself, or a leaf of its shape."""
        node = op(*args)
        if node.op not in KINDS:
            return node
        shape = node.sources[0].ne if node.op is Op.MUL_MAT else None
        self.kinds.setdefault((node.op, shape), []).append(node)
        return self.leaf(node.dtype, *node.ne) if self._apart else node
