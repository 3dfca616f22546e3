"""Kernels of the played driver: portable ones as OpenCL C on PoCL, CUDA's own as C++ on the host.

Both take their arguments from the block that the backend packed for CUDA.
"""

from __future__ import annotations

import ctypes
import itertools
import struct
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pyopencl as cl

from ggmlb.backends.cuda.arguments import FORMATS, layout
from ggmlb.backends.gpu import Kernel, Launch, packed_args, source
from ggmlb.backends.opencl import backend_reg
from ggmlb.backends.opencl.device import OpenClDevice
from ggmlb.interface.data import Bytes
from tests.support.cuda_emulator import BACKWARD, build


@dataclass(slots=True)
class Allocation:
    """Memory of a device, and OpenCL's name for it."""

    address: int
    array: Bytes
    device: int
    cl_buffer: cl.Buffer


Find = Callable[[int], Allocation]
"""Gives the allocation that an address lies in."""


class PortableKernels:
    """Builds portable kernels for the processor, by an OpenCL runtime such as PoCL, and runs them."""

    def __init__(self) -> None:
        # Of all platforms' devices, one that computes in the host's memory.
        devices = backend_reg().devices
        device = next(d.cl_device for d in devices if isinstance(d, OpenClDevice) and d.is_cpu)
        self._context = cl.Context([device])
        self._queue = cl.CommandQueue(self._context)
        self._kernels: dict[Any, cl.Kernel] = {}

    def buffer(self, array: Bytes) -> cl.Buffer:
        """Return OpenCL's name for an array's own memory."""
        return cl.Buffer(self._context, cl.mem_flags.READ_WRITE | cl.mem_flags.USE_HOST_PTR, hostbuf=array)

    def run(self, launch: Launch, block: bytes, find: Find) -> None:
        """Run a launch."""
        kernel, rest = self._kernel(launch), list[float]()
        buffers: list[cl.Buffer] = []
        values = iter(layout(launch.kernel).unpack(block))
        for param in launch.kernel.params:
            if param.kind == "tensor":
                found = find(address := next(values))
                buffers.append(found.cl_buffer)
                rest += (next(values) + address - found.address, *itertools.islice(values, 8))
            else:
                rest.append(next(values))
        kernel.set_args(*buffers, packed_args(launch.kernel).pack(*rest))
        x, y, z = launch.groups
        cl.enqueue_nd_range_kernel(self._queue, kernel, (x * launch.wg, y, z), (launch.wg, 1, 1)).wait()

    def _kernel(self, launch: Launch) -> cl.Kernel:
        key = launch.kernel.name, launch.defines, launch.wg
        if key not in self._kernels:
            program = cl.Program(self._context, source(launch.kernel, "opencl"))
            macros = [f"-D{name}={value}" for name, value in launch.defines]
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # PoCL logs even when it has nothing to say
                program.build(["-w", "-cl-std=CL1.2", f"-DWG={launch.wg}", *macros])
            self._kernels[key] = cl.Kernel(program, launch.kernel.name)
        return self._kernels[key]


def _letters(kernel: Kernel) -> str:
    """Return the format of each number in a kernel's argument block."""
    letters = "".join(FORMATS[param.kind] for param in kernel.params)
    return letters.replace("4i", "iiii").replace("4q", "qqqq")


def operands(launch: Launch, block: bytes) -> list[int]:
    """Return the addresses of a launch's tensors."""
    values = layout(launch.kernel).unpack(block)
    return [value for letter, value in zip(_letters(launch.kernel), values, strict=True) if letter == "P"]


def run_cuda(launch: Launch, block: bytes, find: Find) -> None:
    """Run the kernel as C++, its arguments read from where they lie in the block."""
    memory = ctypes.create_string_buffer(block, len(block))
    pointers, offset = [], 0
    for letter in _letters(launch.kernel):
        size = struct.calcsize(letter)
        offset = -(-offset // size) * size
        pointers.append(ctypes.addressof(memory) + offset)
        offset += size
    assert offset == len(block)
    found = [find(address) for address in operands(launch, block)]
    spans = [(a.address, a.address + a.array.size) for a in found]
    # The last threads go first: who relies on the first ones' work without a barrier does not find it.
    build(launch.kernel, launch.defines, launch.wg).run(pointers, launch.groups, spans, BACKWARD)
