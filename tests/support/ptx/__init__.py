"""CUDA kernels with no card: compiled to PTX by NVRTC, whose instructions a machine of ours does (machine.h).

    place(built.ctx)                        # in runner.py: tensors in memory of their own
    Runner().run(lowering.lower(node))

It shows that what the compiler makes of a text computes what it should, and that its threads meet and touch
memory as the PTX manual asks. It says nothing about speed, nor about ptxas, which makes machine code of PTX.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ggmlb.backends.common.strided import Mem
from ggmlb.backends.cuda.driver import OPTIONS, grid, text
from ggmlb.backends.gpu import BadIndex, Defines, Kernel, Launch, Scratch, argument_block
from ggmlb.backends.gpu.bad_index import N_WORDS
from scripts.nvrtc import Nvrtc
from tests.support.ptx import clang
from tests.support.ptx.machine import kept
from tests.support.ptx.program import Program, PtxError, Span

__all__ = ["BACKWARD", "FORWARD", "NVRTC", "Compiler", "Memory", "PtxError", "Span", "build"]

AT_ONCE = 4
"""Resident blocks of persistent kernels: few, so that each has several iterations."""

FORWARD, BACKWARD = False, True
"""Orders in which warps and blocks have their turns."""

OF_CUPY = ("-ftz=true", "-std=c++17", "--device-as-default-execution-space")
"""Options that CuPy adds to those given."""


class Compiler(NamedTuple):
    """What makes PTX of a kernel: `nvrtc`, or `clang`; for cards of a capability, 90 for 9.0."""

    capability: int = 90
    name: str = "nvrtc"

    def ptx(self, code: str, with_lines: bool = False) -> str:
        """Return what it makes of a text, once for all processes.

        Raises:
            PtxError: It does not compile.
        """
        more = ("-lineinfo",) if with_lines else ()
        if self.name == "clang":
            return clang.ptx(code, self.capability)
        options = (*OPTIONS, *OF_CUPY, f"-arch=compute_{self.capability}", *more)

        def make(file: Path) -> None:
            try:
                file.write_bytes(_nvrtc().code(code, options, "PTX"))
            except RuntimeError as error:
                raise PtxError(f"it does not compile:\n{error}") from None

        return kept("kernel.ptx", make, _nvrtc().version, *options, code).read_text()


NVRTC = Compiler()


@cache
def _nvrtc() -> Nvrtc:
    return Nvrtc()


class Built:
    """A kernel that can be run.

    Args:
        kernel: What it is; with `defines` and `wg`, as in a `Launch`.
        compiler: Of its text.

    Attributes:
        dependent: Whether it begins with the wait for the kernel before.
        shared: Shared memory of a block that its text declares [bytes].
    """

    def __init__(
        self, kernel: Kernel, defines: Defines, wg: int, compiler: Compiler, dependent: bool
    ) -> None:
        self._code, self._wg, self._compiler = text(kernel, defines, wg, dependent), wg, compiler
        self._name, self.dependent = f"{kernel.name} {dict(defines)}, WG {wg}", dependent
        self._program = Program(compiler.ptx(self._code))
        self.shared = self._program.shared_nbytes
        head = re.search(rf"KERNEL {kernel.name}\(((?:[^()]|\(\w+\))*)\)", self._code)
        assert head is not None
        self._writes = [access == "OUT" for access in re.findall(r"(IN|OUT)\(", head[1])]

    def run(
        self,
        block: bytes,
        groups: tuple[int, int, int],
        memory: Sequence[tuple[int, int]],
        order: bool = FORWARD,
        shared: int = 0,
    ) -> None:
        """Run it.

        Args:
            block: Its arguments.
            groups: Blocks in each dimension.
            memory: For each tensor, where the memory begins and ends that may be touched by way of it.
            order: `FORWARD` or `BACKWARD`.
            shared: Dynamic shared memory of a block.

        Raises:
            PtxError: It did what it must not; with the lines of its text.
        """
        spans = [Span(*span, writes) for span, writes in zip(memory, self._writes, strict=True)]
        try:
            self._program.launch(groups, (self._wg, 1, 1), block, spans, order, shared)
        except PtxError as error:
            raise PtxError(f"{self._with_lines(str(error))}\n  in {self._name}") from None

    def _with_lines(self, why: str) -> str:
        """Put lines of the text where the machine gave instructions: the innermost one first."""
        places = Program(self._compiler.ptx(self._code, with_lines=True)).lines
        lines = self._code.splitlines()

        def quote(match: re.Match[str]) -> str:
            return "".join(f"\n    {lines[n - 1].strip()}" for n in places[int(match[1])])

        return re.sub(r" \[@(\d+)\]", quote, why)


@cache
def build(
    kernel: Kernel, defines: Defines, wg: int, compiler: Compiler = NVRTC, dependent: bool = False
) -> Built:
    """Return a kernel, compiled once."""
    return Built(kernel, defines, wg, compiler, dependent)


class Memory:
    """Memory for tensors and scratch, each of its own; NaN before it is written.

    Attributes:
        compiler: Of the kernels that are run.
        records: Where launches record indices that are out of range.
    """

    def __init__(self, compiler: Compiler = NVRTC) -> None:
        self.compiler = compiler
        self.records: dict[BadIndex, Any] = {}
        self._scratch: dict[int, tuple[Scratch, Any]] = {}

    def array(self, mem: Mem) -> Any:
        """Return the memory that a mem lies in; scratch is made when first asked for."""
        assert mem.buffer is not None
        if isinstance(mem.buffer, BadIndex):
            return self.records.setdefault(mem.buffer, alone(8 * N_WORDS, 0))
        if isinstance(mem.buffer, Scratch):
            return self._scratch.setdefault(id(mem.buffer), (mem.buffer, alone(mem.buffer.nbytes)))[1]
        return mem.buffer.base

    def address(self, mem: Mem) -> int:
        """Return where a mem begins."""
        return int(self.array(mem).ctypes.data) + mem.offset

    def run(self, launch: Launch, order: bool = FORWARD) -> None:
        """Run a launch.

        Raises:
            PtxError: The kernel does not compile, or did what it must not.
        """
        arrays = [self.array(arg) for arg in launch.args if isinstance(arg, Mem)]
        memory = [(a.ctypes.data, a.ctypes.data + a.size) for a in arrays]
        block = argument_block(launch, "cuda", lambda mem: int(self.array(mem).ctypes.data))
        built = build(launch.kernel, launch.defines, launch.wg, self.compiler)
        built.run(block, grid(launch, lambda: AT_ONCE), memory, order, launch.shared)


def alone(nbytes: int, byte: int = 0xFF) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return memory, full of a byte, aligned to 64 bytes, with bytes around it that belong to nobody."""
    whole = np.full(nbytes + 192, byte, np.uint8)
    start = -whole.ctypes.data % 64 + 64
    return whole[start : start + nbytes]
