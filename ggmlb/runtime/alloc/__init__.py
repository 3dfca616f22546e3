"""Allocators: placement of tensors in buffers (ggml-alloc.h).

    TensorAllocator      one tensor after another in an existing buffer     ggml_tallocr
    alloc_ctx_tensors    all tensors of a context, in new buffers           ggml_backend_alloc_ctx_tensors
    GraphAllocator       a graph's tensors, sharing memory over time          ggml_gallocr

A graph is allocated in three steps: `IndexedGraph` converts it to lists of integers; `plan` finds an
abstract address for each tensor, by `DynamicAllocator`s; `graph` allocates the buffers and places the
tensors. Plans are cached, so that later allocations skip the second step.
"""

from ggmlb.runtime.alloc.context import (
    TensorAllocator,
    alloc_ctx_tensors,
    alloc_ctx_tensors_size,
    alloc_tensors,
    override_for,
)
from ggmlb.runtime.alloc.graph import GraphAllocator

__all__ = [
    "GraphAllocator",
    "TensorAllocator",
    "alloc_ctx_tensors",
    "alloc_ctx_tensors_size",
    "alloc_tensors",
    "override_for",
]
