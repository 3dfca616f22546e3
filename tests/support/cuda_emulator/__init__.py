"""Runs CUDA kernels on the host: their own text, compiled by the machine's C++ compiler (see emulator.h).

    place(built.ctx)                        # in runner.py: tensors before forbidden pages
    Runner().run(lowering.lower(node))

It shows that the arithmetic, the indices and the barriers of a text are right. It says nothing about speed,
nor about what `ptx.h` does on a card.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ggmlb.kernels import Mem, Scratch, assemble

if TYPE_CHECKING:
    from ggmlb.kernels import Kernel, Launch

HERE = Path(__file__).parent
HEADER = (HERE / "emulator.h").read_text()
PTX = (HERE / "ptx.h").read_text()
FORBIDDEN = 1 << 20
"""Bytes before and behind memory whose use ends a launch: a multiple of the page size."""
TRAPS = "alignment,bounds,shift-exponent,integer-divide-by-zero"
FLAGS = (
    "-std=c++17", "-O1", "-w", "-shared", "-fPIC", "-fno-strict-aliasing", "-fwrapv", "-ffp-contract=off",
    "-U_FORTIFY_SOURCE", f"-fsanitize={TRAPS}", "-fsanitize-undefined-trap-on-error",
)  # fmt: skip


class EmulationError(AssertionError):
    """A kernel did what a card would punish, or forgive at random."""


def compiler() -> str | None:
    """Return the C++ compiler, if the machine has one; the header asks for Linux."""
    if not sys.platform.startswith("linux"):
        return None
    return os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")


@cache
def _folder() -> Path:
    root = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "ggmlb-emulated-kernels"
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError:
        root = Path(tempfile.mkdtemp(prefix="ggmlb-emulated-kernels"))
    return root


def text(kernel: Kernel, defines: tuple[tuple[str, str], ...], wg: int) -> str:
    """Return the C++ text of a kernel and of the function that runs it."""
    macros = "".join(f"#define {name} {value}\n" for name, value in (*defines, ("WG", wg)))
    body = assemble(kernel, "prelude_cuda.h", {"ptx.h": PTX})
    # The functions of <math.h> and the like are known before a macro can change their meaning.
    return f"""{HEADER}
{macros}
{body}
static void one_thread(void **args) {{ emulator::call(&{kernel.name}, args); }}
extern "C" const char *run(void **args, int wg, const int *groups, int backwards)
{{ return emulator::launch(one_thread, args, wg, groups, backwards); }}
"""


@cache
def build(kernel: Kernel, defines: tuple[tuple[str, str], ...], wg: int) -> Any:
    """Return the function that runs a kernel; compiled once for all processes."""
    code = text(kernel, defines, wg)
    command = (compiler() or "g++", *FLAGS)
    name = hashlib.sha256("\0".join((*command, code)).encode()).hexdigest()[:24]
    library = _folder() / f"{kernel.name}-{name}.so"
    if not library.exists():
        new = library.with_suffix(f".{os.getpid()}.tmp")
        done = subprocess.run(
            [*command, "-x", "c++", "-", "-o", str(new)],
            input=code,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise EmulationError(f"{kernel.name} {dict(defines)} does not compile:\n{done.stderr[:4000]}")
        new.replace(library)
    function = ctypes.CDLL(str(library)).run
    function.restype = ctypes.c_char_p
    return function


class Memory:
    """Memory for tensors and scratch, each before a forbidden page; NaN before it is written."""

    def __init__(self) -> None:
        self._scratch: dict[int, tuple[Scratch, Any]] = {}

    def address(self, mem: Mem) -> int:
        """Return where a mem begins; scratch is made when first asked for."""
        assert mem.buffer is not None
        if isinstance(mem.buffer, Scratch):
            _, base = self._scratch.setdefault(id(mem.buffer), (mem.buffer, guarded(mem.buffer.nbytes)))
        else:
            base = mem.buffer.base
        return int(base.ctypes.data) + mem.offset

    def run(self, launch: Launch, backwards: bool = False) -> None:
        """Run a launch.

        Raises:
            EmulationError: The kernel does not compile, or did what it must not.
        """
        values: list[Any] = []
        for param, arg in zip(launch.kernel.params, launch.args, strict=True):
            if isinstance(arg, Mem):
                start = self.address(arg) - arg.offset
                values += [ctypes.c_void_p(start), ctypes.c_int64(arg.offset)]
                values += [*map(ctypes.c_int, arg.ne), *map(ctypes.c_int64, arg.nb)]
            else:
                values.append(ctypes.c_int(arg) if param.kind == "int" else ctypes.c_float(arg))
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(v) for v in values))
        function = build(launch.kernel, launch.defines, launch.wg)
        why = function(pointers, launch.wg, (ctypes.c_int * 3)(*launch.groups), int(backwards))
        if why:
            raise EmulationError(f"{launch.kernel.name} {dict(launch.defines)}: {why.decode()}")


def guarded(nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return memory, filled with 0xff, that ends before forbidden pages, but for rounding up to 64 bytes."""
    import mmap

    page = mmap.PAGESIZE
    size = -(-max(nbytes, 1) // 64) * 64
    inner = -(-size // page) * page
    area = mmap.mmap(-1, inner + 2 * FORBIDDEN)
    whole = np.frombuffer(area, np.uint8)
    libc = ctypes.CDLL(None, use_errno=True)
    for start in (0, FORBIDDEN + inner):
        if libc.mprotect(ctypes.c_void_p(whole.ctypes.data + start), FORBIDDEN, 0):
            raise OSError(ctypes.get_errno(), "mprotect")
    end = FORBIDDEN + inner
    usable = whole[end - size : end]
    usable[:] = 0xFF
    return usable
