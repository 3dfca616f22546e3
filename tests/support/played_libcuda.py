"""A libcuda.so.1 whose functions are answered in Python: what is above it runs as it is, with no card.

Each of its symbols jumps to a callback. It is loaded before anything asks for libcuda.so.1, which the
loader then finds by that name: CuPy's `cupy.cuda.driver`, and ctypes.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import tempfile
import traceback
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from tests.support.host_streams import HostError

NOT_SUPPORTED, UNKNOWN = 801, 999

SYMBOLS = (
    "cuInit", "cuGetExportTable", "cuGetErrorName", "cuGetErrorString",
    "cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuCtxGetCurrent", "cuCtxSetCurrent",
    "cuStreamCreate", "cuStreamDestroy_v2", "cuStreamSynchronize", "cuStreamQuery", "cuStreamWaitEvent",
    "cuEventCreate", "cuEventDestroy_v2", "cuEventRecord", "cuEventQuery", "cuEventSynchronize",
    "cuEventElapsedTime",
    "cuStreamBeginCapture_v2", "cuStreamEndCapture", "cuGraphDestroy", "cuGraphInstantiateWithFlags",
    "cuGraphExecUpdate_v2", "cuGraphLaunch", "cuGraphExecDestroy",
    "cuLaunchKernel", "cuLaunchKernelEx", "cuFuncGetAttribute", "cuFuncSetAttribute",
    "cuOccupancyMaxActiveBlocksPerMultiprocessor",
)  # fmt: skip

# Eleven words, the most that a function takes: a callback reads as many as it has, each as wide as it is.
SOURCE = "#define WORDS(T) T a, T b, T c, T d, T e, T f, T g, T h, T i, T j, T k\n" + "".join(
    f"int (*answer_{name})(WORDS(long));\n"
    f"int {name}(WORDS(long)) {{\n"
    f"    return answer_{name} ? answer_{name}(a, b, c, d, e, f, g, h, i, j, k) : {NOT_SUPPORTED};\n"
    "}\n"
    for name in SYMBOLS
)

_kept: list[Any] = []


@cache
def library() -> ctypes.CDLL:
    """Compile the library, once for each text of it, and load it for the whole process."""
    folder = Path(tempfile.gettempdir()) / f"ggmlb-played-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    file = folder / f"{hashlib.sha256(SOURCE.encode()).hexdigest()[:16]}.so"
    if not file.exists():
        new = file.with_suffix(f".{os.getpid()}")
        options = ("-x", "c", "-", "-O1", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", str(new))
        subprocess.run(["cc", *options], input=SOURCE, text=True, check=True)
        new.replace(file)  # other processes may do the same
    return ctypes.CDLL(str(file))


def answer(name: str, function: Callable[..., int | None], *kinds: Any) -> None:
    """Let a function answer a symbol's calls: it returns a status, or nothing, or raises `HostError`."""

    def call(*args: Any) -> int:
        try:
            return function(*(arg or 0 for arg in args)) or 0  # ctypes gives `None` for a null pointer
        except HostError as error:
            return error.status
        except BaseException:
            traceback.print_exc()  # nothing above C catches it: the caller is told of an unknown error
            return UNKNOWN

    callback = ctypes.CFUNCTYPE(ctypes.c_int, *kinds)(call)
    _kept.append(callback)
    slot = ctypes.c_void_p.in_dll(library(), f"answer_{name}")
    slot.value = ctypes.cast(callback, ctypes.c_void_p).value
