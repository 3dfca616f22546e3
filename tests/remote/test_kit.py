"""Devices of other machines pass the conformance kit; and the command line reaches them."""

from __future__ import annotations

import json
import os

import pytest

from ggmlb.backends.ray.cluster import Cluster
from ggmlb.testing.devices import device_named
from tests.support.kit import faults
from tests.support.processes import ggmlb_command

WHOLE = [
    pytest.param(name, mode, 0, marks=pytest.mark.slow)
    for name in ("node1/CPU", "Meta(node0/CPU,node1/CPU)")
    for mode in ("test", "support")
]


@pytest.mark.parametrize(
    ("name", "mode", "limit"),
    [
        ("node1/CPU", "behaviour", 0),
        ("node1/CPU", "test", 1),
        ("node1/CPU", "support", 1),
        ("Meta(node0/CPU,node1/CPU)", "test", 1),
        *WHOLE,
    ],
)
def test_it_passes(cluster: Cluster, name: str, mode: str, limit: int) -> None:
    assert faults(device_named(name), mode, limit) == []


def test_the_commands_connect(address: str) -> None:
    told = ggmlb_command("devices", "--address", address, "--json")
    assert told.returncode == 0, told.stderr
    assert {"node0/CPU", "node1/CPU"} <= {device["name"] for device in json.loads(told.stdout)["devices"]}
    assert os.environ["RAY_AUTH_TOKEN"] not in told.stdout + told.stderr


@pytest.mark.parametrize(
    "options", [("--mode", "behaviour"), pytest.param(("--limit", "1"), marks=pytest.mark.slow)]
)
def test_the_kit_runs_over_a_device_of_the_command_line(address: str, options: tuple[str, ...]) -> None:
    run = ggmlb_command("test", "-d", "node0/CPU", "--address", address, *options, "--json")
    assert run.returncode == 0, run.stderr
    assert "node0/CPU" in run.stdout
