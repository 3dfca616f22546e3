"""Host memory: NumPy arrays of bytes, allocated here or given by the caller."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ggmlb.errors import BackendError
from ggmlb.interface import Buffer, BufferType
from ggmlb.interface.data import host_bytes

if TYPE_CHECKING:
    from ggmlb.backends.cpu.device import CpuDevice
    from ggmlb.interface.data import Bytes
    from ggmlb.tensor import Tensor

ALIGNMENT = 64
"""Bytes: a cache line, and the widest vector register."""


def aligned_empty(nbytes: int) -> Bytes:
    """Return `nbytes` of fresh memory that begins at a multiple of `ALIGNMENT`.

    Raises:
        MemoryError: There is no room.
    """
    memory = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + nbytes]


class CpuBuffer(Buffer):
    """Bytes in host memory; read-only if the array that it was made of is."""

    def __init__(self, buft: BufferType, memory: Bytes) -> None:
        super().__init__(buft, memory.size)
        self._base = memory

    @property
    def base(self) -> Any:
        """The memory as a flat uint8 array."""
        return self._base

    def _set_tensor(self, tensor: Tensor, data: Bytes, offset: int) -> None:
        start = tensor.offset + offset
        self._writable(tensor)[start : start + data.size] = data

    def _get_tensor(self, tensor: Tensor, out: Bytes, offset: int) -> None:
        start = tensor.offset + offset
        out[:] = self._base[start : start + out.size]

    def _memset_tensor(self, tensor: Tensor, value: int, offset: int, size: int) -> None:
        start = tensor.offset + offset
        self._writable(tensor)[start : start + size] = value

    def _clear(self, value: int) -> None:
        self._writable()[:] = value

    def _cpy_tensor(self, src: Tensor, dst: Tensor) -> bool:
        if src.buffer is None or not src.buffer.is_host:
            return False
        source = src.buffer.base[src.offset : src.offset + src.nbytes]
        self._writable(dst)[dst.offset : dst.offset + dst.nbytes] = source
        return True

    def _free(self) -> None:
        self._base = np.empty(0, np.uint8)

    def _writable(self, tensor: Tensor | None = None) -> Bytes:
        if not self._base.flags.writeable:
            what = "clear" if tensor is None else f"write to {tensor.describe()}"
            raise BackendError(
                f"cannot {what}: the buffer of {self.size:,} bytes lies over read-only host memory; "
                "copy the data into a buffer of your own first"
            )
        return self._base


class CpuBufferType(BufferType):
    """Plain host memory."""

    def __init__(self, device: CpuDevice) -> None:
        self._device = device

    @property
    def name(self) -> str:
        """`CPU`."""
        return "CPU"

    @property
    def device(self) -> CpuDevice:
        """The CPU."""
        return self._device

    @property
    def alignment(self) -> int:
        """64 bytes."""
        return ALIGNMENT

    @property
    def is_host(self) -> bool:
        """Always."""
        return True

    def _alloc_buffer(self, nbytes: int) -> Buffer:
        try:
            return CpuBuffer(self, aligned_empty(nbytes))
        except (MemoryError, ValueError) as error:  # ValueError: more than an array's indices can count
            raise self.out_of_memory(nbytes, str(error)) from None


def cpu_buffer_type() -> BufferType:
    """Return the type of plain host memory (ggml_backend_cpu_buffer_type)."""
    from ggmlb.backends.cpu.device import backend_reg

    return backend_reg().devices[0].buffer_type


def cpu_buffer_from_ptr(array: npt.NDArray[Any]) -> Buffer:
    """Use the memory of a contiguous NumPy array or memory map as a buffer, without a copy.

    Args:
        array: Kept alive by the buffer. If it is read-only, writing to the buffer raises BackendError.

    Raises:
        ArgumentError: The array is not C-contiguous.

    Source: ggml_backend_cpu_buffer_from_ptr.
    """
    return CpuBuffer(cpu_buffer_type(), host_bytes(array, "cpu_buffer_from_ptr"))
