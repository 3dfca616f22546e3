"""A libcuda whose functions are answered in Python: what is above it runs as it is, with no card.

It is compiled once; each set of simulated cards has a copy of its own, whose symbols jump to callbacks. A
process without other cards has one for all, which the loader finds as libcuda.so.1: `load` comes first.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ggmlb.backends.cuda.driver import ARGUMENTS, KINDS
from tests.support.host_streams import HostError

NOT_SUPPORTED, UNKNOWN = 801, 999

SYMBOLS = {
    **ARGUMENTS, "cuCtxGetCurrent": "p", "cuCtxSetCurrent": "p", "cuLaunchKernel": "puuuuuuuppp",
    "cuGetExportTable": "pp", "cuGetErrorName": "ip", "cuGetErrorString": "ip",
}  # fmt: skip
"""The functions, with the kinds of their arguments: those of `CupyDriver`, and of CuPy's bindings."""

# Eleven words, the most that a function takes: a callback reads as many as it has, each as wide as it is.
SOURCE = "#define WORDS(T) T a, T b, T c, T d, T e, T f, T g, T h, T i, T j, T k\n" + "".join(
    f"int (*answer_{name})(WORDS(long));\n"
    f"int {name}(WORDS(long)) {{\n"
    f"    return answer_{name} ? answer_{name}(a, b, c, d, e, f, g, h, i, j, k) : {NOT_SUPPORTED};\n"
    "}\n"
    for name in SYMBOLS
)

FAULTS: list[BaseException] = []
"""What answers raised, other than errors of CUDA: as nothing raises through C, the test fails at its end."""


def load(name: str = "") -> Any:
    """Compile the library, once for each text of it, and load a copy; with a name, for the whole process."""
    folder = Path(tempfile.gettempdir()) / f"ggmlb-played-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    options = ("-x", "c", "-", "-O1", "-shared", "-fPIC", f"-Wl,-soname,{name or 'played.so'}")
    file = folder / f"{hashlib.sha256(repr((options, SOURCE)).encode()).hexdigest()[:16]}.so"
    if not file.exists():
        new = file.with_suffix(f".{os.getpid()}")
        subprocess.run(["cc", *options, "-o", str(new)], input=SOURCE, text=True, check=True)
        new.replace(file)  # other processes may do the same
    with tempfile.NamedTemporaryFile(suffix=".so") as copy:
        shutil.copyfile(file, copy.name)
        return ctypes.CDLL(copy.name)


def answer(library: Any, cards: Any) -> Any:
    """Let an object answer a library, by methods of the functions' names; return the library.

    A method returns a status, or nothing, or raises `HostError`.
    """
    library.kept = []
    for name, kinds in SYMBOLS.items():
        if hasattr(cards, name):
            callback = ctypes.CFUNCTYPE(ctypes.c_int, *(KINDS[kind] for kind in kinds))(_answer(cards, name))
            library.kept.append(callback)
            slot = ctypes.c_void_p.in_dll(library, f"answer_{name}")
            slot.value = ctypes.cast(callback, ctypes.c_void_p).value
    return library


def _answer(cards: Any, name: str) -> Callable[..., int]:
    def call(*args: Any) -> int:
        try:
            cards.check(name)
            return getattr(cards, name)(*(arg or 0 for arg in args)) or 0  # `None` is a null pointer
        except HostError as error:
            return error.status
        except BaseException as error:
            traceback.print_exc()
            FAULTS.append(error)
            return UNKNOWN

    return call
