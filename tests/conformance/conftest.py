"""CUDA devices for the tests: the host that plays CUDA's driver, and where there is one, the card."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from ggmlb.backends.cuda import CudaReg

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ggmlb.backends.cuda.backend import CudaBackend
    from ggmlb.backends.cuda.device import CudaDevice

PLAYED = pytest.param("played", id="played")
CARD = pytest.param("card", id="card", marks=pytest.mark.gpu)


def host_driver(**params: Any) -> Any:
    """Return the played driver; a machine with a card needs neither PyOpenCL nor a C++ compiler."""
    from host_driver import HostDriver

    return HostDriver(**params)


@pytest.fixture(scope="module", params=[PLAYED, CARD])
def cuda_device(request: pytest.FixtureRequest) -> CudaDevice:
    """The first CUDA device."""
    if request.param == "card":
        from ggmlb import device_by_name

        return device_by_name("CUDA0")  # type: ignore[return-value]
    return CudaReg(host_driver()).devices[0]


@pytest.fixture
def stream(cuda_device: CudaDevice) -> Iterator[CudaBackend]:
    with cuda_device.init_backend() as backend:
        yield backend  # type: ignore[misc]


@pytest.fixture
def other(cuda_device: CudaDevice) -> Iterator[CudaBackend]:
    with cuda_device.init_backend() as backend:
        yield backend  # type: ignore[misc]
