"""Devices of a model: which are used by default, streams on them, and the memory that users name by them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ggmlb import (
    Backend,
    BufferType,
    DeviceType,
    SplitState,
    Tensor,
    device_by_name,
    init_by_name,
    meta_device,
)
from ggmlb import devices as all_devices
from ggmlb.core.errors import ArgumentError


def device_names(devices: Sequence[str] | None, named: Sequence[str] = ()) -> list[str]:
    """Return the names of a model's devices, highest priority first; the last takes what no other runs.

    Args:
        devices: Those that a user asks for; by default the first GPU, accelerators in the CPU's memory
            (LLVM), and the CPU, as far as they are there.
        named: Where no devices are asked for: devices that other requests name.

    Raises:
        ArgumentError: There are none, or one is named twice.
    """
    best = list(named) or _best() if devices is None else []
    names = [*(name for name in best if name != "CPU"), "CPU"] if devices is None else list(devices)
    if not names:
        raise ArgumentError("no devices were given; name at least one, as 'CPU'")
    if len(set(names)) < len(names):
        raise ArgumentError(f"a device is named twice in {', '.join(names)}")
    return names


def _best() -> list[str]:
    """The first GPU, and what computes in the CPU's memory faster than the CPU device does."""
    known = all_devices()
    gpus = [d.name for d in known if d.type in (DeviceType.GPU, DeviceType.IGPU)]
    beside = [d.name for d in known if d.type is DeviceType.ACCEL and d.buffer_type.is_host]
    return gpus[:1] + beside


def open_device(name: str, split_state: Callable[[Tensor, int], SplitState]) -> Backend:
    """Open a stream on a device; on several that share each layer's work, where `+` joins their names.

    Args:
        name: As `"OpenCL0"` or `"OpenCL0+OpenCL1"`.
        split_state: How a weight is sharded over so many devices.

    Raises:
        RegistryError: No device has the name.
    """
    parts = name.split("+")
    if len(parts) == 1:
        return init_by_name(name)
    together = [device_by_name(part.strip()) for part in parts]
    return meta_device(together, lambda weight: split_state(weight, len(together))).init_backend()


def memory_overrides(
    override_tensors: Mapping[str, str | BufferType] | None, backends: Mapping[str, Backend]
) -> dict[str, BufferType]:
    """Return the memory for weights by regular expression, where users name memory by its device.

    Args:
        override_tensors: By regular expression, a device of the model or any memory.
        backends: The model's streams by device.

    Raises:
        ArgumentError: A device is not the model's.
    """
    memory: dict[str, BufferType] = {}
    for pattern, where in (override_tensors or {}).items():
        if isinstance(where, str) and where not in backends:
            known = ", ".join(backends)
            raise ArgumentError(f"override_tensors: {pattern!r} is for {where!r}; the devices are {known}")
        memory[pattern] = backends[where].default_buffer_type if isinstance(where, str) else where
    return memory
