"""Argument blocks: a launch's arguments as bytes, in the layout of its kernel's parameters."""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import lru_cache

from ggmlb.backends.common.strided import Mem
from ggmlb.backends.gpu import Kernel, Launch

FORMATS = {
    "tensor": "Pq4i4q",  # TENSOR_ in tensors.h: buffer, offset, extents, strides
    "int": "i",
    "float": "f",
}


@lru_cache(512)
def layout(kernel: Kernel) -> struct.Struct:
    """Return the layout of a kernel's parameters, each aligned to its size as in a C struct."""
    return struct.Struct("@" + "".join(FORMATS[param.kind] for param in kernel.params))


def argument_block(launch: Launch, base: Callable[[Mem], int]) -> bytes:
    """Return the argument block; `base` returns the base address of a mem's memory."""
    flat: list[int | float] = []
    for arg in launch.args:
        if isinstance(arg, Mem):
            flat += (base(arg), arg.offset, *arg.ne, *arg.nb)
        else:
            flat.append(arg)
    return layout(launch.kernel).pack(*flat)
