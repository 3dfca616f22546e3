"""Runs CUDA kernels on the host: their own text, compiled by the machine's C++ compiler (see emulator.h).

    place(built.ctx)                        # in runner.py: tensors before forbidden pages
    Runner().run(lowering.lower(node))

It shows that the arithmetic, the indices and the barriers of a text are right: the compiler tells the runtime
of every access (accesses.h), which knows the bounds of all memory, and what orders threads. It says nothing
about speed, nor about what `ptx.h` does on a card.
"""

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
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from ggmlb.backends.common.strided import Mem
from ggmlb.backends.gpu import BadIndex, Kernel, Launch, Scratch, assemble
from ggmlb.backends.gpu.bad_index import SLOT

HERE = Path(__file__).parent
HEADER = '#include "emulator.h"\n'
PTX = (HERE / "ptx.h").read_text()
FORBIDDEN = 1 << 20
"""Bytes before and behind memory whose use ends a launch: a multiple of the page size."""
TRAPS = "alignment,bounds,object-size,shift-exponent,integer-divide-by-zero"
COMMON = ("-std=c++17", "-w", "-shared", "-fPIC", "-fno-strict-aliasing", "-U_FORTIFY_SOURCE", f"-I{HERE}")
RUNTIME = (*COMMON, "-O2")
KERNELS = (
    *COMMON, "-O1", "-g1", "-fno-exceptions", "-fwrapv", "-ffp-contract=off",
    "-fsanitize=thread", f"-fsanitize={TRAPS}", "-fsanitize-undefined-trap-on-error",
    "-nodefaultlibs", "-lm", "-lc",  # the runtime has what a thread sanitizer's library has
)  # fmt: skip

FORWARD, BACKWARD = 0, 1
"""Orders in which threads and blocks have their turns; larger numbers are seeds of random ones."""


class EmulationError(AssertionError):
    """A kernel did what a card would punish, or forgive at random."""


def compiler() -> str | None:
    """Return the C++ compiler, if the machine has one; the header asks for Linux."""
    if not sys.platform.startswith("linux"):
        return None
    return os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")


@cache
def _folder() -> Path:
    usual = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "ggmlb-emulated-kernels"
    root = Path(os.environ.get("GGMLB_TEST_EMULATED_KERNELS", usual))
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
extern "C" const char *run(void **args, int wg, const int *groups, unsigned order,
                           const emulator::Span *spans)
{{ return emulator::launch(&{kernel.name}, one_thread, args, wg, groups, order, spans); }}
"""


def _compiled(name: str, code: str, flags: tuple[str, ...], depends: str = "") -> Path:
    """Return the library that a text compiles to; compiled once for all processes."""
    command = (compiler() or "g++", *flags)
    key = hashlib.sha256("\0".join((*command, code, depends)).encode()).hexdigest()[:24]
    library = _folder() / f"{name}-{key}.so"
    if not library.exists():
        new = library.with_suffix(f".{os.getpid()}.{threading.get_ident()}.tmp")
        done = subprocess.run(
            [command[0], "-x", "c++", "-", "-o", str(new), *command[1:]],
            input=code,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise EmulationError(f"{name} does not compile:\n{done.stderr[:4000]}")
        new.replace(library)
    return library


@cache
def _runtime() -> ctypes.CDLL:
    """Return the runtime, whose functions the kernels then find."""
    headers = "".join((HERE / name).read_text() for name in ("runtime.h", "accesses.h"))
    library = _compiled("runtime", (HERE / "runtime.cpp").read_text(), RUNTIME, headers)
    return ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)


class Built:
    """A kernel that can be run.

    Args:
        kernel: What it is; with `defines` and `wg`, as in a `Launch`.
    """

    def __init__(self, kernel: Kernel, defines: tuple[tuple[str, str], ...], wg: int) -> None:
        self._code = text(kernel, defines, wg)
        self._name, self._wg = f"{kernel.name} {dict(defines)}", wg
        headers = "".join((HERE / name).read_text() for name in ("runtime.h", "emulator.h"))
        self._path = _compiled(kernel.name, self._code, KERNELS, headers)
        _runtime()
        self._run = ctypes.CDLL(str(self._path)).run
        self._run.restype = ctypes.c_char_p

    def run(
        self,
        arguments: Sequence[int],
        groups: tuple[int, int, int],
        spans: Sequence[tuple[int, int]],
        order: int = FORWARD,
    ) -> None:
        """Run it.

        Args:
            arguments: Where each argument lies.
            groups: Blocks in each dimension.
            spans: For each tensor, where the memory begins and ends that may be touched by way of it.
            order: `FORWARD`, `BACKWARD`, or a random one.

        Raises:
            EmulationError: It did what it must not.
        """
        pointers = (ctypes.c_void_p * len(arguments))(*arguments)
        flat = [x for span in spans for x in span]
        why = self._run(
            pointers, self._wg, (ctypes.c_int * 3)(*groups), order, (ctypes.c_uint64 * len(flat))(*flat)
        )
        if why:
            raise EmulationError(f"{self._with_lines(why.decode())}\n  in {self._name}")

    def _with_lines(self, why: str) -> str:
        """Put lines of the text where the runtime gave places in the code: the innermost one first."""
        lines = self._code.splitlines()

        def quote(match: re.Match[str]) -> str:
            found = subprocess.run(
                ["addr2line", "-i", "-e", str(self._path), match[1]],
                capture_output=True,
                text=True,
                check=False,
            ).stdout
            return "".join(f"\n    {lines[int(n) - 1].strip()}" for n in re.findall(r"<stdin>:(\d+)", found))

        return re.sub(r" \[@(\w+)\]", quote, why)


@cache
def build(kernel: Kernel, defines: tuple[tuple[str, str], ...], wg: int) -> Built:
    """Return a kernel, compiled once."""
    return Built(kernel, defines, wg)


class Memory:
    """Memory for tensors and scratch, each before a forbidden page; NaN before it is written.

    Attributes:
        slots: Where launches note indices that are out of range.
    """

    def __init__(self) -> None:
        self.slots: dict[BadIndex, Any] = {}
        self._scratch: dict[int, tuple[Scratch, Any]] = {}

    def array(self, mem: Mem) -> Any:
        """Return the memory that a mem lies in; scratch is made when first asked for."""
        assert mem.buffer is not None
        if isinstance(mem.buffer, BadIndex):
            return self.slots.setdefault(mem.buffer, guarded(SLOT, 0))
        if isinstance(mem.buffer, Scratch):
            return self._scratch.setdefault(id(mem.buffer), (mem.buffer, guarded(mem.buffer.nbytes)))[1]
        return mem.buffer.base

    def address(self, mem: Mem) -> int:
        """Return where a mem begins."""
        return int(self.array(mem).ctypes.data) + mem.offset

    def run(self, launch: Launch, order: int = FORWARD) -> None:
        """Run a launch.

        Raises:
            EmulationError: The kernel does not compile, or did what it must not.
        """
        values: list[Any] = []
        spans = []
        for param, arg in zip(launch.kernel.params, launch.args, strict=True):
            if isinstance(arg, Mem):
                array = self.array(arg)
                spans.append((array.ctypes.data, array.ctypes.data + array.size))
                values += [ctypes.c_void_p(array.ctypes.data), ctypes.c_int64(arg.offset)]
                values += [*map(ctypes.c_int, arg.ne), *map(ctypes.c_int64, arg.nb)]
            else:
                values.append(ctypes.c_int(int(arg)) if param.kind == "int" else ctypes.c_float(arg))
        built = build(launch.kernel, launch.defines, launch.wg)
        built.run([ctypes.addressof(v) for v in values], launch.groups, spans, order)


def guarded(nbytes: int, byte: int = 0xFF) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return memory, full of a byte, that begins at a multiple of 64 and ends before forbidden pages."""
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
    usable = whole[end - size : end - size + nbytes]
    usable[:] = byte
    return usable
