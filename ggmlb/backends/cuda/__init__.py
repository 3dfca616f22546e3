"""The CUDA backend, over CuPy. Not written yet: its registration says so, and offers no device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ggmlb.errors import BackendUnavailable
from ggmlb.interface import BackendReg

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ggmlb.interface import Device


class CudaReg(BackendReg):
    """The registration of the backend to come."""

    priority = 100

    @property
    def name(self) -> str:
        """`"CUDA"`."""
        return "CUDA"

    @property
    def devices(self) -> Sequence[Device]:
        """None yet.

        Raises:
            BackendUnavailable: Always.
        """
        raise BackendUnavailable("this version of ggmlb has no CUDA backend yet; use OpenCL or the CPU")


def backend_reg() -> BackendReg:
    """The CUDA backend, for the registry."""
    return CudaReg()
