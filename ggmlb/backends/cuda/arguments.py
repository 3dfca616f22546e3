"""Argument blocks: a launch's arguments as bytes, laid out as its kernel's parameters are."""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import TYPE_CHECKING

from ggmlb.kernels import Mem

if TYPE_CHECKING:
    from ggmlb.kernels import Kernel, Launch

_FORMATS = {
    "tensor": "Pq4i4q",  # TENSOR_ in tensors.h: buffer, offset, extents, strides
    "int": "i",
    "float": "f",
}


@lru_cache(512)
def layout(kernel: Kernel) -> struct.Struct:
    """Return the layout of a kernel's parameters: each aligned to its size, as in a C struct."""
    return struct.Struct("@" + "".join(_FORMATS[param.kind] for param in kernel.params))


def argument_block(launch: Launch) -> bytes:
    """Return the block; tensors must be placed in buffers that have an `address`."""
    flat: list[int | float] = []
    for arg in launch.args:
        if isinstance(arg, Mem):
            address: int = getattr(arg.buffer, "address", 0)
            flat += (address, arg.offset, *arg.ne, *arg.nb)
        else:
            flat.append(arg)
    return layout(launch.kernel).pack(*flat)
