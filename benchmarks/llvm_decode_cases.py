"""Decode steps of llama-like models, which ggmlb and ggml build and compute alike."""

from __future__ import annotations

import os
from functools import partial

from decode import Sizes, decode
from ops_cases import F16, Case, Ggml, Ggmlb

from ggmlb.core.dtypes import DType


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


MODELS = {
    "8 layers of 512": Sizes(8, 512, 1408, 8, 4, 64, 256),
    "4 layers of 2048": Sizes(4, 2048, 5632, 32, 4, 64, 1024),
}
CASES = [
    Case("decode", f"{what}, {dtype.name.lower()}", partial(decode, sizes, dtype), nmse=1e-2, device="LLVM")
    for what, sizes in MODELS.items()
    for dtype in (DType.Q4_0, DType.Q8_0, F16)
]
