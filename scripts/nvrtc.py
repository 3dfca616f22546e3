"""The CUDA compiler and ptxas from their PyPI wheels, which need neither a driver nor a card."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path


def wheel(name: str) -> Path:
    """Return where NVIDIA's wheels have their files."""
    found = find_spec("nvidia") and find_spec("nvidia.cu13")
    if found is None or not found.submodule_search_locations:
        raise ModuleNotFoundError(f"needs CUDA's compiler: pip install {name}")
    return Path(next(iter(found.submodule_search_locations)))


def assembled(ptx: str, architecture: str) -> str:
    """Return what ptxas says of the machine code that it makes of PTX.

    Raises:
        CalledProcessError: It makes none.
        FileNotFoundError: ptxas is not there: pip install nvidia-cuda-nvcc, of NVRTC's version.
    """
    command = (wheel("nvidia-cuda-nvcc") / "bin/ptxas", f"-arch={architecture}", "-v", "-o", os.devnull, "-")
    done = subprocess.run(command, input=ptx, text=True, check=True, capture_output=True)
    return done.stdout + done.stderr


class Nvrtc:
    """NVRTC, of the CUDA that CuPy is for.

    Raises:
        ModuleNotFoundError: The wheel is not installed.
    """

    def __init__(self) -> None:
        folder = wheel("nvidia-cuda-nvrtc (in the extra 'test')") / "lib"
        # NVRTC looks for its second part by name only; loaded before, it is found wherever it lies.
        ctypes.CDLL(str(next(folder.glob("libnvrtc-builtins.so.*"))))
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
        """As `13.0`."""
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._lib.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
        return f"{major.value}.{minor.value}"

    def compile(self, text: str, options: Iterable[str]) -> tuple[str | None, str]:
        """Compile a text; return its PTX if that worked, and all that the compiler and ptxas say."""
        with self._compiled(text, options) as (program, status):
            ptx = None if status else self._get(program, "PTX").decode()
            return ptx, self._get(program, "ProgramLog").decode()

    def code(self, text: str, options: Iterable[str], kind: str = "CUBIN") -> bytes:
        """Compile a text; return the code, `CUBIN` for an architecture `sm_*`, `PTX` for `compute_*`.

        Raises:
            RuntimeError: It does not compile; with what the compiler says.
        """
        with self._compiled(text, options) as (program, status):
            if status:
                raise RuntimeError(self._get(program, "ProgramLog").decode())
            return self._get(program, kind)

    @contextmanager
    def _compiled(self, text: str, options: Iterable[str]) -> Iterator[tuple[ctypes.c_void_p, int]]:
        lib, program = self._lib, ctypes.c_void_p()
        status = lib.nvrtcCreateProgram(ctypes.byref(program), text.encode(), b"kernel.cu", 0, None, None)
        if status:
            raise RuntimeError(f"nvrtcCreateProgram failed with status {status}")
        flags = [option.encode() for option in options]
        yield program, lib.nvrtcCompileProgram(program, len(flags), (ctypes.c_char_p * len(flags))(*flags))
        lib.nvrtcDestroyProgram(ctypes.byref(program))

    def _get(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        getattr(self._lib, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
        out = ctypes.create_string_buffer(size.value)
        getattr(self._lib, f"nvrtcGet{what}")(program, out)
        return out.raw if what == "CUBIN" else out.value
