"""A decode step of a llama-like model, as a function that builds it in ggmlb, in ggml, or node by node."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ggmlb import DType

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
