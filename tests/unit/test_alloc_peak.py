"""Graphs need no more memory than with ggml's own allocator (see benchmarks/alloc_peak.py)."""

from __future__ import annotations

import pytest

from benchmarks.alloc_graphs import GRAPHS
from ggmlb.core.context import Context
from ggmlb.core.dtypes import DType
from ggmlb.core.graph import Graph
from ggmlb.core.tensor import Tensor
from ggmlb.runtime.alloc import GraphAllocator
from ggmlb.testing.memory import TestMemory

# Nodes, and bytes that ggml 0.15.3 reserves for the same graph, for tensors aligned to 32 bytes.
GGML = {
    "BERT, MiniLM-L6: 1 text of 128": (213, 1_639_936),
    "BERT, MiniLM-L6: 32 texts of 128": (213, 52_985_856),
    "BERT, base: 8 texts of 512": (417, 159_547_392),
    "LLaMA 7B: 1 token of 2048": (1060, 303_168),
    "LLaMA 7B: 512 tokens": (1060, 73_924_608),
    "LLaMA 3 8B (grouped queries): 512 tokens of 4096": (1060, 293_605_376),
    "Mixtral (8 experts): 128 tokens": (1412, 33_825_792),
    "U-Net, 64 x 64, 320 channels, 3 levels": (275, 91_750_400),
    "U-Net, 256 x 256, 64 channels, 4 levels, batch 2": (349, 587_202_560),
}
MEMORY = TestMemory(alignment=32)
WEIGHTS = MEMORY.alloc_buffer(0)


class ModelContext(Context):
    def weight(self, dtype: DType, *ne: int) -> Tensor:
        """Return a leaf that counts as placed."""
        tensor = self.new_tensor(dtype, ne)
        tensor.buffer = WEIGHTS
        return tensor


@pytest.mark.parametrize("name", GRAPHS)
def test_a_model_needs_no_more_memory_than_in_ggml(name: str) -> None:
    n_nodes, nbytes = GGML[name]
    graph = Graph().build_forward_expand(*GRAPHS[name](ModelContext()))
    assert len(graph.nodes) == n_nodes
    assert GraphAllocator(MEMORY).reserve_n_size(graph)[0] <= nbytes
