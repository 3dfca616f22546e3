"""Random sequences of graphs over two machines and this one have the bits of one CPU."""

from __future__ import annotations

import pytest

from ggmlb.backends.ray.cluster import Cluster
from ggmlb.interface.registry import device_by_name
from tests.support.sequences import run_sequence


@pytest.mark.parametrize(
    "seed", [*range(3), *[pytest.param(i, marks=pytest.mark.slow) for i in range(3, 60)]]
)
def test_split_over_machines(cluster: Cluster, seed: int) -> None:
    names = ("node0/CPU", "node1/CPU", "CPU")
    run_sequence(seed, [device_by_name(name) for name in names], 15, tolerance=0)
