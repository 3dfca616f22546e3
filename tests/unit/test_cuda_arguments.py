"""Argument blocks lie in memory as the CUDA compiler lays out kernels' parameters."""

from __future__ import annotations

import re
import struct
from importlib import resources

import pytest

from ggmlb.backends.common.strided import Mem
from ggmlb.backends.cuda.kernels import PACKAGE
from ggmlb.backends.gpu import Kernel, Launch, Param, argument_block, layout
from ggmlb.backends.gpu.source import FORMATS, PORTABLE, kernels
from ggmlb.core.dtypes import DType
from scripts.nvrtc import Nvrtc

KERNELS = [*kernels().values(), *kernels(PACKAGE).values()]
HEAD = re.compile(r"^KERNEL \w+\((?:[^()]|\(\w+\))*\)", re.MULTILINE)
PARAMETER = re.compile(r"\.param \.(?:align \d+ \.)?[a-z](\d+) ")


def heads() -> str:
    """Return a text that declares every kernel, with nothing in it."""
    files = resources.files(PORTABLE)
    prelude = (files / "prelude_cuda.h").read_text()
    prelude = prelude.replace('#include "ptx.h"', (files / "ptx.h").read_text())
    found = re.sub(r'#include "[\w.]+"', "", prelude + (files / "tensors.h").read_text())
    for package in (PORTABLE, PACKAGE):
        for path in resources.files(package).iterdir():
            if path.name.endswith(".knl"):
                found += "".join(f"{head[0]} {{ }}\n" for head in HEAD.finditer(path.read_text()))
    return found


@pytest.fixture(scope="module")
def entries() -> dict[str, list[int]]:
    """The sizes of each kernel's parameters [bytes], as the compiler has them."""
    pytest.importorskip("nvidia.cu13", reason="needs NVRTC: pip install nvidia-cuda-nvrtc")
    compiler = Nvrtc()
    ptx = compiler.code(heads(), ["-arch=compute_75", "-diag-suppress=177", "-DWG=128"], "PTX").decode()
    found = re.findall(r"\.entry (\w+)\((.*?)\)", ptx, re.DOTALL)
    return {name: [int(bits) // 8 for bits in PARAMETER.findall(params)] for name, params in found}


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.name)
def test_layout(kernel: Kernel, entries: dict[str, list[int]]) -> None:
    sizes = [
        struct.calcsize(letter)
        for param in kernel.params
        for letter in FORMATS["cuda"][param.kind].replace("4i", "iiii").replace("4q", "qqqq")
    ]
    assert sizes == entries[kernel.name]
    end = 0
    for size in entries[kernel.name]:  # each aligned to its size
        end = -(-end // size) * size + size
    assert layout(kernel, "cuda").size == end


def test_values() -> None:
    params = (Param("tensor", "a"), Param("int", "n"), Param("tensor", "d"), Param("float", "x"))
    kernel = Kernel("some", "none", params)
    mem = Mem(None, 24, DType.F32, (8, 3, 2, 1), (4, 32, 96, 192))
    launch = Launch(kernel, (), (mem, 5, mem, 0.5), (1, 1, 1), 128)
    block = argument_block(launch, "cuda", lambda m: 4096)
    told = (4096, 24, 8, 3, 2, 1, 4, 32, 96, 192)
    assert layout(kernel, "cuda").unpack(block) == (*told, 5, *told, 0.5)
    assert struct.unpack_from("@Pq", block, 72) == (4096, 24), "a tensor after a number is aligned"
