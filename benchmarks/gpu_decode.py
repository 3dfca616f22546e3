"""A decode step: some thousand nodes of a transformer, and the kinds of nodes that it is made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ggmlb import Context, DType

if TYPE_CHECKING:
    from ggmlb.tensor import Tensor


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
    weights: DType


class Decoder:
    """The graph's tensors: weights, cache and inputs are leafs; `nodes` are in order, each with its kind.

    With `apart`, a node's inputs from other nodes are leafs of the same shape, so that a kind can be computed
    without the others.
    """

    def __init__(self, sizes: Sizes, apart: bool) -> None:
        self.ctx = Context()
        self.kinds: dict[str, list[Tensor]] = {}
        self.result: Tensor | None = None
        self._apart = apart
        self._integers: list[tuple[Tensor, int]] = []
        s = sizes
        x = self.ctx.new_tensor(DType.F32, (s.n_embd, 1))
        for _ in range(s.n_layers):
            x = self._layer(s, x)
        self.result = self._node("norm", self.ctx.rms_norm(x, 1e-5))

    def fill(self) -> None:
        """Write positions and row numbers."""
        for tensor, value in self._integers:
            tensor.set_array(np.full(tensor.shape, value))

    def _leaf(self, dtype: DType, *ne: int) -> Tensor:
        return self.ctx.new_tensor(dtype, ne)

    def _integer(self, dtype: DType, value: int) -> Tensor:
        tensor = self._leaf(dtype, 1)
        self._integers.append((tensor, value))
        return tensor

    def _node(self, kind: str, node: Tensor) -> Tensor:
        """Note a node; return what the next nodes read: itself, or a leaf of its shape."""
        self.kinds.setdefault(kind, []).append(node)
        return self._leaf(node.dtype, *node.ne) if self._apart else node

    def _product(self, s: Sizes, n_out: int, x: Tensor) -> Tensor:
        w = self._leaf(s.weights, x.ne[0], n_out)
        return self._node(f"mul_mat {x.ne[0]} x {n_out}", self.ctx.mul_mat(w, x))

    def _norm(self, s: Sizes, x: Tensor) -> Tensor:
        y = self._node("norm", self.ctx.rms_norm(x, 1e-5))
        return self._node("mul", self.ctx.mul(y, self._leaf(DType.F32, s.n_embd)))

    def _layer(self, s: Sizes, x: Tensor) -> Tensor:
        c = self.ctx
        y = self._norm(s, x)
        q, k, v = (self._product(s, s.head * n, y) for n in (s.n_heads, s.n_heads_kv, s.n_heads_kv))
        place = self._integer(DType.I32, s.n_kv - 1)
        q = self._node("rope", c.rope(c.reshape_3d(q, s.head, s.n_heads, 1), place, s.head, 0))
        k = self._node("rope", c.rope(c.reshape_3d(k, s.head, s.n_heads_kv, 1), place, s.head, 0))
        size = s.head * s.n_heads_kv
        row = self._integer(DType.I64, s.n_kv - 1)
        cache = [self._leaf(DType.F16, size, s.n_kv) for _ in "kv"]
        kept = [
            self._node("set_rows", c.set_rows(old, c.reshape_2d(new, size, 1), row))
            for old, new in zip(cache, (k, v), strict=True)
        ]
        keys, values = (c.permute(c.reshape_3d(t, s.head, s.n_heads_kv, s.n_kv), 0, 2, 1, 3) for t in kept)
        mask = self._leaf(DType.F16, s.n_kv, 1)
        seen = c.flash_attn_ext(c.permute(q, 0, 2, 1, 3), keys, values, mask, s.head**-0.5)
        a = self._node("flash_attn", seen)
        x = self._node("add", c.add(x, self._product(s, s.n_embd, c.reshape_2d(a, s.head * s.n_heads, 1))))
        y = self._norm(s, x)
        gate, up = (self._product(s, s.n_ff, y) for _ in range(2))
        h = self._node("swiglu", c.swiglu_split(gate, up))
        return self._node("add", c.add(x, self._product(s, s.n_embd, h)))
