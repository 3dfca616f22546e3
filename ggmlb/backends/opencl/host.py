"""Host memory allocated by the OpenCL runtime, for transfers without a staging copy."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import numpy as np
import pyopencl as cl

from ggmlb.backends.opencl.buffer import ALIGNMENT
from ggmlb.backends.opencl.runtime import cl_errors
from ggmlb.core.errors import AllocationError
from ggmlb.interface.data import Bytes
from ggmlb.interface.host import HostBuffer, HostBufferType, allocate

if TYPE_CHECKING:
    from ggmlb.backends.opencl.device import OpenClDevice


class OpenClHostBufferType(HostBufferType):
    """Pinned host memory of an OpenCL device."""

    device: OpenClDevice

    def __init__(self, device: OpenClDevice) -> None:
        # Aligned like the device's memory, so that tensors have equal offsets in both.
        super().__init__(device, f"{device.name}_Host", ALIGNMENT)

    @property
    def max_size(self) -> int:
        """Largest single allocation of the runtime [bytes]."""
        return int(self.device.cl_device.max_mem_alloc_size)

    def _alloc_buffer(self, nbytes: int) -> OpenClHostBuffer:
        if not nbytes:
            return OpenClHostBuffer(self, np.empty(0, np.uint8))
        try:
            return OpenClHostBuffer(self, self._map(nbytes))
        except AllocationError as error:
            warnings.warn(
                f"{self.name}: the runtime gave no pinned memory for {nbytes:,} bytes; "
                "pageable memory is used, with slower transfers",
                RuntimeWarning,
                stacklevel=3,
            )
            return OpenClHostBuffer(self, allocate(self, nbytes), str(error))

    def _map(self, nbytes: int) -> Bytes:
        """Allocate memory of the runtime, as a flat array.

        Raises:
            AllocationError: The runtime lacks memory.
        """
        device = self.device
        what = f"allocate {nbytes:,} bytes of host memory for {device.name}"
        with cl_errors(what, self, nbytes, device=device.name):
            memory = cl.Buffer(device.context, cl.mem_flags.READ_WRITE | cl.mem_flags.ALLOC_HOST_PTR, nbytes)
            access = cl.map_flags.READ | cl.map_flags.WRITE
            array: Bytes
            array, _ = cl.enqueue_map_buffer(
                device.transfers,
                memory,
                access,  # type: ignore[arg-type]
                0,
                (nbytes,),
                np.dtype(np.uint8),
            )
        return array


class OpenClHostBuffer(HostBuffer):
    """Mapped host memory. It stays mapped while any NumPy view of it exists.

    Attributes:
        why_not_pinned: Why it is pageable memory instead, or `None`.
    """

    def __init__(self, buft: OpenClHostBufferType, array: Bytes, why_not_pinned: str | None = None) -> None:
        super().__init__(buft, array)
        self.why_not_pinned = why_not_pinned
