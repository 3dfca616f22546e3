"""CpuDevice and its registration."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ggmlb.backends.common.kinds import Kinds
from ggmlb.backends.common.rules import Rules
from ggmlb.backends.cpu.float_buffer import FloatBufferType
from ggmlb.core.arguments import checked
from ggmlb.core.enums import DeviceType
from ggmlb.core.tensor import Tensor, spanned
from ggmlb.interface import Backend, BackendReg, Buffer, BufferType, Caps, Device
from ggmlb.interface.data import host_bytes
from ggmlb.interface.host import ALIGNMENT, MAPPED_ALIGNMENT, HostBuffer, HostBufferType
from ggmlb.interface.procs import dev_get_extra_bufts, set_abort_callback, set_n_threads
from ggmlb.system.process import n_cpus


class CpuDevice(Device):
    """The processor that Python runs on.

    Attributes:
        kinds: Cache of lowered nodes, shared by its streams.
    """

    name = "CPU"
    type = DeviceType.CPU
    caps = Caps(buffer_from_host_ptr=True, mmap_support=True)

    def __init__(self, reg: CpuReg) -> None:
        self._reg = reg
        self.kinds: Kinds[Any] = Kinds()
        self._buffer_type = HostBufferType(self, "CPU", ALIGNMENT)
        self._mapped_buffer_type = HostBufferType(self, "CPU_Mapped", MAPPED_ALIGNMENT)
        self._float_buffer_type = FloatBufferType(self)
        self._description = _description()

    @property
    def description(self) -> str:
        """The processor's model name as reported by the operating system."""
        return self._description

    @property
    def memory(self) -> tuple[int, int]:
        """Available and total memory of the machine [bytes]; 0 if unknown."""
        return _memory()

    @property
    def reg(self) -> CpuReg:
        """The registration `CPU`."""
        return self._reg

    def init_backend(self, params: Mapping[str, Any] | None = None) -> Backend:
        """Open a stream.

        Args:
            params: `n_threads`: number of threads; by default one per CPU that the process may use.

        Raises:
            ArgumentError: An unknown parameter, or less than one thread.
        """
        from ggmlb.backends.cpu.backend import CpuBackend  # other devices use only its memory

        n_threads = self.check_params(params, "n_threads").get("n_threads")
        backend = CpuBackend(self, n_cpus())
        if n_threads is not None:
            backend.set_n_threads(n_threads)
        return backend

    @property
    def buffer_type(self) -> BufferType:
        """Plain host memory, the CPU's default buffer type."""
        return self._buffer_type

    def buffer_from_host_ptr(self, array: npt.NDArray[Any], max_tensor_size: int = 0) -> Buffer:
        """Use the memory of a NumPy array or memory map as a buffer; see `Device.buffer_from_host_ptr`.

        Its type is `CPU_Mapped`, in which tensors begin at multiples of 32 bytes, as in GGUF files.
        """
        return HostBuffer(self._mapped_buffer_type, host_bytes(array, "buffer_from_host_ptr"))

    def adopt(self, array: Any) -> tuple[Buffer, int] | None:
        """Wrap a NumPy array, strided or not, as a buffer without a copy."""
        if not isinstance(array, np.ndarray) or array.dtype.hasobject:
            return None
        return HostBuffer(self._buffer_type, spanned(array)), 0

    def declines(self, op: Tensor) -> str | None:
        """Return why the node cannot be computed, or `None` if it can."""
        why = self._rules.declines(op)
        if why is None and self._float_buffer_type.is_used:
            return self._float_buffer_type.declines(op)
        return why

    @cached_property
    def _rules(self) -> Rules[Any]:
        import ggmlb.backends.cpu.ops  # fills the table

        return ggmlb.backends.cpu.lowering.RULES

    def supports_buft(self, buft: BufferType) -> bool:
        """Whether the CPU can read memory of a type: any host memory, and its extra buffer types."""
        return buft.is_host or buft in self.extra_bufts

    @property
    def extra_bufts(self) -> tuple[BufferType, ...]:
        """`CPU_F32`, which dequantises weights at upload (ggml_backend_dev_get_extra_bufts)."""
        return (self._float_buffer_type,)


class CpuReg(BackendReg):
    """The registration of the CPU."""

    name = "CPU"

    def __init__(self) -> None:
        self._devices = (CpuDevice(self),)

    @property
    def devices(self) -> Sequence[Device]:
        """The CPU as a single device."""
        return self._devices

    def _procs(self) -> Mapping[str, Callable[..., Any]]:
        return {
            "set_n_threads": set_n_threads,
            "set_abort_callback": set_abort_callback,
            "get_features": _features,
            "dev_get_extra_bufts": dev_get_extra_bufts,
        }


@cache
def backend_reg() -> CpuReg:
    """Return the CPU's registration; the registry of backends calls this."""
    return CpuReg()


@checked
def _features(reg: BackendReg) -> list[tuple[str, str]]:
    """Return NumPy's version, BLAS and instruction sets."""
    config: Any = np.show_config(mode="dicts")
    blas = config["Build Dependencies"]["blas"]
    simd = config["SIMD Extensions"]
    return [
        ("NUMPY", np.__version__),
        ("BLAS", f"{blas['name']} {blas['version']}"),
        *((name, "1") for name in (*simd.get("baseline", ()), *simd.get("found", ()))),
    ]


def _lines_of(file: str) -> list[str]:
    """Return the lines of a file of Linux; none if it cannot be read."""
    try:
        return Path(file).read_text(errors="replace").splitlines()
    except OSError:
        return []


def _description() -> str:
    for line in _lines_of("/proc/cpuinfo"):
        if line.startswith(("model name", "Model")):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine() or "CPU"


def _memory() -> tuple[int, int]:
    lines = _lines_of("/proc/meminfo")
    if lines:
        kib = {k: int(v.split()[0]) for k, _, v in (line.partition(":") for line in lines)}
        return kib.get("MemAvailable", 0) * 1024, kib.get("MemTotal", 0) * 1024
    try:
        page = os.sysconf("SC_PAGE_SIZE")
        return os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page
    except (AttributeError, ValueError, OSError):
        return 0, 0
