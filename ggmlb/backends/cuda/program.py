"""What is compiled for a launch: the text, and the compiler's options."""

from __future__ import annotations

from typing import Final

from ggmlb.backends.gpu import Defines, Kernel, source

OPTIONS: Final = ("-diag-suppress=177",)  # functions that a kernel does not use
"""NVRTC's options, the same for all kernels: CuPy asks the compiler for its version once for each set."""


def text(kernel: Kernel, defines: Defines, wg: int) -> str:
    """Return the CUDA C++ text of a kernel with its macros."""
    macros = "".join(f"#define {name} {value}\n" for name, value in (*defines, ("WG", wg)))
    return macros + source(kernel, "cuda")
