"""Types, errors and texts around the calls of CUDA, which `CupyDriver` makes. CuPy is not imported here."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Final

from ggmlb.backends.gpu import Defines, Kernel, Launch, source
from ggmlb.backends.gpu.source import HEAD
from ggmlb.core.errors import BackendError
from ggmlb.core.tensor import Tensor
from ggmlb.interface import BufferType
from ggmlb.system.process import LibraryGuard

if TYPE_CHECKING:
    from ggmlb.backends.cuda.cupy_driver import CupyDriver

guard: Final = LibraryGuard("CUDA")

Call = Callable[[int], Any]
"""Queues a piece of work on a stream."""

KINDS: Final[dict[str, Any]] = {
    "p": ctypes.c_void_p, "i": ctypes.c_int, "u": ctypes.c_uint, "b": ctypes.c_ubyte, "l": ctypes.c_size_t
}  # fmt: skip

ARGUMENTS: Final = {
    "cuInit": "u", "cuDriverGetVersion": "p", "cuDeviceGetCount": "p", "cuDeviceGet": "pi",
    "cuDeviceGetName": "pii", "cuDeviceGetPCIBusId": "pii", "cuDeviceTotalMem_v2": "pi",
    "cuDeviceGetAttribute": "pii", "cuDeviceCanAccessPeer": "pii", "cuDevicePrimaryCtxRetain": "pi",
    "cuCtxEnablePeerAccess": "pu", "cuCtxDisablePeerAccess": "p", "cuMemGetInfo_v2": "pp",
    "cuMemAlloc_v2": "pl", "cuMemFree_v2": "p", "cuMemHostAlloc": "plu", "cuMemFreeHost": "p",
    "cuMemHostRegister_v2": "plu", "cuMemHostUnregister": "p", "cuPointerGetAttribute": "pip",
    "cuMemcpyHtoDAsync_v2": "pplp", "cuMemcpyDtoHAsync_v2": "pplp", "cuMemcpyDtoDAsync_v2": "pplp",
    "cuMemcpy2DAsync_v2": "pp", "cuMemcpyPeerAsync": "pppplp", "cuMemsetD8Async": "pblp",
    "cuStreamCreate": "pu", "cuStreamDestroy_v2": "p", "cuStreamSynchronize": "p", "cuStreamQuery": "p",
    "cuStreamWaitEvent": "ppu", "cuEventCreate": "pu", "cuEventDestroy_v2": "p", "cuEventRecord": "pp",
    "cuEventQuery": "p", "cuEventSynchronize": "p", "cuEventElapsedTime": "ppp",
    "cuStreamBeginCapture_v2": "pi", "cuStreamEndCapture": "pp", "cuGraphDestroy": "p",
    "cuGraphInstantiateWithFlags": "ppl", "cuGraphExecUpdate_v2": "ppp", "cuGraphLaunch": "pp",
    "cuGraphExecDestroy": "p", "cuFuncGetAttribute": "pip", "cuFuncSetAttribute": "pii",
    "cuLaunchKernelEx": "pppp", "cuOccupancyMaxActiveBlocksPerMultiprocessor": "ppil",
}  # fmt: skip
"""The functions of libcuda that are called by ctypes, with the kinds of their arguments (`KINDS`)."""


class CopyKind(IntEnum):
    """Direction of a copy."""

    TO_DEVICE = 1
    TO_HOST = 2
    ON_DEVICE = 3


@dataclass(frozen=True, slots=True)
class Facts:
    """Properties of a card, as queried from CUDA.

    Attributes:
        name: Product name.
        pci_bus_id: As `0000:01:00.0`.
        capability: Compute capability times ten: 90 for 9.0.
        n_units: Number of multiprocessors.
        shared: Shared memory of a multiprocessor [bytes].
        nbytes: Its memory [bytes].
        is_integrated: Whether it shares the host's memory.
    """

    name: str
    pci_bus_id: str
    capability: int
    n_units: int
    shared: int
    nbytes: int
    is_integrated: bool


class cuda_errors:
    """Context manager that turns CUDA's errors in `call` into BackendError or, given `buft`, AllocationError.

    Args:
        driver: The driver that raises the errors.
        call: The operation, for the message.
        buft: The buffer type of the allocation.
        nbytes: The requested bytes.
        tensor: The tensor that the operation is on; described in the message, which is made only if needed.
    """

    __slots__ = ("_buft", "_call", "_driver", "_nbytes", "_tensor")

    def __init__(
        self,
        driver: CupyDriver,
        call: str,
        buft: BufferType | None = None,
        nbytes: int = 0,
        tensor: Tensor | None = None,
    ) -> None:
        self._driver, self._call, self._buft, self._nbytes, self._tensor = driver, call, buft, nbytes, tensor

    def __enter__(self) -> None:
        guard.enter(self._call)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        guard.leave()
        if error is None or not isinstance(error, self._driver.errors):
            return
        if self._buft is not None and self._driver.is_out_of_memory(error):
            raise self._buft.out_of_memory(self._nbytes, str(error)) from None
        on = "" if self._tensor is None else f" on {self._tensor.describe()}"
        raise BackendError(f"{self._call}{on}: {error}") from None


def address_of(array: Any) -> int:
    """Return the address of a NumPy array's memory."""
    try:
        return ctypes.addressof(ctypes.c_char.from_buffer(array))  # a quarter of the time
    except (BufferError, TypeError, ValueError):  # read-only, with gaps, empty, or of a type without buffers
        return int(array.__array_interface__["data"][0])


def grid(launch: Launch, resident: Callable[[], int]) -> tuple[int, int, int]:
    """Return a launch's grid; of a persistent kernel, only as many blocks as the device runs at once."""
    x, y, z = launch.groups
    return (min(x, max(1, -(-resident() // (y * z)))) if launch.persistent else x), y, z


OPTIONS: Final = ("-diag-suppress=177",)  # functions that a kernel does not use
"""NVRTC's options, equal for all kernels, because CuPy queries the compiler's version for each set."""


def text(kernel: Kernel, defines: Defines, wg: int, dependent: bool = False) -> str:
    """Return the CUDA C++ text of a kernel, preceded by macros: `defines`, and WG, the block size.

    If it is `dependent`, for programmatic dependent launches, it begins with the wait for the one before.
    """
    macros = "".join(f"#define {name} {value}\n" for name, value in (*defines, ("WG", wg)))
    found = macros + source(kernel, "cuda", defines)
    return HEAD.sub(r"\g<0>    wait_for_previous_kernel();\n", found) if dependent else found
