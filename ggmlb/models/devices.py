"""Devices of a model: defaults, streams, and overrides of single tensors."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

from ggmlb import (
    Backend,
    Buffer,
    BufferType,
    BufferUsage,
    Context,
    Device,
    DeviceType,
    SplitState,
    Tensor,
    alloc_ctx_tensors,
    default_devices,
    device_by_name,
    init_by_name,
    meta_device,
)
from ggmlb import devices as all_devices
from ggmlb.core.errors import ArgumentError
from ggmlb.core.lifetime import Closeable
from ggmlb.inspect.html import pre
from ggmlb.models.summary import Summary


class ModelOnDevices(Closeable):
    """A model that holds streams and memory of devices until it is closed; a context manager.

    Attributes:
        is_freed: Whether it was closed.
    """

    is_freed = False
    _backends: tuple[Backend, ...]
    _resources: ExitStack
    _lock: AbstractContextManager[Any]

    @property
    def backends(self) -> tuple[Backend, ...]:
        """The streams in use, highest priority first."""
        return self._backends

    @abstractmethod
    def summary(self) -> Summary:
        """Return the model's sizes, the layers and other parts on each device, and each device's memory.

        Raises:
            FreedError: The model was closed.
        """

    def _repr_html_(self) -> str:
        return pre(repr(self)) if self.is_freed else self.summary()._repr_html_()

    def close(self) -> None:
        """Free all memory and streams; has no effect if already closed."""
        with self._lock:
            self.is_freed = True
            self._resources.close()


def alloc_zeros(
    contexts: Iterable[tuple[Context, Backend]], usage: BufferUsage = BufferUsage.ANY
) -> tuple[Buffer, ...]:
    """Allocate zeroed buffers for tensors of contexts, each on its device; the caller frees them.

    Raises:
        AllocationError: A device lacks room; nothing is placed.
    """
    with ExitStack() as made:
        buffers = tuple([made.enter_context(alloc_ctx_tensors(ctx, home)) for ctx, home in contexts])
        for buffer in buffers:
            buffer.usage = usage
            buffer.clear(0)
        made.pop_all()
    return buffers


SPLIT = "_Split"
"""Suffix of a split buffer type, which splits the rows of matrices over devices."""


def device_names(devices: Sequence[str] | None, named: Sequence[str] = ()) -> list[str]:
    """Return a model's devices by priority: `devices`, else `named` (where layers are requested), or default.

    Args:
        devices: The requested devices; by default those of `ggmlb.default_devices`, else the first GPU,
            accelerators in the CPU's memory (LLVM), and the CPU, of those that come with ggmlb.
        named: Devices that `layers` names, used if `devices` is not given.

    Raises:
        ArgumentError: There are no devices, or one is named twice.
    """
    if devices is None and not named:
        devices = default_devices() or None
    best = list(named) or _best() if devices is None else []
    names = [*(name for name in best if name != "CPU"), "CPU"] if devices is None else list(devices)
    if not names:
        raise ArgumentError("no devices were given; name at least one, as 'CPU'")
    if len(set(names)) < len(names):
        raise ArgumentError(f"a device is named twice in {', '.join(names)}")
    return names


def _best() -> list[str]:
    """Return the default devices: the first GPU, and accelerators in the CPU's memory."""
    known = [device for device in all_devices() if device.is_automatic]
    gpus = [d.name for d in known if d.type in (DeviceType.GPU, DeviceType.IGPU)]
    beside = [d for d in known if d.type is DeviceType.ACCEL]
    return gpus[:1] + [d.name for d in beside if d.buffer_type.is_host]


def host_device(names: Sequence[str]) -> str | None:
    """Return the first of these devices that computes in host memory; `None` if none does."""
    is_host = (name for name in names if "+" not in name and device_by_name(name).buffer_type.is_host)
    return next(is_host, None)


def open_device(name: str, split_state: Callable[[Tensor, int], SplitState]) -> Backend:
    """Open a stream on a device; names joined by `+` make a meta device, with weights split by `split_state`.

    Args:
        name: As `"OpenCL0"` or `"OpenCL0+OpenCL1"`.
        split_state: Split state of a weight over a number of devices.

    Raises:
        RegistryError: No device has the name.
    """
    parts = name.split("+")
    if len(parts) == 1:
        return init_by_name(name)
    together = [device_by_name(part.strip()) for part in parts]
    return meta_device(together, lambda weight: split_state(weight, len(together))).init_backend()


def resolved_overrides(
    overrides: Mapping[str, str | BufferType] | None, backends: Mapping[str, Backend]
) -> dict[str, str | BufferType]:
    """Check the devices requested for single tensors; make `<device>_Split` a buffer type that splits rows.

    Args:
        overrides: Device or buffer type by regular expression. `"CUDA0_Split"` splits the rows of matrices
            over all CUDA devices in proportion to their memory; CUDA0 must be a device of the model.
        backends: The model's streams by device.

    Raises:
        ArgumentError: A device is not the model's, or cannot split rows.
    """
    memory: dict[str, str | BufferType] = {}
    for pattern, where in (overrides or {}).items():
        if not isinstance(where, str) or where in backends:
            memory[pattern] = where
        elif where.endswith(SPLIT) and where.removesuffix(SPLIT) in backends:
            memory[pattern] = split_rows(backends[where.removesuffix(SPLIT)].device)
        else:
            known = ", ".join(backends)
            raise ArgumentError(f"override {pattern!r} is for {where!r}; the devices are {known}")
    return memory


def split_rows(device: Device, shares: Mapping[str, float] | None = None) -> BufferType:
    """Return the buffer type that splits rows of matrices over a backend's devices by `shares`.

    Args:
        device: The device that runs the products.
        shares: Share of each device by name, in any unit; by default its memory.

    Raises:
        ArgumentError: The backend cannot split rows.
    """
    split: Callable[..., BufferType | None] | None = device.reg.get_proc_address("split_buffer_type")
    devices = device.reg.devices
    given = None if shares is None else [shares.get(each.name, 0.0) for each in devices]
    found = None if split is None else split(devices.index(device), given)
    if found is None:
        raise ArgumentError(f"{device.name}{SPLIT}: {device.reg.name} cannot split rows; name a device")
    return found
