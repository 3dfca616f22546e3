"""Clang as a second compiler of CUDA, where `scripts/install_clang.sh` or the machine has it."""

from __future__ import annotations

import os
import shutil
import subprocess
from functools import cache
from pathlib import Path

from scripts.nvrtc import wheel
from tests.support.ptx.machine import kept
from tests.support.ptx.program import PtxError

INSTALLED = Path(__file__).parents[3] / "build/clang/usr"
EMPTY = Path(__file__).parent / "headers"
"""Headers that Clang asks for, and that no kernel needs."""


@cache
def _command() -> tuple[str, ...]:
    """Return the compiler, and where CUDA's headers and libdevice are.

    Raises:
        FileNotFoundError: One is not there.
    """
    own = sorted(INSTALLED.glob("lib/llvm-*/bin/clang"))
    found = str(own[-1]) if own else shutil.which("clang")
    if found is None:
        raise FileNotFoundError("needs Clang: scripts/install_clang.sh")
    cuda = wheel("nvidia-cuda-runtime")
    if not all((cuda / part).exists() for part in ("bin", "include/cuda_runtime.h", "nvvm/libdevice")):
        raise FileNotFoundError("needs CUDA's headers and libdevice: scripts/install_clang.sh")
    return found, f"--cuda-path={cuda}", f"-I{EMPTY}"


def why_not() -> str | None:
    """Return why it compiles nothing here; None if it does."""
    try:
        _command()
    except (FileNotFoundError, ModuleNotFoundError) as error:
        return str(error)
    return None


def ptx(code: str, capability: int) -> str:
    """Return what it makes of a text, with the meaning of NVRTC's options.

    Raises:
        PtxError: It does not compile.
    """
    options = (
        "-x", "cuda", "--cuda-device-only", "-S", "-O3", "-std=c++17", f"--cuda-gpu-arch=sm_{capability}",
        "-fgpu-flush-denormals-to-zero", "-Wno-unknown-cuda-version", "-", "-o", "-",
    )  # fmt: skip
    libraries = f"{INSTALLED}/lib/x86_64-linux-gnu:{os.environ.get('LD_LIBRARY_PATH', '')}"
    command = (*_command(), *options)

    def make(file: Path) -> None:
        done = subprocess.run(
            command, input=code, text=True, capture_output=True, check=False,
            env={**os.environ, "LD_LIBRARY_PATH": libraries},
        )  # fmt: skip
        if done.returncode:
            raise PtxError(f"it does not compile:\n{done.stderr[:4000]}")
        file.write_text(done.stdout)

    return kept("clang.ptx", make, *command, code).read_text()
