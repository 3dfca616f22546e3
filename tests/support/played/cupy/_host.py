"""What the played CuPy stands on: one played driver for the process, and libraries by their files' names."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from ggmlb.backends.cuda.kernels import PACKAGE
from ggmlb.backends.gpu import Defines, Kernel, source
from ggmlb.backends.gpu.source import kernels
from ggmlb.interface.data import Bytes
from tests.support.host_driver import HostDriver
from tests.support.host_streams import HostError, Op

__all__ = ["FUNCTIONS", "HOST", "HostError", "Op", "function_of", "raw"]

HOST = HostDriver(n_devices=int(os.environ.get("PLAYED_CARDS", "1")), capacity=8 << 30)

FUNCTIONS: dict[int, tuple[Kernel, Defines, int]] = {}
"""What a function's handle stands for."""

_KERNELS = kernels() | kernels(PACKAGE)


def function_of(code: str, name: str) -> Any:
    """Return a kernel of a text as CuPy does; it is built with the macros before the kernel's own text."""
    own = source(_KERNELS[name], "cuda")
    assert code.endswith(own), f"the text of {name} is not the kernel's"
    macros = [line.removeprefix("#define ").split(" ", 1) for line in code[: -len(own)].splitlines()]
    *defines, (wg, size) = [(key, value) for key, value in macros]
    assert wg == "WG"
    FUNCTIONS[handle := 0xF000 + len(FUNCTIONS)] = _KERNELS[name], tuple(defines), int(size)
    return SimpleNamespace(kernel=SimpleNamespace(ptr=handle))


def raw(address: int, nbytes: int) -> Bytes:
    """View memory by its address."""
    memory: Any = (ctypes.c_ubyte * nbytes).from_address(address) if nbytes else b""
    return np.frombuffer(memory, np.uint8)


def _exec_update(executable: Any, graph: Any, outcome: Any) -> int:
    return 0 if HOST.exec_update(executable.value, graph.value) else 910


_load = ctypes.CDLL


def _played(name: Any, *args: Any, **options: Any) -> Any:
    """Load a library, but for those of CUDA that the backend loads itself."""
    is_ours = sys._getframe(1).f_globals.get("__name__", "").startswith("ggmlb.")
    file = Path(name).name if is_ours and isinstance(name, str) else ""
    if file.startswith("libcuda.so"):
        return SimpleNamespace(cuGraphExecUpdate_v2=_exec_update)
    return HOST.blas() if file.startswith("libcublas.so") else _load(name, *args, **options)


ctypes.CDLL = _played  # type: ignore[assignment,misc]
