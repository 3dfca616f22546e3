"""Pinned host memory: transfers from and to it run at the bus's speed, and beside the host's own work."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import numpy as np

from ggmlb import env
from ggmlb.backends.cuda.buffer import ALIGNMENT
from ggmlb.errors import ArgumentError
from ggmlb.interface import Buffer, BufferType

if TYPE_CHECKING:
    from ggmlb.backends.cuda.device import CudaDevice
    from ggmlb.interface.data import Bytes
    from ggmlb.tensor import Tensor


class CudaHostBufferType(BufferType):
    """Page-locked host memory, which all CUDA devices reach; the CPU computes in it."""

    def __init__(self, device: CudaDevice) -> None:
        self._device = device

    @property
    def name(self) -> str:
        """`CUDA_Host`."""
        return "CUDA_Host"

    @property
    def device(self) -> CudaDevice:
        """The first CUDA device."""
        return self._device

    @property
    def alignment(self) -> int:
        """The device's, so that tensors lie the same in both memories."""
        return ALIGNMENT

    @property
    def is_host(self) -> bool:
        """Yes: NumPy reads and writes it."""
        return True

    def _alloc_buffer(self, nbytes: int) -> CudaHostBuffer:
        driver = self._device.driver
        if nbytes and env.cuda_pinned():
            self._device.check_process(f"allocate {nbytes:,} bytes of {self.name} memory")
            try:
                with self._device.on():
                    return CudaHostBuffer(self, driver.pinned(nbytes), is_pinned=True)
            except driver.errors:
                pass  # systems limit what a process may lock; other memory works too
        try:
            return CudaHostBuffer(self, _pageable(nbytes), is_pinned=False)
        except MemoryError as error:
            raise self.out_of_memory(nbytes, str(error)) from None


def _pageable(nbytes: int) -> Bytes:
    """Return memory of the system's, aligned as pinned memory is."""
    whole = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -whole.ctypes.data % ALIGNMENT
    return whole[start : start + nbytes]


class CudaHostBuffer(Buffer):
    """Host memory. It stays while any NumPy view of it, or a transfer, uses it, also after `free`.

    Attributes:
        is_pinned: Whether it is page-locked. If not (the system refused), transfers go through a staging
            copy and may wait.
    """

    def __init__(self, buft: CudaHostBufferType, array: Bytes, *, is_pinned: bool) -> None:
        super().__init__(buft, array.size)
        self._array = array
        self.is_pinned = is_pinned

    @property
    def base(self) -> Bytes:
        """The memory, as a flat uint8 array."""
        return self._array

    def _set_tensor(self, tensor: Tensor, data: Bytes, offset: int) -> None:
        start = tensor.offset + offset
        self._writable("set_tensor")[start : start + data.size] = data

    def _get_tensor(self, tensor: Tensor, out: Bytes, offset: int) -> None:
        start = tensor.offset + offset
        out[...] = self._array[start : start + out.size]

    def _memset_tensor(self, tensor: Tensor, value: int, offset: int, size: int) -> None:
        start = tensor.offset + offset
        self._writable("memset_tensor")[start : start + size] = value

    def _clear(self, value: int) -> None:
        self._writable("clear")[...] = value

    def _writable(self, call: str) -> Bytes:
        if not self._array.flags.writeable:
            raise ArgumentError(f"{call}: this {self.name} buffer is read-only host memory")
        return self._array

    def _free(self) -> None:
        self._array = np.empty(0, np.uint8)


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
