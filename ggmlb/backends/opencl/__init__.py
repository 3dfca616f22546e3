"""The OpenCL backend, over PyOpenCL: GPUs, and CPUs through a runtime such as PoCL.

PyOpenCL is imported when the devices are first requested.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, Final

from ggmlb.core.errors import BackendUnavailable
from ggmlb.interface import BackendReg, Device
from ggmlb.interface.procs import dev_get_extra_bufts, set_abort_callback
from ggmlb.parallel.row_split import split_buffer_type


class OpenClReg(BackendReg):
    """The registration of OpenCL, with the usable devices of all platforms."""

    name = "OpenCL"

    priority = 50

    def __init__(self) -> None:
        self._devices: tuple[Device, ...] | None = None

    @property
    def devices(self) -> Sequence[Device]:
        """The devices `OpenCL0`, `OpenCL1`, ..., in the order of the platforms.

        Raises:
            BackendUnavailable: PyOpenCL, a platform or a device is missing; the message says how to get it.
        """
        if self._devices is None:
            try:
                import pyopencl
            except ImportError as error:
                raise BackendUnavailable(
                    f"PyOpenCL cannot be imported ({error}): pip install 'ggmlb[opencl]'"
                ) from error
            if not _can_cache():
                pyopencl._PYOPENCL_NO_CACHE = True
            from ggmlb.backends.opencl.device import find_devices

            self._devices = find_devices(self)
        return self._devices

    def _procs(self) -> Mapping[str, Callable[..., Any]]:
        return {
            "set_abort_callback": set_abort_callback,
            "dev_get_extra_bufts": dev_get_extra_bufts,
            "driver_version": _driver_version,
            "get_features": _features,
            "split_buffer_type": partial(split_buffer_type, self),
        }


def _can_cache() -> bool:
    """Whether PyOpenCL's cache of generated Python code is writable, by this user only.

    PyOpenCL reads it for each kernel object, and fails at the first if it cannot write it.
    """
    import platformdirs

    from ggmlb.system import disk_cache

    try:
        folder = platformdirs.user_cache_dir("pytools", "pytools")
        os.makedirs(folder, exist_ok=True)
    except (OSError, RuntimeError):  # read-only, or there is no home
        return False
    return disk_cache.trusted(Path(folder)) is not None and os.access(folder, os.W_OK)


@cache
def backend_reg() -> OpenClReg:
    """Return the registration; the registry calls this."""
    return OpenClReg()


EXTENSIONS: Final = (
    "fp16",
    "subgroups",
    "integer_dot_product",
    "command_buffer",
    "pci_bus_info",
    "il_program",
)
"""Extensions `cl_khr_...` that tell one build of a runtime from another."""


def _features(reg: BackendReg) -> list[tuple[str, str]]:
    """Return PyOpenCL's version, and the extensions of each device (ggml_backend_get_features)."""
    from importlib.metadata import version

    from ggmlb.backends.opencl.device import OpenClDevice

    found = [("PYOPENCL", version("pyopencl"))]
    for device in reg.devices:
        assert isinstance(device, OpenClDevice)
        has = device.cl_device.extensions.split()
        found += [(f"{device.name}_{name.upper()}", str(int(f"cl_khr_{name}" in has))) for name in EXTENSIONS]
    return found


def _driver_version(device: Device) -> str:
    """Return the platform and the driver of a device, with versions."""
    from ggmlb.backends.opencl.device import OpenClDevice

    assert isinstance(device, OpenClDevice)
    return device.driver_version
