"""Random graphs over random devices give what the CPU alone gives."""

from __future__ import annotations

import warnings
from contextlib import ExitStack

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ggmlb.core.tensor import Tensor
from ggmlb.interface.registry import init_by_name
from ggmlb.runtime.scheduler import Scheduler
from ggmlb.testing.fake import FakeReg
from tests.support.random_graphs import Program, Recipe, needless_copies, recipes


@given(recipes, st.sampled_from([1, 1, 3]))
def test_split_over_devices_gives_what_the_cpu_gives(recipe: Recipe, n_copies: int) -> None:
    declined = {f"Fake{i}": ops for i, ops in enumerate(recipe.declined)}
    reg = FakeReg(2, async_copies=recipe.async_copies)
    for i, device in enumerate(reg.devices):
        if i in recipe.reads_host:
            device.supports_buft = lambda buft, own=device.buffer_type: buft.is_host or buft is own
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
        with Scheduler([cpu]) as one, Scheduler(backends, parallel=n_copies > 1, n_copies=n_copies) as many:
            nodes = split.graph.nodes
            for node, request in recipe.requests:
                many.set_tensor_backend(nodes[node % len(nodes)], backends[request])
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
            assert needless_copies(many) == []
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
        frozenset(),
    )
    with ExitStack() as stack:
        cpu = stack.enter_context(init_by_name("CPU"))
        backends = [*(stack.enter_context(d.init_backend()) for d in reg.devices), cpu]
        program = Program(recipe, backends, stack)
        with Scheduler(backends) as sched:
            sched.alloc_graph(program.graph)
            assert {s.backend.name for s in sched.splits} == {"Fake0", "Fake1", "CPU"}
            assert isinstance(program.results[-1], Tensor)
