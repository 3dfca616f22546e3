"""Host memory that the OpenCL runtime allocated: transfers from and to it need no staging copy."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import numpy as np
import pyopencl as cl

from ggmlb.backends.opencl.buffer import ALIGNMENT
from ggmlb.backends.opencl.runtime import cl_errors
from ggmlb.errors import AllocationError
from ggmlb.interface import Buffer, BufferType

if TYPE_CHECKING:
    from ggmlb.backends.opencl.device import OpenClDevice
    from ggmlb.interface.data import Bytes
    from ggmlb.tensor import Tensor


class OpenClHostBufferType(BufferType):
    """Pinned host memory of an OpenCL device."""

    def __init__(self, device: OpenClDevice) -> None:
        self._device = device

    @property
    def name(self) -> str:
        """The device's name and `_Host`."""
        return f"{self._device.name}_Host"

    @property
    def device(self) -> OpenClDevice:
        """The device."""
        return self._device

    @property
    def alignment(self) -> int:
        """The device's, so that tensors lie the same in both memories."""
        return ALIGNMENT

    @property
    def max_size(self) -> int:
        """What the runtime gives in one piece [bytes]."""
        return int(self._device.cl_device.max_mem_alloc_size)

    @property
    def is_host(self) -> bool:
        """Yes: NumPy reads and writes it."""
        return True

    def _alloc_buffer(self, nbytes: int) -> OpenClHostBuffer:
        if not nbytes:
            return OpenClHostBuffer(self, np.empty(0, np.uint8))
        try:
            return OpenClHostBuffer(self, self._map(nbytes))
        except AllocationError as error:
            warnings.warn(
                f"{self.name}: the runtime gave no pinned memory for {nbytes:,} bytes; "
                "ordinary memory is used, and transfers from and to it are slower",
                RuntimeWarning,
                stacklevel=3,
            )
            return OpenClHostBuffer(self, self._ordinary(nbytes), str(error))

    def _ordinary(self, nbytes: int) -> Bytes:
        try:
            memory = np.empty(nbytes + ALIGNMENT, np.uint8)
        except MemoryError as error:
            raise self.out_of_memory(nbytes, str(error)) from None
        start = -memory.ctypes.data % ALIGNMENT
        return memory[start : start + nbytes]

    def _map(self, nbytes: int) -> Bytes:
        """Return memory of the runtime, as a flat array.

        Raises:
            AllocationError: It has none.
        """
        device = self._device
        with cl_errors(f"allocate {nbytes:,} bytes of host memory for {device.name}", self, nbytes):
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


class OpenClHostBuffer(Buffer):
    """Mapped host memory. It stays mapped while any NumPy view of it lives, also after `free`.

    Attributes:
        why_not_pinned: Why it is ordinary memory instead, or `None`.
    """

    def __init__(self, buft: OpenClHostBufferType, array: Bytes, why_not_pinned: str | None = None) -> None:
        super().__init__(buft, array.size)
        self._array = array
        self.why_not_pinned = why_not_pinned

    @property
    def base(self) -> Bytes:
        """The memory, as a flat uint8 array."""
        return self._array

    def _set_tensor(self, tensor: Tensor, data: Bytes, offset: int) -> None:
        start = tensor.offset + offset
        self._array[start : start + data.size] = data

    def _get_tensor(self, tensor: Tensor, out: Bytes, offset: int) -> None:
        start = tensor.offset + offset
        out[...] = self._array[start : start + out.size]

    def _memset_tensor(self, tensor: Tensor, value: int, offset: int, size: int) -> None:
        start = tensor.offset + offset
        self._array[start : start + size] = value

    def _clear(self, value: int) -> None:
        self._array[...] = value

    def _free(self) -> None:
        self._array = np.empty(0, np.uint8)
