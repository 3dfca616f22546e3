"""Small graphs, and memory, for tests of the allocators."""

from __future__ import annotations

from functools import partial

from ggmlb.core.context import Context
from ggmlb.core.dtypes import DType
from ggmlb.core.enums import BufferUsage
from ggmlb.core.graph import Graph
from ggmlb.core.tensor import Tensor
from ggmlb.runtime.alloc import TensorAllocator
from ggmlb.testing.memory import TestMemory

N = 64
"""Bytes of most tensors here, and the alignment."""


memory = partial(TestMemory, alignment=N)


def f32(ctx: Context, n: int = 16, name: str = "") -> Tensor:
    return ctx.new_tensor(DType.F32, (n,), name)


def graph_of(*results: Tensor) -> Graph:
    return Graph().build_forward_expand(*results)


def place(*tensors: Tensor, usage: BufferUsage = BufferUsage.WEIGHTS) -> None:
    """Place leafs in a buffer of their own."""
    buffer = memory().alloc_buffer(N * len(tensors))
    buffer.usage = usage
    allocator = TensorAllocator(buffer)
    for t in tensors:
        allocator.alloc(t)


def model(n: int = 16, *, extra: bool = False) -> tuple[Graph, Tensor, Tensor]:
    ctx = Context()
    x = ctx.set_input(f32(ctx, n, "x"))
    a = ctx.cont(ctx.relu(x))
    if extra:
        a = ctx.cont(a)
    y = ctx.add(a, ctx.sqr(a))
    return graph_of(y), x, y
