"""A graph for tests of the scheduler: layers whose weights lie on several backends by turns."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

import numpy as np

from ggmlb import Backend, BufferUsage, Context, DType, Graph, Tensor, alloc_ctx_tensors


def new_input(ctx: Context, *ne: int, name: str = "x") -> Tensor:
    """A float32 input."""
    return ctx.set_input(ctx.new_tensor(DType.F32, ne, name=name))


def new_weight(
    stack: ExitStack, backend: Backend, *ne: int, name: str = "w", random: np.random.Generator
) -> Tensor:
    """A random float32 weight in the memory of a backend, which the stack frees."""
    ctx = Context()
    tensor = ctx.new_tensor(DType.F32, ne, name=name)
    buffer = stack.enter_context(alloc_ctx_tensors(ctx, backend))
    buffer.usage = BufferUsage.WEIGHTS
    tensor.set_array(random.standard_normal(tensor.shape, np.float32))
    return tensor


class Chain:
    """y = silu(w3 silu(w2 silu(w1 silu(w0 x)))), with x of ne `[8, 3]`; the results are y0, y1, ..."""

    def __init__(self, stack: ExitStack, backends: Sequence[Backend], n_layers: int = 4) -> None:
        ctx, random = Context(), np.random.default_rng(1)
        y = self.x = new_input(ctx, 8, 3)
        self.weights: list[Tensor] = []
        for i in range(n_layers):
            w = new_weight(stack, backends[i % len(backends)], 8, 8, name=f"w{i}", random=random)
            self.weights.append(w)
            y = ctx.set_name(ctx.silu(ctx.mul_mat(w, y)), f"y{i}")
        self.values = [w.to_numpy() for w in self.weights]
        self.y = ctx.set_output(y)
        self.graph = Graph().build_forward_expand(y)

    def expected(self, x: np.ndarray, n_layers: int | None = None) -> np.ndarray:
        """The result of the first `n_layers` for an input; by default of all."""
        for w in self.values[:n_layers]:
            x = x @ w.T
            x = x / (1 + np.exp(-x))
        return x
