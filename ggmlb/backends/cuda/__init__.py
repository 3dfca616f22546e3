"""The CUDA backend, over CuPy.

CuPy is imported when the devices are first requested.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

from ggmlb.core.errors import BackendBroken, BackendUnavailable
from ggmlb.interface import BackendReg

if TYPE_CHECKING:
    from ggmlb.backends.cuda.buffer import CudaHostBufferType, PeerAccess
    from ggmlb.backends.cuda.cupy_driver import CupyDriver
    from ggmlb.backends.cuda.device import CudaDevice

INSTALL = "pip install 'ggmlb[cuda]'"

NO_CARD = {
    34: "only a stub of the NVIDIA driver is installed; install the driver",  # cudaErrorStubLibrary
    35: (  # cudaErrorInsufficientDriver
        "the NVIDIA driver is missing, or older than this CuPy's CUDA (below 580, install ggmlb[cuda12], "
        "not ggmlb[cuda])"
    ),
    100: "the NVIDIA driver finds no card; CUDA_VISIBLE_DEVICES may hide it",  # cudaErrorNoDevice
}
"""Status codes of cuInit without a usable card, with reasons."""

BROKEN = {
    46: "another process uses the card exclusively (nvidia-smi shows which)",  # cudaErrorDevicesUnavailable
    802: "is nvidia-fabricmanager running?",  # cudaErrorSystemNotReady
    803: "the versions of the driver's parts differ; restart the machine",  # cudaErrorSystemDriverMismatch
}
"""Advice for other status codes."""


class CudaReg(BackendReg):
    """The registration of CUDA: a device for each visible card."""

    name = "CUDA"

    priority = 100

    unproven = "no card has run this backend yet"

    def __init__(self, driver: CupyDriver | None = None) -> None:
        self._driver = driver
        self._devices: tuple[CudaDevice, ...] | None = None
        self._host_buffer_type: CudaHostBufferType | None = None

    @cached_property
    def peers(self) -> PeerAccess:
        """The peer-to-peer access between the registration's CUDA devices."""
        from ggmlb.backends.cuda.buffer import PeerAccess

        return PeerAccess()

    @property
    def devices(self) -> Sequence[CudaDevice]:
        """The devices `CUDA0`, `CUDA1`, ...

        Raises:
            BackendUnavailable: CuPy, the driver or a card is missing; the message says what to do.
            BackendBroken: They are installed but fail.
        """
        if self._devices is None:
            driver = self._driver = self._driver or load_driver()
            n = count_devices(driver)
            from ggmlb.backends.cuda.device import CudaDevice

            try:
                self._devices = tuple(CudaDevice(self, driver, i) for i in range(n))
            except driver.errors as error:
                raise BackendBroken(_failing(error)) from error
        return self._devices

    @property
    def host_buffer_type(self) -> CudaHostBufferType:
        """Pinned host memory, for all devices."""
        if self._host_buffer_type is None:
            from ggmlb.backends.cuda.buffer import CudaHostBufferType

            self._host_buffer_type = CudaHostBufferType(self.devices[0])
        return self._host_buffer_type

    def _procs(self) -> Mapping[str, Callable[..., Any]]:
        from ggmlb.backends.cuda.procs import procs

        return procs(self)


def load_driver() -> CupyDriver:
    """Return the driver interface over CuPy.

    Raises:
        BackendUnavailable: CuPy is not installed.
        BackendBroken: CuPy cannot be loaded.
    """
    try:
        import cupy  # noqa: F401
    except ModuleNotFoundError as error:
        raise BackendUnavailable(f"CuPy cannot be imported ({error}): {INSTALL}") from error
    except Exception as error:
        raise BackendBroken(
            f"CuPy is installed but cannot be loaded: {error}; reinstall it with {INSTALL}"
        ) from error
    from ggmlb.backends.cuda.cupy_driver import CupyDriver

    return CupyDriver()


def count_devices(driver: CupyDriver) -> int:
    """Return the number of CUDA devices; raise BackendUnavailable if there is none.

    Raises:
        BackendUnavailable: There is no driver or no card.
        BackendBroken: CUDA reports another failure.
    """
    try:
        n = driver.device_count()
    except driver.errors as error:
        why = NO_CARD.get(getattr(error, "status", 0))
        if why is None:
            raise BackendBroken(_failing(error)) from error
        raise BackendUnavailable(f"no usable CUDA card: {why} ({error})") from error
    if not n:
        raise BackendUnavailable(f"no usable CUDA card: {NO_CARD[100]}")
    return n


def _failing(error: Exception) -> str:
    advice = BROKEN.get(getattr(error, "status", 0), "")
    return f"CUDA fails to start: {error}" + (f"; {advice}" if advice else "")


@cache
def backend_reg() -> CudaReg:
    """Return the registration; the registry calls this."""
    return CudaReg()
