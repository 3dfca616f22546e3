"""CUDA devices."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from ggmlb.backends.cuda.backend import CudaBackend
from ggmlb.backends.cuda.buffer import ALIGNMENT, CudaBuffer, CudaBufferType, CudaHostBufferType
from ggmlb.backends.cuda.driver import cuda_errors, guard
from ggmlb.backends.cuda.lowering import declines
from ggmlb.backends.cuda.stream import CudaEvent, DeviceMemory, Stream
from ggmlb.backends.gpu import Target
from ggmlb.backends.gpu.device import GpuDevice
from ggmlb.core.enums import DeviceType
from ggmlb.core.errors import BackendError, BackendUnavailable, readable_size
from ggmlb.core.tensor import Tensor, spanned_bytes
from ggmlb.interface import Backend, Buffer, Caps
from ggmlb.interface.data import host_bytes
from ggmlb.system import env

if TYPE_CHECKING:
    from ggmlb.backends.cuda import CudaReg
    from ggmlb.backends.cuda.cupy_driver import CupyDriver

WG = 128
"""Threads of a block, unless a kernel fixes it."""

MAX_GROUPS = 65535
"""CUDA's limit of a grid's second and third extents."""


class CudaDevice(GpuDevice):
    """A CUDA card.

    Attributes:
        driver: The driver interface.
        index: CUDA's index among the visible devices.
        facts: Its properties.
        transfers: The stream of synchronous transfers.
        memory_pool: The allocator of its memory.
        peers: The direct copies between the registration's devices.
    """

    _reg: CudaReg

    def __init__(self, reg: CudaReg, driver: CupyDriver, index: int) -> None:
        super().__init__(reg, f"CUDA{index}")
        self.driver = driver
        self.index = index
        self.facts = driver.facts(index)
        self.memory_pool = DeviceMemory(driver, index)
        self.peers = reg.peers
        self._transfers: Stream | None = None
        self._buffer_type = CudaBufferType(self)
        self._own_types = (self._buffer_type,)

    def on(self) -> AbstractContextManager[None]:
        """Context manager that makes the card this thread's current device."""
        return self.driver.on(self.index)

    @property
    def transfers(self) -> Stream:
        """The CUDA stream of synchronous transfers; created at first use, as it needs device memory."""
        if self._transfers is None:
            self._transfers = self.open_stream()
        return self._transfers

    def open_stream(self) -> Stream:
        """Return a new CUDA stream of the card."""
        stream = Stream(self.driver, self.index)
        self.memory_pool.streams.add(stream)
        return stream

    @cached_property
    def target(self) -> Target:
        """Properties of the card that decide how nodes are lowered: multiprocessors, block size, limits."""
        facts = self.facts
        return Target(
            False,
            facts.n_units,
            WG,
            max_groups=MAX_GROUPS,
            blas=self.has_blas,
            tf32=env.flag("GGMLB_CUDA_TF32", default=False),
            capability=facts.capability,
            shared=facts.shared,
        )

    @cached_property
    def has_blas(self) -> bool:
        """Whether cuBLAS can be loaded; if not, kernels compute all matrix products."""
        try:
            self.blas_library()
        except BackendUnavailable:
            return False
        return True

    def blas_library(self) -> Any:
        """Return cuBLAS's functions, loaded by ctypes.

        Raises:
            BackendUnavailable: It cannot be loaded.
        """
        return self.driver.blas()

    # -- facts ---------------------------------------------------------------------------------

    @property
    def description(self) -> str:
        """The card's name, its compute capability and its memory."""
        capability = f"{self.facts.capability // 10}.{self.facts.capability % 10}"
        return f"{self.facts.name} (compute capability {capability}, {readable_size(self.facts.nbytes)})"

    @property
    def type(self) -> DeviceType:
        """GPU; or IGPU if the card shares the host's memory."""
        return DeviceType.IGPU if self.facts.is_integrated else DeviceType.GPU

    @property
    def memory(self) -> tuple[int, int]:
        """Free and total memory as reported by the driver, over all processes [bytes]."""
        with cuda_errors(self.driver, f"query the memory of {self.name}"):
            self.memory_pool.sweep()
            return self.driver.memory_info(self.index)

    @property
    def device_id(self) -> str:
        """The card's PCI bus id, such as `0000:01:00.0`."""
        return self.facts.pci_bus_id

    @property
    def caps(self) -> Caps:
        """Capabilities: all but `mmap_support`; `buffer_from_host_ptr` if GGMLB_CUDA_REGISTER_HOST=1."""
        may_lock = env.flag("GGMLB_CUDA_REGISTER_HOST", default=False)
        return Caps(async_=True, host_buffer=True, buffer_from_host_ptr=may_lock, events=True)

    # -- buffers and streams --------------------------------------------------------------------

    def init_backend(self, params: Mapping[str, Any] | None = None) -> Backend:
        """Open a stream.

        Args:
            params: None are accepted.

        Raises:
            ArgumentError: A parameter was given.
            BackendError: The stream cannot be made.
        """
        self.check_params(params)
        return CudaBackend(self)

    @property
    def buffer_type(self) -> CudaBufferType:
        """The card's memory."""
        return self._buffer_type

    @property
    def host_buffer_type(self) -> CudaHostBufferType:
        """`CUDA_Host`, one for all cards."""
        return self._reg.host_buffer_type

    def buffer_from_host_ptr(self, array: npt.NDArray[Any], max_tensor_size: int = 0) -> Buffer:
        """Page-lock a NumPy array's memory, memory maps included, and use it as a `CUDA_Host` buffer.

        Only the CPU computes in it; copies between it and the card are fast.

        Raises:
            ArgumentError: The array is not contiguous.
            BackendError: GGMLB_CUDA_REGISTER_HOST is not 1.

        Source: ggml_backend_cuda_register_host_buffer.
        """
        if not self.caps.buffer_from_host_ptr:
            raise BackendError(
                f"buffer_from_host_ptr: {self.name} page-locks a caller's memory only with "
                "GGMLB_CUDA_REGISTER_HOST=1; set it, or allocate a buffer and copy into it"
            )
        guard.check(f"buffer_from_host_ptr on {self.name}")
        buft = self.host_buffer_type
        return buft.registrations.buffer(buft, host_bytes(array, "buffer_from_host_ptr"))

    def adopt(self, array: Any) -> tuple[Buffer, int] | None:
        """Wrap an array on this device with `__cuda_array_interface__`, such as CuPy's, without a copy.

        Waits for the array's stream, if it has one.
        """
        interface = getattr(array, "__cuda_array_interface__", None)
        if interface is None:
            return None
        address, driver = interface["data"][0], self.driver
        if not address:
            return CudaBuffer(self._buffer_type, 0, 0, array), 0
        with cuda_errors(driver, f"use an array's memory on {self.name}"), self.on():
            if driver.device_of(address) != self.index:
                return None
            if interface.get("stream"):
                driver.stream_synchronize(interface["stream"])
        # Kernels check the alignment of offsets, and assume that of buffers.
        offset = address % ALIGNMENT
        return CudaBuffer(self._buffer_type, address - offset, offset + spanned_bytes(array), array), offset

    def event_new(self) -> CudaEvent:
        """Return a new event, which the device's streams can record."""
        return CudaEvent(self)

    # -- supported ops -------------------------------------------------------------------------

    def declines(self, op: Tensor) -> str | None:
        """Return why the node cannot be computed, or `None` if it can."""
        return declines(op, self.target)
