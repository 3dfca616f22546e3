"""Memory for tests of the allocators: host memory with chosen limits and failures."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, NoReturn

import numpy as np

from ggmlb.core.enums import DeviceType
from ggmlb.core.errors import BackendError
from ggmlb.core.tensor import Tensor
from ggmlb.interface import BackendReg, Buffer, BufferType, Device
from ggmlb.interface.host import HostBuffer, HostBufferType

POISON = 0xFF
"""Byte that fills new memory: NaN in every float type, -1 in every integer type."""


class TestMemory(HostBufferType):
    """Host memory with chosen limits, poisoned when allocated.

    Args:
        name: Name of the buffer type.
        alignment: Alignment of tensors [bytes].
        max_size: Largest buffer [bytes].
        capacity: Bytes in all.

    Attributes:
        used: Bytes allocated now.
        n_buffers: Buffers allocated and not freed.
        n_calls: Number of allocations tried so far.
        fail_at: The allocation that fails, by `n_calls`; -1 for none.
    """

    __test__ = False  # pytest: this is no test case

    def __init__(
        self, name: str = "Test", *, alignment: int = 32, max_size: int = sys.maxsize, capacity: int = 1 << 30
    ) -> None:
        super().__init__(_MemoryDevice(self), name, alignment)
        self._max_size = max_size
        self.capacity = capacity
        self.used = 0
        self.n_buffers = 0
        self.n_calls = 0
        self.fail_at = -1

    @property
    def max_size(self) -> int:
        """The limit given to the constructor [bytes]."""
        return self._max_size

    def _alloc_buffer(self, nbytes: int) -> Buffer:
        call = self.n_calls
        self.n_calls += 1
        if call == self.fail_at:
            raise self.out_of_memory(nbytes, "the test asked for this failure")
        if self.used + nbytes > self.capacity:
            raise self.out_of_memory(nbytes)
        self.used += nbytes
        self.n_buffers += 1
        return TestBuffer(self, nbytes)


class TestBuffer(HostBuffer):
    """A poisoned buffer of NumPy memory."""

    __test__ = False
    buft: TestMemory

    def __init__(self, buft: TestMemory, size: int) -> None:
        super().__init__(buft, np.full(size, POISON, np.uint8))

    def _free(self) -> None:
        super()._free()
        self.buft.used -= self.size
        self.buft.n_buffers -= 1


class _MemoryDevice(Device):
    """The device of a `TestMemory`, which reports free memory."""

    description = "memory for tests"
    type = DeviceType.CPU

    def __init__(self, buft: TestMemory) -> None:
        self._buft = buft

    @property
    def name(self) -> str:
        return self._buft.name

    @property
    def memory(self) -> tuple[int, int]:
        return self._buft.capacity - self._buft.used, self._buft.capacity

    @property
    def reg(self) -> BackendReg:
        self._fail()

    @property
    def buffer_type(self) -> BufferType:
        return self._buft

    def init_backend(self, params: Mapping[str, Any] | None = None) -> NoReturn:
        self._fail()

    def declines(self, op: Tensor) -> str:
        return "it has memory only"

    def _fail(self) -> NoReturn:
        raise BackendError(f"{self.name} is memory for tests, without a backend")
