"""Pinned host memory: transfers from and to it run at the bus's speed, and beside the host's own work."""

from __future__ import annotations

import ctypes
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np

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
        self._memories: weakref.WeakValueDictionary[tuple[int, int], Any] = weakref.WeakValueDictionary()

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
        """Use an array's memory as a host buffer, locked if the system lets it.

        It is unlocked when the buffer and all views of it are gone; a transfer under way holds one.
        """
        if not array.size or not self.add(array):
            return CudaHostBuffer(buft, array, is_pinned=False)
        address = array.ctypes.data
        memory: Any = self._memories.get((address, array.size))
        if memory is None:
            memory = (ctypes.c_ubyte * array.size).from_address(address)
            self._memories[address, array.size] = memory
            weakref.finalize(memory, self.remove, address).atexit = False
        seen: Bytes = np.frombuffer(memory, np.uint8)
        seen.flags.writeable = array.flags.writeable
        return CudaHostBuffer(buft, seen, is_pinned=True)
