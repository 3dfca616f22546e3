"""The CUDA compiler from its PyPI wheel, which needs neither a driver nor a card."""

from __future__ import annotations

import ctypes
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


class Nvrtc:
    """NVRTC.

    Raises:
        ModuleNotFoundError: The wheel is not installed.
    """

    def __init__(self) -> None:
        wheel = find_spec("nvidia.cuda_nvrtc")
        if wheel is None or not wheel.submodule_search_locations:
            raise ModuleNotFoundError("needs NVRTC: pip install nvidia-cuda-nvrtc-cu12 (in the extra 'test')")
        folder = Path(wheel.submodule_search_locations[0]) / "lib"
        self._lib = ctypes.CDLL(str(next(folder.glob("libnvrtc.so.*"))))

    def architectures(self) -> set[str]:
        """Return the machines that it compiles for, as `sm_90`."""
        n = ctypes.c_int()
        self._lib.nvrtcGetNumSupportedArchs(ctypes.byref(n))
        numbers = (ctypes.c_int * n.value)()
        self._lib.nvrtcGetSupportedArchs(numbers)
        return {f"sm_{number}" for number in numbers}

    @property
    def version(self) -> str:
        """As `12.9`."""
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._lib.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
        return f"{major.value}.{minor.value}"

    def compile(self, text: str, options: Iterable[str]) -> tuple[bool, str]:
        """Compile a text; return whether that worked, and all that the compiler and ptxas say."""
        lib, program = self._lib, ctypes.c_void_p()
        status = lib.nvrtcCreateProgram(ctypes.byref(program), text.encode(), b"kernel.cu", 0, None, None)
        if status:
            raise RuntimeError(f"nvrtcCreateProgram failed with status {status}")
        flags = [option.encode() for option in options]
        status = lib.nvrtcCompileProgram(program, len(flags), (ctypes.c_char_p * len(flags))(*flags))
        size = ctypes.c_size_t()
        lib.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        lib.nvrtcGetProgramLog(program, log)
        lib.nvrtcDestroyProgram(ctypes.byref(program))
        return status == 0, log.value.decode()
