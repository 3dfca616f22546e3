"""The CPU backend, over NumPy: the reference that the other backends are compared with."""

from ggmlb.backends.cpu.device import CpuDevice, CpuReg, backend_reg

__all__ = [
    "CpuDevice",
    "CpuReg",
    "backend_reg",
]
