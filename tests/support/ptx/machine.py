"""The PTX machine, compiled by the machine's own C++ compiler; and where what was compiled is kept."""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).parent
FLAGS = (
    "-std=c++17", "-O3", "-march=native", "-w", "-shared", "-fPIC",
    "-fwrapv", "-fno-strict-aliasing", "-ffp-contract=off", "-frounding-math",
)  # fmt: skip


def compiler() -> str | None:
    """Return the C++ compiler, if the machine has one; the machine asks for Linux."""
    if not sys.platform.startswith("linux"):
        return None
    return os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")


def why_not() -> str | None:
    """Return why kernels cannot be compiled and run here; None if they can."""
    if compiler() is None:
        return "needs a C++ compiler: g++, c++ or $CXX"
    return (
        None
        if find_spec("nvidia") and find_spec("nvidia.cu13")
        else "needs NVRTC: pip install nvidia-cuda-nvrtc"
    )


def kept(name: str, make: Callable[[Path], object], *depends: str) -> Path:
    """Return the file that `make` wrote, once for all processes that know the folder."""
    key = hashlib.sha256("\0".join(depends).encode()).hexdigest()[:24]
    file = _folder() / f"{key}-{name}"
    if not file.exists():
        make(new := file.with_suffix(f".{os.getpid()}.{threading.get_ident()}"))
        new.replace(file)
    return file


@cache
def _folder() -> Path:
    usual = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "ggmlb-ptx"
    root = Path(os.environ.get("GGMLB_TEST_PTX", usual))
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError:
        root = Path(tempfile.mkdtemp(prefix="ggmlb-ptx"))
    return root


class Machine:
    """The library.

    Attributes:
        ops: For each instruction its number, and the kinds of its operands.
        launch: Runs a launch; returns what was wrong.
    """

    def __init__(self) -> None:
        command = (compiler() or "g++", *FLAGS, str(HERE / "machine.cpp"), "-o")
        texts = [(HERE / file).read_text() for file in ("machine.cpp", "machine.h", "instructions.h")]
        cpu = re.search(r"^flags.*$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        library = kept(
            "machine.so",
            lambda new: subprocess.run([*command, str(new)], check=True),
            *command,
            *texts,
            str(cpu),
        )
        loaded = ctypes.CDLL(str(library))
        self.launch = loaded.ptx_launch
        names, operands = loaded.ptx_op_name, loaded.ptx_op_operands
        self.launch.restype = names.restype = operands.restype = ctypes.c_char_p
        self.ops = {names(i).decode(): (i, operands(i).decode()) for i in range(loaded.ptx_n_ops())}


@cache
def machine() -> Machine:
    """Return it, loaded once."""
    return Machine()
