"""The CPU backend, over NumPy: the reference that the other backends are compared with."""

from ggmlb.backends.cpu.backend import CpuBackend
from ggmlb.backends.cpu.buffer import CpuBuffer, CpuBufferType, cpu_buffer_from_ptr, cpu_buffer_type
from ggmlb.backends.cpu.device import CpuDevice, CpuReg, backend_reg

__all__ = [
    "CpuBackend",
    "CpuBuffer",
    "CpuBufferType",
    "CpuDevice",
    "CpuReg",
    "backend_reg",
    "cpu_buffer_from_ptr",
    "cpu_buffer_type",
]
