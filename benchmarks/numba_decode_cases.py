"""Decode steps of llama-like models, which ggmlb and ggml build and compute alike."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from ops_cases import F16, F32, I32, Case, Ggml, Ggmlb

from ggmlb.dtypes import DType


class Fused(Ggmlb):
    """Nodes lie where an allocator places them, so that results that nobody else reads can be left out."""

    def __init__(self, case: Case, threads: int) -> None:
        from ggmlb import GraphAllocator

        super().__init__(case, threads)
        self._backend.graph_optimize(self._graph)
        allocator = GraphAllocator(self._backend.default_buffer_type)
        for node in self._graph.nodes:
            node.buffer = None
        allocator.alloc_graph(self._graph)
        self._memory.append(allocator)


class Apart(Fused):
    """Without fusion."""

    def __init__(self, case: Case, threads: int) -> None:
        os.environ["GGMLB_FUSE"] = "0"
        super().__init__(case, threads)


LIBRARIES = {"fused": Fused, "apart": Apart, "ggml": Ggml}


@dataclass(frozen=True)
class Sizes:
    """Of a model; one token is computed, `n_kv` are cached."""

    n_layers: int
    n_embd: int
    n_ff: int
    n_heads: int
    n_heads_kv: int
    head: int
    n_kv: int


def decode(s: Sizes, weights: DType, c: Any) -> Any:
    """Build a step."""

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
        row = c.leaf(DType.I64, 1, values=np.array([s.n_kv - 1]))
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


MODELS = {
    "8 layers of 512": Sizes(8, 512, 1408, 8, 4, 64, 256),
    "4 layers of 2048": Sizes(4, 2048, 5632, 32, 4, 64, 1024),
}
CASES = [
    Case("decode", f"{what}, {dtype.name.lower()}", partial(decode, sizes, dtype), nmse=1e-2, device="Numba")
    for what, sizes in MODELS.items()
    for dtype in (DType.Q4_0, DType.Q8_0, F16)
]
