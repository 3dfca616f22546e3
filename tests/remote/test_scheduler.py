"""Random graphs over two machines and this one have the bits of one CPU."""

from __future__ import annotations

import warnings
from contextlib import ExitStack

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ggmlb import Scheduler, init_by_name
from ggmlb.backends.ray.cluster import Cluster
from tests.support.random_graphs import Program, Recipe, recipes


@settings(
    deadline=None,
    max_examples=20 if settings.default.max_examples <= 100 else 500,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(recipes, st.booleans())
def test_split_over_machines(cluster: Cluster, recipe: Recipe, parallel: bool) -> None:
    with ExitStack() as stack, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # requests that cannot be followed
        names = ("node0/CPU", "node1/CPU", "CPU")
        backends = [stack.enter_context(init_by_name(name)) for name in names]
        cpu = backends[-1]
        alone, split = Program(recipe, [cpu] * 3, stack), Program(recipe, backends, stack)
        if not alone.graph.nodes:
            return
        with Scheduler([cpu]) as one, Scheduler(backends, parallel=parallel) as many:
            nodes = split.graph.nodes
            for node, request in recipe.requests:
                many.set_tensor_backend(nodes[node % len(nodes)], backends[request])
            one.alloc_graph(alone.graph)
            many.alloc_graph(split.graph)
            for seed in range(3):
                for a, b in zip(alone.compute(one, seed), split.compute(many, seed), strict=True):
                    np.testing.assert_array_equal(b, a)
            expected, seen = (p.watch(s, 2, recipe.watched) for p, s in ((alone, one), (split, many)))
            assert seen.keys() == expected.keys()
            for i, value in expected.items():
                np.testing.assert_array_equal(seen[i], value)
