"""Random graphs over random devices give what the CPU alone gives."""

from __future__ import annotations

import warnings
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ggmlb.core.context import Context
from ggmlb.core.dtypes import DType
from ggmlb.core.enums import NO_OPS, BufferUsage, Op
from ggmlb.core.graph import Graph
from ggmlb.core.tensor import Tensor
from ggmlb.interface import Backend
from ggmlb.interface.registry import init_by_name
from ggmlb.runtime.alloc import alloc_ctx_tensors
from ggmlb.runtime.scheduler import Scheduler
from ggmlb.testing.fake import FakeReg

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


STEPS = ("add", "silu", "scale", "mul_mat", "soft_max", "transpose", "view", "scale_inplace", "concat")

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
    requests=st.lists(st.tuples(st.integers(0, 99), st.integers(0, 2)), max_size=4).map(tuple),
    outputs=st.frozensets(st.integers(0, 24), max_size=3),
    watched=st.frozensets(st.integers(0, 49)),
    async_copies=st.booleans(),
)


class Program:
    """A recipe's graph, with its weights on the given backends."""

    def __init__(self, recipe: Recipe, backends: list[Backend], stack: ExitStack) -> None:
        random = np.random.default_rng(0)
        weights = []
        for on in recipe.weights_on:
            ctx = Context()
            weights.append(ctx.new_tensor(DType.F32, (8, 8), name=f"w{len(weights)}"))
            stack.enter_context(alloc_ctx_tensors(ctx, backends[on])).usage = BufferUsage.WEIGHTS
            weights[-1].set_array(0.5 * random.standard_normal((8, 8), np.float32))
        c = self.ctx = Context()
        self.inputs = [c.set_input(c.new_tensor(DType.F32, NE, name=f"x{i}")) for i in range(recipe.n_inputs)]
        made = list(self.inputs)
        self.graph = Graph()
        overwritten: set[int] = set()
        for i, (step, a, b, k) in enumerate(recipe.steps):
            usable = [j for j in range(len(made)) if j not in overwritten]
            at = usable[a % len(usable)]
            x, y = made[at], made[usable[b % len(usable)]]
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
                half = c.view_2d(x, 4, 4, x.nb[1], 16 * (k % 2))
                t = c.concat(half, c.view_2d(y, 4, 4, y.nb[1], 0), 0)
            else:  # writes into the memory of x, which nothing may read any more
                if at < recipe.n_inputs or x.view_src is not None:
                    continue
                overwritten.add(at)
                t = c.scale_inplace(x, 2.0)
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


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(recipes)
def test_split_over_devices_gives_what_the_cpu_gives(recipe: Recipe) -> None:
    declined = {f"Fake{i}": ops for i, ops in enumerate(recipe.declined)}
    reg = FakeReg(2, async_copies=recipe.async_copies)
    for device in reg.devices:
        device._declines = lambda t, name=device.name: (
            "declined by the test" if t.op in declined[name] else None
        )
    with ExitStack() as stack, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # requests that cannot be followed
        cpu = stack.enter_context(init_by_name("CPU"))
        backends = [*(stack.enter_context(d.init_backend()) for d in reg.devices), cpu]
        alone = Program(recipe, [cpu] * 3, stack)
        split = Program(recipe, backends, stack)
        if not alone.graph.nodes:
            return
        with Scheduler([cpu]) as one, Scheduler(backends) as many:
            work = [n for n in split.graph.nodes if n.op not in NO_OPS]
            for node, request in recipe.requests:
                many.set_tensor_backend(work[node % len(work)], backends[request])
            sources = [n.src for n in split.graph.nodes]
            for seed in range(2):
                if seed == 0:
                    one.alloc_graph(alone.graph)
                    many.alloc_graph(split.graph)
                for a, b in zip(alone.compute(one, seed), split.compute(many, seed), strict=True):
                    np.testing.assert_allclose(b, a, rtol=1e-4, atol=1e-5)
            expected = alone.watch(one, 2, recipe.watched)
            seen = split.watch(many, 2, recipe.watched)
            assert seen.keys() == expected.keys()
            for i, value in expected.items():
                np.testing.assert_allclose(seen[i], value, rtol=1e-4, atol=1e-5)
            assert [n.src for n in split.graph.nodes] == sources
            for record in many.placement:
                assert record.device not in record.rejected
            pairs = [(id(i.tensor), s.backend.name) for s in many.splits for i in s.inputs]
            assert len(pairs) == len(set(pairs)), "a tensor is copied twice to one device"
    assert all(d.used == 0 and d.n_buffers == 0 for d in reg.devices)


def test_the_recipes_reach_what_they_are_for() -> None:
    # The program builder must be able to make graphs in which several devices take part.
    reg = FakeReg(2)
    recipe = Recipe(
        1,
        (0, 1, 2),
        tuple(("mul_mat", 99, i, 0) for i in range(6)),
        (frozenset(), frozenset()),
        (),
        frozenset(),
        frozenset(),
        True,
    )
    with ExitStack() as stack:
        cpu = stack.enter_context(init_by_name("CPU"))
        backends = [*(stack.enter_context(d.init_backend()) for d in reg.devices), cpu]
        program = Program(recipe, backends, stack)
        with Scheduler(backends) as sched:
            sched.alloc_graph(program.graph)
            assert {s.backend.name for s in sched.splits} == {"Fake0", "Fake1", "CPU"}
            assert isinstance(program.results[-1], Tensor)
