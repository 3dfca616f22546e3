"""Tests that need a card: run by `make test-gpu`, which says at the end what ran and on what."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ggmlb import device_by_name
from ggmlb.backends.cuda.backend import CudaBackend
from ggmlb.backends.cuda.device import CudaDevice

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(scope="session")
def card() -> CudaDevice:
    """The first card."""
    return device_by_name("CUDA0")  # type: ignore[return-value]


@pytest.fixture
def stream(card: CudaDevice) -> Iterator[CudaBackend]:
    with card.init_backend() as backend:
        yield backend  # type: ignore[misc]


@pytest.fixture
def other(card: CudaDevice) -> Iterator[CudaBackend]:
    with card.init_backend() as backend:
        yield backend  # type: ignore[misc]
