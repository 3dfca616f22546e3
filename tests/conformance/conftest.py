"""Devices and streams: of each GPU backend, unless a module says `device = device_fixture(...)`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from gpus import CUDA, OPENCL, Gate, device_fixture

from ggmlb import Device

device = device_fixture(OPENCL, *CUDA)


@pytest.fixture
def stream(device: Device) -> Iterator[Any]:
    with device.init_backend() as backend:
        yield backend
        while Gate.closed:  # where a test failed
            Gate.closed[0].open()


@pytest.fixture
def other(device: Device) -> Iterator[Any]:
    with device.init_backend() as backend:
        yield backend
