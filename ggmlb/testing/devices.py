"""Devices under test by name, and their buffer types for weights."""

from __future__ import annotations

import itertools
import random
import re
from functools import partial

from ggmlb.core.errors import RegistryError, did_you_mean
from ggmlb.core.tensor import Tensor
from ggmlb.interface import BufferType, Device
from ggmlb.interface.registry import device_by_name, devices, regs, unavailable
from ggmlb.parallel.meta import MIRRORED, SplitAxis, SplitState, meta_device
from ggmlb.testing.names import device_names

_META = re.compile(r"Meta\((.*)\)", re.IGNORECASE)


class UnknownDeviceError(RegistryError):
    """No known backend has the name; if only the card is absent, the error is a `RegistryError`."""


def device_named(name: str) -> Device:
    """Return a device by its name; `Meta(A,B)`, or `A+B`, is a meta device of simple ones.

    A meta device shards its weights by `sharded_by_chance`.

    Raises:
        ArgumentError: A meta device of more than 16 devices, or of none.
        BackendError: A device's backend cannot be used.
        RegistryError: The backend of that name has no such device.
        UnknownDeviceError: No backend has the name.
    """
    meta = _META.fullmatch(name.strip())
    parts = device_names(meta[1]) if meta else [part.strip() for part in name.split("+")]
    if meta is None and len(parts) == 1:
        return _simple(name)
    found = [_simple(part) for part in parts]
    return meta_device(found, partial(sharded_by_chance, n_devices=len(found)))


def _simple(name: str) -> Device:
    try:
        return device_by_name(name)
    except RegistryError:
        backend = name.casefold().rstrip("0123456789")  # CUDA3 may be absent, but is a name of backend CUDA
        usable, failed = [reg.name for reg in regs()], unavailable()
        known = {of.casefold() for of in (*usable, *(f.name for f in failed))}
        if backend in known and backend != name.casefold():
            raise
        names = [
            *(device.name for device in devices()),
            *(f"{f.name}0" for f in failed if f.kind == "absent"),
        ]
        broken = "".join(f"\n  {f.name} is broken: {f.reason}" for f in failed if f.kind == "broken")
        raise UnknownDeviceError(
            f"there is no device {name!r}, and no backend of that name ('ggmlb devices' lists them)"
            f"{did_you_mean(name, names)}{broken}"
        ) from None


def sharded_by_chance(tensor: Tensor, n_devices: int, seed: str = "") -> SplitState:
    """Return a random split of a tensor: along any dimension, into parts of any extent, even 0; or mirrored.

    It is the same for tensors of the same name, type and extents on every machine.
    """
    draw = random.Random(f"{seed} {tensor.name} {tensor.dtype.name} {tensor.ne} {n_devices}")
    axes = [i for i in range(4) if tensor.ne[i] > 1]
    if not axes or tensor.is_empty or draw.random() < 0.2:
        return MIRRORED
    axis = draw.choice(axes)
    block = tensor.dtype.block_size if axis == 0 else 1
    n = tensor.ne[axis] // block
    cuts = [0, *sorted(draw.randint(0, n) for _ in range(n_devices - 1)), n]
    parts = tuple((b - a) * block for a, b in itertools.pairwise(cuts))
    return SplitState(SplitAxis(axis), (parts,))


def weight_memories(device: Device) -> list[BufferType]:
    """Return a device's further buffer types for weights: its extra ones, and its backend's row-split type.

    These are its extra buffer types, and the split buffer type of its backend.
    """
    reg = device.reg
    extra, split = reg.get_proc_address("dev_get_extra_bufts"), reg.get_proc_address("split_buffer_type")
    found = list(extra(device)) if extra is not None else []
    rows = None if split is None else split(list(reg.devices).index(device))
    return found if rows is None else [*found, rows]
