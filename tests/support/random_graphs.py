"""Random graphs as numbers, and the programs that they describe, on any backends."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from ggmlb.core.context import Context
from ggmlb.core.dtypes import DType
from ggmlb.core.enums import NO_OPS, BufferUsage, Op
from ggmlb.core.graph import Graph
from ggmlb.core.tensor import Tensor
from ggmlb.interface import Backend
from ggmlb.runtime.alloc import alloc_ctx_tensors
from ggmlb.runtime.scheduler import Scheduler

NE = (8, 4)
DECLINABLE = (Op.ADD, Op.MUL_MAT, Op.UNARY, Op.SCALE, Op.CONT, Op.SOFT_MAX)


@dataclass(frozen=True)
class Recipe:
    """A program as numbers: each step names an op, its operands among what is there, and a choice."""

    n_inputs: int
    weights_on: tuple[int, ...]
    steps: tuple[tuple[str, int, int, int], ...]
    declined: tuple[frozenset[Op], ...]
    requests: tuple[tuple[int, int], ...]
    outputs: frozenset[int]
    watched: frozenset[int]
    async_copies: bool
    reads_host: frozenset[int]


STEPS = (
    *("add", "silu", "scale", "mul_mat", "soft_max", "transpose", "view", "concat"),
    *("mul_mat", "scale_inplace", "scale_inplace", "write", "write_half", "cache", "shown"),
)

recipes = st.builds(
    Recipe,
    n_inputs=st.integers(1, 3),
    weights_on=st.lists(st.integers(0, 2), min_size=1, max_size=4).map(tuple),
    steps=st.lists(
        st.tuples(st.sampled_from(STEPS), st.integers(0, 99), st.integers(0, 99), st.integers(0, 3)),
        min_size=1,
        max_size=25,
    ).map(tuple),
    declined=st.tuples(*[st.frozensets(st.sampled_from(DECLINABLE), max_size=3)] * 2),
    requests=st.lists(st.tuples(st.integers(0, 99), st.integers(0, 2)), max_size=12).map(tuple),
    outputs=st.frozensets(st.integers(0, 24), max_size=3),
    watched=st.frozensets(st.integers(0, 49)),
    async_copies=st.booleans(),
    reads_host=st.frozensets(st.integers(0, 1)),
)


class Program:
    """A recipe's graph, with its weights, and a cache beside each, on the given backends."""

    def __init__(self, recipe: Recipe, backends: list[Backend], stack: ExitStack) -> None:
        random = np.random.default_rng(0)
        weights: list[Tensor] = []
        caches: list[Tensor] = []
        for i, on in enumerate(recipe.weights_on):
            for kind, ne, usage in ((weights, (8, 8), BufferUsage.WEIGHTS), (caches, NE, BufferUsage.ANY)):
                ctx = Context()
                kind.append(ctx.new_tensor(DType.F32, ne, name=f"{usage.name}{i}"))
                stack.enter_context(alloc_ctx_tensors(ctx, backends[on])).usage = usage
                kind[-1].set_array(0.5 * random.standard_normal(ne[::-1], np.float32))
        c = self.ctx = Context()
        self.inputs = [c.set_input(c.new_tensor(DType.F32, NE, name=f"x{i}")) for i in range(recipe.n_inputs)]
        made = list(self.inputs)
        self.graph = Graph()
        for i, (step, a, b, k) in enumerate(recipe.steps):
            x, y = made[a % len(made)], made[b % len(made)]
            if step == "scale_inplace" and (x.view_src or x) in caches:
                step = "write"  # a device may decline SCALE, and nobody else could write there
            if step == "add":
                t = c.add(x, y)
            elif step == "silu":
                t = c.silu(x)
            elif step == "scale":
                t = c.scale(x, 0.5 + k)
            elif step == "mul_mat":
                t = c.mul_mat(weights[b % len(weights)], x)
            elif step == "soft_max":
                t = c.soft_max(x)
            elif step == "transpose":
                t = c.reshape_2d(c.cont(c.transpose(x)), *NE)
            elif step == "view":
                t = c.cont(c.view_2d(x, 8, 4, x.nb[1], 0))
            elif step == "concat":
                t = c.concat(_half(c, x, k % 2), _half(c, y, 0), 0)
            elif step == "scale_inplace":  # here, and below: what reads x later sees what was written
                t = c.scale_inplace(x, 0.5 + k)
            elif step == "write":
                t = c.cpy(y, x)
            elif step == "write_half":
                self.graph.build_forward_expand(c.cpy(c.silu(_half(c, y, 0)), _half(c, x, k % 2)))
                t = c.scale(x, 1.0)
            elif step == "cache":
                t = c.cpy(x, caches[k % len(caches)])
            else:
                t = c.view_2d(x, 8, 4, x.nb[1], 0)
            c.set_name(t, f"n{i}")
            if i in recipe.outputs:
                c.set_output(t)
            made.append(t)
            self.graph.build_forward_expand(t)
        self.results = [t for t in made if t not in self.inputs and (t.flags & 2 or t is made[-1])]
        for t in self.results:
            c.set_output(t)

    def compute(self, sched: Scheduler, seed: int) -> list[np.ndarray]:
        random = np.random.default_rng(seed)
        for x in self.inputs:
            values = random.standard_normal((4, 8), np.float32)
            if x in self.graph:
                x.set_array(values)
        sched.graph_compute(self.graph)
        return [t.to_numpy() for t in self.results]

    def watch(self, sched: Scheduler, seed: int, watched: frozenset[int]) -> dict[int, np.ndarray]:
        """Compute it; return what a callback sees of some nodes, by their number in the graph."""
        number = {node: i for i, node in enumerate(self.graph.nodes)}
        asked, seen = [], {}

        def callback(node: Tensor, ask: bool) -> bool:
            if ask:
                asked.append(number[node])
                return number[node] in watched
            assert number[node] not in seen
            seen[number[node]] = node.to_numpy()
            return True

        sched.set_eval_callback(callback)
        self.compute(sched, seed)
        sched.set_eval_callback(None)
        assert sorted(asked) == list(range(len(number))), "the callback is asked for each node once"
        return seen


def _half(c: Context, x: Tensor, which: int) -> Tensor:
    return c.view_2d(x, 4, 4, x.nb[1], 16 * which)


def needless_copies(sched: Scheduler) -> list[str]:
    """The tensors that are copied to a device again, though nothing was written into their memory."""
    fresh: set[tuple[Tensor, str]] = set()
    found = []
    for split in sched.splits:
        there = {(item.tensor, f"{split.backend_id} {split.backend.name}") for item in split.inputs}
        found += [f"{tensor.name} to {name}" for tensor, name in there & fresh]
        written = {node.view_src for node in split.nodes if node.op not in NO_OPS}
        fresh = {(t, name) for t, name in fresh | there if (t.view_src or t) not in written}
    return found
