"""CUDA devices."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from contextlib import AbstractContextManager
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from ggmlb.backends.common.kinds import Kinds
from ggmlb.backends.cuda.backend import CudaBackend
from ggmlb.backends.cuda.buffer import ALIGNMENT, CudaBuffer, CudaBufferType
from ggmlb.backends.cuda.driver import cuda_errors, guard
from ggmlb.backends.cuda.lowering import Request, declines
from ggmlb.backends.cuda.stream import CudaEvent, DeviceMemory, Stream
from ggmlb.backends.gpu import Target
from ggmlb.backends.gpu.kinds import Lowered
from ggmlb.core.enums import DeviceType, Op
from ggmlb.core.errors import BackendError, BackendUnavailable, readable_size
from ggmlb.core.tensor import Tensor, spanned_bytes
from ggmlb.interface import Backend, Buffer, BufferType, Caps, Device
from ggmlb.interface.data import host_bytes
from ggmlb.parallel.row_split import SplitBufferType
from ggmlb.system import env

if TYPE_CHECKING:
    from ggmlb.backends.cuda import CudaReg
    from ggmlb.backends.cuda.driver import Driver
    from ggmlb.backends.cuda.host import CudaHostBufferType

WG = 128
"""Threads of a block, unless a kernel fixes it."""

MIN_OFFLOAD_COLUMNS = 32
"""Least columns of a product for which its weights are uploaded (ggml's threshold)."""


class CudaDevice(Device):
    """A CUDA card.

    Attributes:
        driver: The driver interface.
        index: CUDA's index among the visible devices.
        facts: Its properties.
        target: Parameters of the kernels' work split.
        transfers: The stream of synchronous transfers.
        memory_pool: The allocator of its memory.
        kinds: What its streams have lowered.
    """

    def __init__(self, reg: CudaReg, driver: Driver, index: int) -> None:
        self._reg = reg
        self.driver = driver
        self.index = index
        self.facts = driver.facts(index)
        self.target = Target(False, self.facts.n_units, WG)
        self.memory_pool = DeviceMemory(driver, index)
        self.kinds: Kinds[Lowered[tuple[Request, Hashable]]] = Kinds()
        self._transfers: Stream | None = None
        self._buffer_type = CudaBufferType(self)

    def on(self) -> AbstractContextManager[None]:
        """Context manager that makes it this thread's current device."""
        return self.driver.on(self.index)

    @property
    def transfers(self) -> Stream:
        """The stream of synchronous transfers; created at first use, because it needs memory on the card."""
        if self._transfers is None:
            self._transfers = self.open_stream()
        return self._transfers

    def open_stream(self) -> Stream:
        """Return a new stream."""
        stream = Stream(self.driver, self.index)
        self.memory_pool.streams.add(stream)
        return stream

    @cached_property
    def has_blas(self) -> bool:
        """Whether cuBLAS can be loaded; if not, kernels compute all products."""
        try:
            self.blas_library()
        except BackendUnavailable:
            return False
        return True

    def blas_library(self) -> Any:
        """Return cuBLAS.

        Raises:
            BackendUnavailable: It cannot be loaded.
        """
        return self.driver.blas()

    def check_process(self, call: str) -> None:
        """Raise a BackendError in a process forked after CUDA was used, and at exit."""
        guard.check(call)

    # -- facts ---------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """`CUDA0`, and so on."""
        return f"CUDA{self.index}"

    @property
    def description(self) -> str:
        """The card's name, its compute capability and its memory."""
        capability = f"{self.facts.capability // 10}.{self.facts.capability % 10}"
        return f"{self.facts.name} (compute capability {capability}, {readable_size(self.facts.nbytes)})"

    @property
    def type(self) -> DeviceType:
        """GPU; IGPU where it shares the host's memory."""
        return DeviceType.IGPU if self.facts.is_integrated else DeviceType.GPU

    @property
    def memory(self) -> tuple[int, int]:
        """Free and total memory as reported by the driver, over all processes [bytes]."""
        with cuda_errors(self.driver, f"query the memory of {self.name}"):
            self.memory_pool.sweep()
            return self.driver.memory_info(self.index)

    @property
    def device_id(self) -> str:
        """The PCI bus id, as `0000:01:00.0`."""
        return self.facts.pci_bus_id

    @property
    def caps(self) -> Caps:
        """All except `mmap_support`; `buffer_from_host_ptr` with GGMLB_CUDA_REGISTER_HOST=1."""
        may_lock = env.flag("GGMLB_CUDA_REGISTER_HOST", default=False)
        return Caps(async_=True, host_buffer=True, buffer_from_host_ptr=may_lock, events=True)

    @property
    def reg(self) -> CudaReg:
        """The registration `CUDA`."""
        return self._reg

    # -- what it gives -------------------------------------------------------------------------

    def init_backend(self, params: Mapping[str, Any] | None = None) -> Backend:
        """Open a stream.

        Args:
            params: There are none.

        Raises:
            ArgumentError: A parameter was given.
            BackendError: The stream cannot be made.
        """
        self.check_params(params)
        self.check_process(f"open a stream on {self.name}")
        return CudaBackend(self)

    @property
    def buffer_type(self) -> BufferType:
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
        self.check_process(f"buffer_from_host_ptr on {self.name}")
        buft = self.host_buffer_type
        return buft.registrations.buffer(buft, host_bytes(array, "buffer_from_host_ptr"))

    def adopt(self, array: Any) -> tuple[Buffer, int] | None:
        """Use the memory of an array on this device with `__cuda_array_interface__`, such as CuPy's.

        Waits for work on the stream that the array names.
        """
        interface = getattr(array, "__cuda_array_interface__", None)
        if interface is None:
            return None
        address, driver = interface["data"][0], self.driver
        if not address:
            return CudaBuffer(self._buffer_type, 0, 0, array), 0
        self.check_process(f"use an array's memory on {self.name}")
        with cuda_errors(driver, f"use an array's memory on {self.name}"), self.on():
            if driver.device_of(address) != self.index:
                return None
            if interface.get("stream"):
                driver.stream_synchronize(interface["stream"])
        # Kernels check the alignment of offsets, and assume that of buffers.
        offset = address % ALIGNMENT
        return CudaBuffer(self._buffer_type, address - offset, offset + spanned_bytes(array), array), offset

    def event_new(self) -> CudaEvent:
        """Return an event to record on the device's streams."""
        self.check_process(f"create an event on {self.name}")
        return CudaEvent(self)

    # -- what it can do ------------------------------------------------------------------------

    def declines(self, op: Tensor) -> str | None:
        """Return why the node cannot be computed, from the tables used for lowering."""
        return declines(op, self.target)

    def supports_buft(self, buft: BufferType) -> bool:
        """Whether it is the card's memory, or split memory with it as main device."""
        return buft is self._buffer_type or (isinstance(buft, SplitBufferType) and buft.device is self)

    def offload_op(self, op: Tensor) -> bool:
        """Whether the card has dedicated memory, and the node is a product with many columns."""
        if self.type is not DeviceType.GPU:
            return False
        n_columns = op.ne[2] if op.op is Op.MUL_MAT_ID else op.ne[1]
        return op.op in (Op.MUL_MAT, Op.MUL_MAT_ID) and n_columns >= MIN_OFFLOAD_COLUMNS
