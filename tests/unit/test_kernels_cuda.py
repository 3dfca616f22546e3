"""Every kernel compiles for CUDA too: by NVRTC from PyPI, without a driver or a card."""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ggmlb.kernels import Kernel, Target, declines, kernels, lower, source
from ggmlb.testing.programs import load_cases

if TYPE_CHECKING:
    from collections.abc import Iterable

nvrtc_wheel = pytest.importorskip(
    "nvidia.cuda_nvrtc", reason="needs NVRTC: pip install nvidia-cuda-nvrtc-cu12 (in the extra 'test')"
)

Variant = tuple[Kernel, tuple[tuple[str, str], ...], int, bool]

ONLY_OPENCL: dict[str, str] = {}
"""Kernels that need not compile for CUDA, and why."""


class Nvrtc:
    """The compiler."""

    def __init__(self) -> None:
        folder = Path(next(iter(nvrtc_wheel.__path__))) / "lib"
        self._lib = ctypes.CDLL(str(next(folder.glob("libnvrtc.so.*"))))

    def compile(self, text: str, options: Iterable[str]) -> str | None:
        """Return the compiler's complaints, or None."""
        lib, program = self._lib, ctypes.c_void_p()
        assert lib.nvrtcCreateProgram(ctypes.byref(program), text.encode(), b"kernel.cu", 0, None, None) == 0
        flags = [option.encode() for option in options]
        status = lib.nvrtcCompileProgram(program, len(flags), (ctypes.c_char_p * len(flags))(*flags))
        size = ctypes.c_size_t()
        lib.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        lib.nvrtcGetProgramLog(program, log)
        lib.nvrtcDestroyProgram(ctypes.byref(program))
        return log.value.decode() if status else None


@pytest.fixture(scope="module")
def nvrtc() -> Nvrtc:
    return Nvrtc()


def variants() -> list[Variant]:
    """One variant of each kernel for each type of its first tensor, of those that the golden programs use."""
    chosen: dict[tuple[str, str | None], Variant] = {}
    for case in load_cases(Path(__file__).parents[1] / "golden/programs"):
        for node in case.build().graph.nodes:
            if declines(node) is not None:
                continue
            for target in (Target(False, 2, 128), Target(True, 2, 1)):
                for launch in lower(node, target):
                    key = launch.kernel.name, dict(launch.defines).get("a_T")
                    chosen.setdefault(key, (launch.kernel, launch.defines, launch.wg, target.on_cpu))
    return list(chosen.values())


VARIANTS = variants()
ONE_EACH = list({variant[0].name: variant for variant in VARIANTS}.values())


@pytest.mark.parametrize(
    ("arch", "chosen"),
    [("sm_75", VARIANTS), ("sm_80", ONE_EACH), ("sm_90", ONE_EACH)],
    ids=["75", "80", "90"],
)
def test_kernels_compile(nvrtc: Nvrtc, arch: str, chosen: list[Variant]) -> None:
    assert {kernel.name for kernel, *_ in chosen} == set(kernels())

    def complaint(variant: Variant) -> str | None:
        kernel, defines, wg, _ = variant
        options = [f"-arch={arch}", "-diag-suppress=177", f"-DWG={wg}", *(f"-D{n}={v}" for n, v in defines)]
        log = nvrtc.compile(source(kernel, "cuda"), options)
        return f"{kernel.name} {dict(defines)}:\n{log}" if log else None

    with ThreadPoolExecutor(2) as pool:
        bad = [log for log in pool.map(complaint, chosen) if log]
    failed = {log.split()[0] for log in bad}
    assert failed == set(ONLY_OPENCL), "\n".join(bad)
