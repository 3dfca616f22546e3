"""One Ray cluster of two nodes on this machine, for all tests of this folder; and a connection to it."""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest

import ggmlb
from ggmlb.backends.ray.cluster import Cluster

STORE = 100 << 20
"""Bytes of a node's object store."""


@pytest.fixture(scope="session")
def nodes() -> Iterator[Any]:
    """A Ray cluster of two nodes on this machine, which ends with the tests."""
    # A short path, as sockets lie in it.
    temporary = tempfile.TemporaryDirectory(prefix="ggmlb", dir="/tmp", ignore_cleanup_errors=True)
    with temporary as folder, pytest.MonkeyPatch.context() as environment:
        environment.setenv("RAY_TMPDIR", folder)
        environment.setenv("RAY_AUTH_MODE", "token")
        environment.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
        environment.setenv("RAY_raylet_start_wait_time_s", "600")  # for machines that do other work
        os.makedirs(f"{folder}/ray")
        import ray  # which reads the environment
        from ray.cluster_utils import Cluster as RayCluster

        cluster = RayCluster()
        try:
            cluster.add_node(num_cpus=1, include_dashboard=False, object_store_memory=STORE)
            cluster.add_node(num_cpus=1, object_store_memory=STORE)
            yield cluster
        finally:
            ray.shutdown()
            cluster.shutdown()


@pytest.fixture(scope="session")
def address(request: pytest.FixtureRequest) -> str:
    """Address of a cluster of two nodes: that of RAY_ADDRESS, or one of this machine."""
    return os.environ.get("RAY_ADDRESS") or request.getfixturevalue("nodes").address


@pytest.fixture(scope="module")
def cluster(address: str) -> Iterator[Cluster]:
    """A connection with the CPU of each node."""
    with ggmlb.connect(address, ["CPU"]) as connection:
        yield connection
