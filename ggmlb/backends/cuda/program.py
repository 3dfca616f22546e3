"""What is compiled for a launch: the text, and the compiler's options."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ggmlb.kernels import source

if TYPE_CHECKING:
    from ggmlb.kernels import Launch


def text(launch: Launch) -> str:
    """Return the CUDA C++ text of a launch's kernel."""
    return source(launch.kernel, "cuda")


def options(launch: Launch) -> tuple[str, ...]:
    """Return NVRTC's options for it; the architecture is the caller's to add."""
    return (
        "-diag-suppress=177",  # functions that this kernel does not use
        f"-DWG={launch.wg}",
        *(f"-D{name}={value}" for name, value in launch.defines),
    )
