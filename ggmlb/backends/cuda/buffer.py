"""Device memory: one allocation for each buffer, with tensors at byte offsets."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ggmlb.backends.cuda.driver import CopyKind, address_of, cuda_errors
from ggmlb.backends.cuda.memory import BorrowedMemory
from ggmlb.core.placement import overlap
from ggmlb.core.tensor import Tensor
from ggmlb.interface import Buffer, BufferType
from ggmlb.interface.data import Bytes, Pieces

if TYPE_CHECKING:
    from ggmlb.backends.cuda.device import CudaDevice
    from ggmlb.backends.cuda.stream import Stream

ALIGNMENT = 256
"""Alignment of tensors [bytes]: that of cudaMalloc, and more than any kernel or cuBLAS needs."""


class CudaBufferType(BufferType):
    """The memory of a CUDA device."""

    device: CudaDevice

    def __init__(self, device: CudaDevice) -> None:
        super().__init__(device, device.name, ALIGNMENT)

    def _alloc_buffer(self, nbytes: int) -> CudaBuffer:
        if not nbytes:
            return CudaBuffer(self, 0, 0)
        device = self.device
        device.check_process(f"allocate {nbytes:,} bytes on {self.name}")
        with cuda_errors(device.driver, f"allocate {nbytes:,} bytes on {self.name}", self, nbytes):
            return CudaBuffer(self, device.memory_pool.allocate(nbytes), nbytes)


class _Memory:
    """Owner of an allocation, held by its buffer until freed, and by arrays over it."""

    __slots__ = ("__weakref__",)


class CudaBuffer(Buffer):
    """An allocation on a device.

    Synchronous transfers run on the device's transfer stream, after queued work that uses this buffer, and
    independent of other work.

    Attributes:
        device: The device it belongs to.
        address: Device address; 0 for a size of 0.
        streams: Streams whose work uses it.

    Args:
        owner: Owner of memory allocated by others.
    """

    def __init__(self, buft: CudaBufferType, address: int, nbytes: int, owner: object = None) -> None:
        super().__init__(buft, nbytes)
        self.device = buft.device
        self.address = address
        self.streams: weakref.WeakSet[Stream] = weakref.WeakSet()
        self._array: Any = None
        self._memory: object = None
        if address:
            self._memory = _Memory()
            memory = address if owner is None else BorrowedMemory(owner)
            give_back = self.device.memory_pool.give_back
            weakref.finalize(self._memory, give_back, memory, self.streams).atexit = False

    @property
    def base(self) -> Any:
        """The memory as a flat uint8 array of the array library."""
        if self._array is None:
            driver, index = self.device.driver, self.device.index
            self._array = driver.array(self.address, self.size, index, self._memory)
        return self._array

    def exported(self, tensor: Tensor, call: str) -> Any:
        """Wait for queued work first, because the protocols allow immediate reads."""
        with cuda_errors(self.device.driver, f"{call} of {tensor.describe()}"), self.device.on():
            for stream in [s for s in self.streams if s.handle]:
                stream.synchronize()
        return super().exported(tensor, call)

    def _as_array(
        self, tensor: Tensor, dtype: np.dtype[Any], shape: tuple[int, ...], strides: tuple[int, ...]
    ) -> Any:
        return self.device.driver.view(self.base, shape, dtype, tensor.offset, strides)

    def write(self, data: npt.NDArray[Any]) -> None:
        """Write an array at offset 0, and wait for it."""
        driver, nbytes = self.device.driver, data.nbytes
        self._transfer(
            f"write {nbytes:,} bytes on {self.name}",
            lambda stream: driver.copy(self.address, data.ctypes.data, nbytes, CopyKind.TO_DEVICE, stream),
        )

    def _set_tensor(self, tensor: Tensor, data: Bytes, offset: int) -> None:
        def write(stream: int) -> None:
            to = self.address + tensor.offset + offset
            self.device.driver.copy(to, address_of(data), data.size, CopyKind.TO_DEVICE, stream)

        self._transfer(f"set_tensor on {tensor.describe()}", write)

    def _get_tensor(self, tensor: Tensor, out: Bytes, offset: int) -> None:
        def read(stream: int) -> None:
            start = self.address + tensor.offset + offset
            self.device.driver.copy(address_of(out), start, out.size, CopyKind.TO_HOST, stream)

        self._transfer(f"get_tensor on {tensor.describe()}", read)

    def _set_tensor_2d(self, tensor: Tensor, data: Bytes, pieces: Pieces) -> None:
        if not can_pitch(pieces):
            super()._set_tensor_2d(tensor, data, pieces)
            return

        def write(stream: int) -> None:
            queue_write_2d(self, tensor, data, pieces, stream)

        self._transfer(f"set_tensor_2d on {tensor.describe()}", write)

    def _get_tensor_2d(self, tensor: Tensor, out: Bytes, pieces: Pieces) -> None:
        if not can_pitch(pieces):
            super()._get_tensor_2d(tensor, out, pieces)
            return

        def read(stream: int) -> None:
            queue_read_2d(self, tensor, out, pieces, stream)

        self._transfer(f"get_tensor_2d on {tensor.describe()}", read)

    def _memset_tensor(self, tensor: Tensor, value: int, offset: int, size: int) -> None:
        self._fill(value, tensor.offset + offset, size)

    def _clear(self, value: int) -> None:
        self._fill(value, 0, self.size)

    def _fill(self, value: int, offset: int, nbytes: int) -> None:
        driver = self.device.driver
        self._transfer(
            f"fill {nbytes:,} bytes on {self.name}",
            lambda stream: driver.fill(self.address + offset, value, nbytes, stream),
        )

    def _cpy_tensor(self, src: Tensor, dst: Tensor) -> bool:
        source = src.buffer
        if not isinstance(source, CudaBuffer) or overlap(src, dst):
            return False
        self._transfer(
            f"copy {src.describe()} to {dst.describe()}",
            lambda stream: queue_copy(src, dst, stream),
            source,
        )
        return True

    def _transfer(self, call: str, queue: Any, *others: CudaBuffer) -> None:
        """Queue a transfer after the work that uses the buffers, and wait for it."""
        device = self.device
        device.check_process(call)
        with cuda_errors(device.driver, call), device.on():
            stream = device.transfers
            for buffer in (self, *others):
                stream.wait_for(list(buffer.streams))
            queue(stream.handle)
            stream.synchronize()

    def _free(self) -> None:
        self._array = None
        self._memory = None


def can_pitch(pieces: Pieces) -> bool:
    """Whether a strided copy is one CUDA command: pieces do not overlap, and the pitch is within limits."""
    return all(pieces.size <= pitch < 1 << 31 for pitch in (pieces.stride_tensor, pieces.stride_data))


def queue_write_2d(buffer: CudaBuffer, tensor: Tensor, data: Bytes, pieces: Pieces, stream: int) -> None:
    """Queue a strided write into a tensor of the buffer."""
    to = buffer.address + tensor.offset + pieces.offset
    _, size, n, pitch, data_pitch = pieces
    buffer.device.driver.copy_2d(to, pitch, address_of(data), data_pitch, size, n, CopyKind.TO_DEVICE, stream)


def queue_read_2d(buffer: CudaBuffer, tensor: Tensor, out: Bytes, pieces: Pieces, stream: int) -> None:
    """Queue a strided read of a tensor of the buffer."""
    start = buffer.address + tensor.offset + pieces.offset
    _, size, n, pitch, data_pitch = pieces
    buffer.device.driver.copy_2d(address_of(out), data_pitch, start, pitch, size, n, CopyKind.TO_HOST, stream)


def queue_copy(src: Tensor, dst: Tensor, stream: int) -> None:
    """Queue a copy between tensors in CUDA buffers, of one device or two."""
    source, target = src.buffer, dst.buffer
    assert isinstance(source, CudaBuffer)
    assert isinstance(target, CudaBuffer)
    driver, here, there = target.device.driver, source.device.index, target.device.index
    start, to = source.address + src.offset, target.address + dst.offset
    if here == there:
        driver.copy(to, start, src.nbytes, CopyKind.ON_DEVICE, stream)
    else:
        driver.enable_peer(there, here)
        driver.enable_peer(here, there)
        driver.copy_peer(to, there, start, here, src.nbytes, stream)
