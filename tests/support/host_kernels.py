"""Kernels of the played driver: portable ones as OpenCL C on PoCL, CUDA's own as C++ on the host.

Both take their arguments from the block that the backend packed for CUDA.
"""

from __future__ import annotations

import ctypes
import itertools
import struct
import warnings
from collections.abc import Callable
from typing import Any

import pyopencl as cl

from ggmlb.backends.cuda.arguments import FORMATS, layout
from ggmlb.backends.gpu import Launch, packed_args, source
from ggmlb.backends.opencl import backend_reg
from ggmlb.backends.opencl.device import OpenClDevice
from ggmlb.interface.data import Bytes
from tests.support.cuda_emulator import BACKWARD, build


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

    def run(self, launch: Launch, block: bytes, find: Callable[[int], tuple[cl.Buffer, int]]) -> None:
        """Run a launch; `find` gives the buffer that an address lies in, and how far into it."""
        kernel = self._kernel(launch)
        values = iter(layout(launch.kernel).unpack(block))
        buffers: list[cl.Buffer] = []
        rest: list[float] = []
        for param in launch.kernel.params:
            if param.kind == "tensor":
                buffer, delta = find(next(values))
                offset, *shape = itertools.islice(values, 9)
                buffers.append(buffer)
                rest += (offset + delta, *shape)
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


def run_cuda(launch: Launch, block: bytes, span: Callable[[int], tuple[int, int]]) -> None:
    """Run the kernel as C++, its arguments read from where they lie in the block.

    `span` gives where the allocation that an address lies in begins and ends.
    """
    memory = ctypes.create_string_buffer(block, len(block))
    pointers, spans, offset = [], [], 0
    for param in launch.kernel.params:
        for letter in FORMATS[param.kind].replace("4i", "iiii").replace("4q", "qqqq"):
            size = struct.calcsize(letter)
            offset = -(-offset // size) * size
            pointers.append(ctypes.addressof(memory) + offset)
            if letter == "P":
                spans.append(span(struct.unpack_from("P", block, offset)[0]))
            offset += size
    assert offset == len(block)
    # The last threads go first: who relies on the first ones' work without a barrier does not find it.
    build(launch.kernel, launch.defines, launch.wg).run(pointers, launch.groups, spans, BACKWARD)
