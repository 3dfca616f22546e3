"""The registry of backends and devices; opens streams on them.

    ggmlb.devices()                  every device, best first
    ggmlb.init_by_name("OpenCL0")    a stream on one of them
    ggmlb.init_best()                a stream on the best
    ggmlb.interface.registry.unavailable()     backends that cannot be used, with reasons

Backends come from ggmlb itself, from installed packages (entry-point group `ggmlb.backends`), from
`GGMLB_BACKEND_PATH` (a file or folder), and from `load`. They are discovered as text and imported at first
use. The functions here are the methods of one `Registry` per process.

Source: ggml-backend-reg.cpp.
"""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

from ggmlb.interface import Buffer, BufferType
from ggmlb.interface.registry.registry import DeviceList, Registry, Unavailable

__all__ = [
    "DeviceList",
    "Registry",
    "Unavailable",
    "cpu_buffer_from_ptr",
    "cpu_buffer_type",
    "default_devices",
    "device_by_name",
    "device_by_type",
    "devices",
    "host_device",
    "init_best",
    "init_by_name",
    "init_by_type",
    "load",
    "load_all",
    "load_all_from_path",
    "reg_by_name",
    "register",
    "register_device",
    "regs",
    "set_default_devices",
    "unavailable",
    "unload",
]

_registry = Registry()

default_devices = _registry.default_devices
device_by_name = _registry.device_by_name
device_by_type = _registry.device_by_type
devices = _registry.devices
host_device = _registry.host_device
init_best = _registry.init_best
init_by_name = _registry.init_by_name
init_by_type = _registry.init_by_type
load = _registry.load
load_all = _registry.load_all
load_all_from_path = _registry.load_all_from_path
reg_by_name = _registry.reg_by_name
register = _registry.register
register_device = _registry.register_device
regs = _registry.regs
set_default_devices = _registry.set_default_devices
unavailable = _registry.unavailable
unload = _registry.unload


def cpu_buffer_type() -> BufferType:
    """Plain host memory, as the CPU device uses it (ggml_backend_cpu_buffer_type).

    It needs no registered backend: it stays usable when the CPU backend is unloaded.
    """
    return host_device().buffer_type


def cpu_buffer_from_ptr(array: npt.NDArray[Any]) -> Buffer:
    """Use the memory of a contiguous NumPy array as a CPU buffer (ggml_backend_cpu_buffer_from_ptr).

    Raises:
        ArgumentError: The array is not contiguous.
    """
    return host_device().buffer_from_host_ptr(array)
