"""Pinned host memory: transfers from and to it run at the bus's speed, and beside the host's own work."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from ggmlb import env
from ggmlb.backends.cuda.buffer import ALIGNMENT
from ggmlb.interface.host import HostBuffer, HostBufferType, allocate

if TYPE_CHECKING:
    from ggmlb.backends.cuda.device import CudaDevice
    from ggmlb.interface.data import Bytes


class CudaHostBufferType(HostBufferType):
    """Page-locked host memory, which all CUDA devices reach; the CPU computes in it."""

    device: CudaDevice

    def __init__(self, device: CudaDevice) -> None:
        # Aligned as the device's memory is, so that tensors lie the same in both.
        super().__init__(device, "CUDA_Host", ALIGNMENT)

    def _alloc_buffer(self, nbytes: int) -> CudaHostBuffer:
        driver = self.device.driver
        if nbytes and env.cuda_pinned():
            self.device.check_process(f"allocate {nbytes:,} bytes of {self.name} memory")
            try:
                with self.device.on():
                    return CudaHostBuffer(self, driver.pinned(nbytes), is_pinned=True)
            except driver.errors:
                pass  # systems limit what a process may lock; other memory works too
        return CudaHostBuffer(self, allocate(self, nbytes), is_pinned=False)


class CudaHostBuffer(HostBuffer):
    """Host memory. It stays while a transfer uses it, also after `free`.

    Attributes:
        is_pinned: Whether it is page-locked. If not (the system refused), transfers go through a staging
            copy and may wait.
    """

    def __init__(self, buft: CudaHostBufferType, array: Bytes, *, is_pinned: bool) -> None:
        super().__init__(buft, array)
        self.is_pinned = is_pinned


class Registrations:
    """Host arrays that are page-locked where they lie, by address (cudaHostRegister)."""

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self._arrays: dict[int, Bytes] = {}

    def add(self, array: Bytes) -> bool:
        """Lock an array's pages; return whether the system let it.

        Source: ggml_backend_cuda_register_host_buffer.
        """
        driver = self._device.driver
        key = array.ctypes.data
        if key in self._arrays:
            return True
        try:
            with self._device.on():
                driver.register(array)
        except driver.errors:
            return False
        self._arrays[key] = array
        return True

    def remove(self, address: int) -> None:
        """Unlock the pages of an array that was added (ggml_backend_cuda_unregister_host_buffer)."""
        array = self._arrays.pop(address, None)
        if array is not None:
            with self._device.on():
                self._device.driver.unregister(array)

    def buffer(self, buft: CudaHostBufferType, array: Bytes) -> CudaHostBuffer:
        """Use an array's memory as a host buffer, locked while the buffer lives if the system lets it."""
        is_pinned = array.size > 0 and self.add(array)
        buffer = CudaHostBuffer(buft, array, is_pinned=is_pinned)
        if is_pinned:
            weakref.finalize(buffer, self.remove, array.ctypes.data).atexit = False
        return buffer
