"""GpuBuffer and PinnedBuffer: base classes of the CUDA and OpenCL buffers."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from typing import TYPE_CHECKING

import numpy as np

from ggmlb.core.errors import AllocationError
from ggmlb.interface import Buffer
from ggmlb.interface.host import HostBuffer, HostBufferType, allocate

if TYPE_CHECKING:
    from ggmlb.backends.gpu.device import GpuDevice
    from ggmlb.core.tensor import Tensor
    from ggmlb.interface.data import Bytes


class GpuBuffer(Buffer):
    """Base class of buffers in the memory of a GPU or OpenCL device.

    Synchronous transfers run on the device's stream for transfers, after queued work that uses this buffer,
    and independent of other work.

    Attributes:
        device: The device it belongs to.
    """

    device: GpuDevice

    @abstractmethod
    def can_copy(self, src: Tensor, dst: Tensor) -> bool:
        """Whether one command can copy `src`, in any buffer, to `dst`, in this buffer."""

    @abstractmethod
    def _copy_from(self, src: Tensor, dst: Tensor) -> None:
        """Copy between tensors for which `can_copy` is true, and wait for it."""

    @abstractmethod
    def _fill(self, value: int, offset: int, nbytes: int) -> None:
        """Set bytes to a value, and wait for it."""

    def _memset_tensor(self, tensor: Tensor, value: int, offset: int, size: int) -> None:
        self._fill(value, tensor.offset + offset, size)

    def _clear(self, value: int) -> None:
        self._fill(value, 0, self.size)

    def _cpy_tensor(self, src: Tensor, dst: Tensor) -> bool:
        if not self.can_copy(src, dst):
            return False
        self._copy_from(src, dst)
        return True


class PinnedBufferType(HostBufferType):
    """Page-locked host memory, for fast transfers.

    It is aligned like the device's memory, so that tensors have equal offsets in both.
    """

    def _alloc_buffer(self, nbytes: int) -> PinnedBuffer:
        if not nbytes:
            return PinnedBuffer(self, np.empty(0, np.uint8))
        try:
            return PinnedBuffer(self, self._pinned(nbytes))
        except AllocationError as error:  # systems limit the locked memory of a process
            warnings.warn(
                f"{self.name}: the runtime gave no pinned memory for {nbytes:,} bytes; "
                "pageable memory is used, with slower transfers",
                RuntimeWarning,
                stacklevel=3,
            )
            return PinnedBuffer(self, allocate(self, nbytes), str(error))

    @abstractmethod
    def _pinned(self, nbytes: int) -> Bytes:
        """Return page-locked memory as a flat array.

        Raises:
            AllocationError: The system allows no more.
        """


class PinnedBuffer(HostBuffer):
    """A buffer in page-locked host memory, which a running transfer keeps allocated, also after `free`.

    Attributes:
        why_not_pinned: Why it is pageable memory, of which transfers may block; or `None`.
    """

    def __init__(self, buft: PinnedBufferType, array: Bytes, why_not_pinned: str | None = None) -> None:
        super().__init__(buft, array)
        self.why_not_pinned = why_not_pinned
