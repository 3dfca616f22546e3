"""What CUDA gets of a launch: its kernel's text and compiler options, and its arguments as bytes."""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import lru_cache
from typing import Final

from ggmlb.backends.common.strided import Mem
from ggmlb.backends.gpu import Defines, Kernel, Launch, source
from ggmlb.backends.gpu.source import tensor_words

OPTIONS: Final = ("-diag-suppress=177",)  # functions that a kernel does not use
"""NVRTC's options, equal for all kernels, because CuPy queries the compiler's version for each set."""

FORMATS = {
    "tensor": "Pq4i4q",  # TENSOR_ in tensors.h: buffer, offset, extents, strides
    "int": "i",
    "float": "f",
}


def text(kernel: Kernel, defines: Defines, wg: int) -> str:
    """Return the CUDA C++ text of a kernel with its macros."""
    macros = "".join(f"#define {name} {value}\n" for name, value in (*defines, ("WG", wg)))
    return macros + source(kernel, "cuda")


@lru_cache(512)
def layout(kernel: Kernel) -> struct.Struct:
    """Return the layout of a kernel's parameters, each aligned to its size as in a C struct."""
    return struct.Struct("@" + "".join(FORMATS[param.kind] for param in kernel.params))


@lru_cache(512)
def address_words(kernel: Kernel) -> list[int]:
    """Return where the addresses of tensors are in a kernel's argument block, in words of 8 bytes."""
    return tensor_words(kernel, FORMATS)


def argument_block(launch: Launch, base: Callable[[Mem], int]) -> bytes:
    """Return the argument block; `base` returns the base address of a mem's memory."""
    flat: list[int | float] = []
    for arg in launch.args:
        if isinstance(arg, Mem):
            flat += (base(arg), arg.offset, *arg.ne, *arg.nb)
        else:
            flat.append(arg)
    return layout(launch.kernel).pack(*flat)
