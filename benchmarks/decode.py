"""A decode step of a llama-like model, for ggmlb, ggml, or node by node."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ggmlb import Context, DType, Op, Tensor

F16, F32, I32, I64 = DType.F16, DType.F32, DType.I32, DType.I64


@dataclass(frozen=True)
class Sizes:
    """A model's sizes; one token is computed, and `n_kv` are cached."""

    n_layers: int
    n_embd: int
    n_ff: int
    n_heads: int
    n_heads_kv: int
    head: int
    n_kv: int


def decode(s: Sizes, weights: DType, c: Any) -> Any:
    """Build a step of a model with `weights` of that type, and return its result, ne `[n_embd, 1]`.

    `c` has ggml's ops as methods, and `leaf`.
    """

    def product(x: Any, n_in: int, n_out: int) -> Any:
        width = n_in**-0.5
        return c.mul_mat(c.leaf(weights, n_in, n_out, low=-width, high=width), x)

    def norm(x: Any) -> Any:
        return c.mul(c.rms_norm(x, 1e-5), c.leaf(F32, s.n_embd, low=0.5, high=1.5))

    def rope(x: Any, n_heads: int) -> Any:
        place = c.leaf(I32, 1, values=np.array([s.n_kv - 1]))
        return c.rope(c.reshape_3d(x, s.head, n_heads, 1), place, s.head, 0)

    x = c.leaf(F32, s.n_embd, 1)
    size = s.head * s.n_heads_kv
    for _ in range(s.n_layers):
        y = norm(x)
        q, k, v = (product(y, s.n_embd, s.head * n) for n in (s.n_heads, s.n_heads_kv, s.n_heads_kv))
        row = c.leaf(I64, 1, values=np.array([s.n_kv - 1]))
        k = c.reshape_2d(rope(k, s.n_heads_kv), size, 1)
        cached = [c.set_rows(c.leaf(F16, size, s.n_kv), t, row) for t in (k, v)]
        heads = (s.head, s.n_heads_kv, s.n_kv)
        keys, values = (c.permute(c.reshape_3d(t, *heads), 0, 2, 1, 3) for t in cached)
        mask = c.leaf(F16, s.n_kv, 1, values=np.zeros((1, s.n_kv), np.float32))
        query = c.permute(rope(q, s.n_heads), 0, 2, 1, 3)
        seen = c.flash_attn_ext(query, keys, values, mask, s.head**-0.5, 0.0, 0.0)
        x = c.add(x, product(c.reshape_2d(seen, s.head * s.n_heads, 1), s.head * s.n_heads, s.n_embd))
        y = norm(x)
        gate, up = (product(y, s.n_embd, s.n_ff) for _ in range(2))
        x = c.add(x, product(c.swiglu_split(gate, up), s.n_ff, s.n_embd))
    return norm(x)


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
