"""The LLVM backend: kernels compiled at run time for the host's processor.

It computes in the CPU's memory: a scheduler can assign it the ops that it runs faster than NumPy, without
copies. The compiler is imported when the device is first requested.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from ggmlb.core.arguments import checked
from ggmlb.core.errors import BackendUnavailable
from ggmlb.interface import BackendReg, Device
from ggmlb.interface.procs import dev_get_extra_bufts, set_abort_callback, set_n_threads


class LlvmReg(BackendReg):
    """The registry entry `LLVM`, with one device."""

    name = "LLVM"

    priority = 10

    def __init__(self) -> None:
        self._devices: tuple[Device, ...] | None = None

    @property
    def devices(self) -> Sequence[Device]:
        """The device `LLVM`.

        Raises:
            BackendUnavailable: llvmlite is missing.
        """
        if self._devices is None:
            try:
                import llvmlite.ir  # noqa: F401
            except ImportError as error:
                raise BackendUnavailable(
                    f"llvmlite cannot be imported ({error}): pip install 'ggmlb[llvm]'"
                ) from error
            from ggmlb.backends.llvm.device import LlvmDevice

            self._devices = (LlvmDevice(self),)
        return self._devices

    def _procs(self) -> Mapping[str, Callable[..., Any]]:
        return {
            "set_n_threads": set_n_threads,
            "set_abort_callback": set_abort_callback,
            "get_features": _features,
            "dev_get_extra_bufts": dev_get_extra_bufts,
        }


@cache
def backend_reg() -> LlvmReg:
    """Return the registration; the registry calls this."""
    return LlvmReg()


@checked
def _features(reg: BackendReg) -> list[tuple[str, str]]:
    """Return the version of LLVM, the instruction set of the code, and how weights are prefetched."""
    from llvmlite import binding

    from ggmlb.backends.llvm import prefetching
    from ggmlb.backends.llvm.codegen.library import library

    target = library().target
    version = ".".join(map(str, binding.llvm_version_info))
    choices = prefetching.choices(library()).items()
    chosen = [(f"PREFETCH {what}", f"{hint},{nbytes}") for what, (hint, nbytes) in choices]
    return [("LLVM", version), ("CPU", target.cpu), ("SIMD", target.level.name), *chosen]
