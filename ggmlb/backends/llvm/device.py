"""LlvmDevice: the host's processor, with compiled kernels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy.typing as npt

from ggmlb.backends.common.kinds import Kinds
from ggmlb.backends.cpu import backend_reg
from ggmlb.backends.llvm.backend import LlvmBackend
from ggmlb.backends.llvm.codegen.library import library
from ggmlb.backends.llvm.lowering.context import RULES, LoweredSteps
from ggmlb.backends.llvm.repacked_buffer import RepackedBufferType
from ggmlb.core.enums import DeviceType
from ggmlb.core.tensor import Tensor
from ggmlb.interface import Backend, BackendReg, Buffer, BufferType, Caps, Device
from ggmlb.system.process import n_cpus


class LlvmDevice(Device):
    """The processor as a device that computes in the CPU's buffer type.

    Attributes:
        kinds: Cache of lowered steps, by kind of node or group.
    """

    name = "LLVM"
    type = DeviceType.ACCEL

    def __init__(self, reg: BackendReg) -> None:
        self._reg = reg
        self._cpu = backend_reg().devices[0]
        self._repacked = RepackedBufferType(self)
        self.kinds: Kinds[LoweredSteps] = Kinds()

    @property
    def description(self) -> str:
        """Name of the processor, and the instruction set of the kernels."""
        return f"{self._cpu.description}, {library().target.level.name} kernels"

    @property
    def memory(self) -> tuple[int, int]:
        """Free and total memory of the host [bytes]."""
        return self._cpu.memory

    @property
    def caps(self) -> Caps:
        """Capabilities of the CPU device, whose memory it shares."""
        return self._cpu.caps

    @property
    def reg(self) -> BackendReg:
        """The registry entry `LLVM`."""
        return self._reg

    def init_backend(self, params: Mapping[str, Any] | None = None) -> Backend:
        """Open a stream.

        Args:
            params: `n_threads` (default: the CPUs that the process may use), and `simd`, the instruction set
                (default: the widest; see `llvm.codegen.host.LEVELS`).

        Raises:
            ArgumentError: An unknown parameter, less than one thread, or an unsupported instruction set.
        """
        params = self.check_params(params, "n_threads", "simd")
        n_threads = params.get("n_threads")
        return LlvmBackend(self, n_cpus() if n_threads is None else n_threads, library(params.get("simd")))

    @property
    def buffer_type(self) -> BufferType:
        """The CPU's buffer type, so that a scheduler needs no copies."""
        return self._cpu.buffer_type

    def buffer_from_host_ptr(self, array: npt.NDArray[Any], max_tensor_size: int = 0) -> Buffer:
        """Use the memory of a NumPy array or memory map as a buffer; see `Device.buffer_from_host_ptr`."""
        return self._cpu.buffer_from_host_ptr(array, max_tensor_size)

    def declines(self, op: Tensor) -> str | None:
        """Return why no kernel can compute the node, or `None`, by the rules also used for lowering."""
        return RULES.declines(op) or self._repacked.declines(op)

    def supports_buft(self, buft: BufferType) -> bool:
        """Whether the device computes in the buffer type: any host memory, or one of its `extra_bufts`."""
        return buft.is_host or buft in self.extra_bufts

    @property
    def extra_bufts(self) -> tuple[BufferType, ...]:
        """`LLVM_Repacked`, which stores weights in strips of 16 interleaved rows."""
        return (self._repacked,)
