"""Source text and compiler options of a launch's kernel."""

from __future__ import annotations

from typing import Final

from ggmlb.backends.gpu import Defines, Kernel, source

OPTIONS: Final = ("-diag-suppress=177",)  # functions that a kernel does not use
"""NVRTC's options, equal for all kernels, because CuPy queries the compiler's version for each set."""


def text(kernel: Kernel, defines: Defines, wg: int) -> str:
    """Return the CUDA C++ text of a kernel with its macros."""
    macros = "".join(f"#define {name} {value}\n" for name, value in (*defines, ("WG", wg)))
    return macros + source(kernel, "cuda")
