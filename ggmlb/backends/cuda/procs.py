"""The optional functions of the registration, for `BackendReg.get_proc_address`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from ggmlb.backends.cuda.collectives import comm_allreduce_tensor, comm_free, comm_init
from ggmlb.backends.cuda.host import pins_memory
from ggmlb.backends.cuda.plan import uses_graphs
from ggmlb.interface.data import host_bytes
from ggmlb.interface.procs import set_abort_callback
from ggmlb.parallel.row_split import split_buffer_type

if TYPE_CHECKING:
    from ggmlb.backends.cuda import CudaReg
    from ggmlb.interface import Device


def procs(reg: CudaReg) -> Mapping[str, Callable[..., Any]]:
    """Return the optional functions by name."""
    return {
        "set_abort_callback": set_abort_callback,
        "get_features": get_features,
        "driver_version": driver_version,
        "register_host_buffer": partial(register_host_buffer, reg),
        "unregister_host_buffer": partial(unregister_host_buffer, reg),
        "split_buffer_type": partial(split_buffer_type, reg),
        "comm_init": comm_init,
        "comm_free": comm_free,
        "comm_allreduce_tensor": comm_allreduce_tensor,
    }


def get_features(reg: CudaReg) -> list[tuple[str, str]]:
    """Return the cards' features and the backend's settings (ggml_backend_get_features)."""
    return [
        ("ARCHS", ",".join(str(c) for c in sorted({d.facts.capability for d in reg.devices}))),
        ("CUBLAS", str(int(reg.devices[0].has_blas))),
        ("GRAPHS", str(int(uses_graphs()))),
        ("PINNED", str(int(pins_memory()))),
        ("REGISTER_HOST", str(int(reg.devices[0].caps.buffer_from_host_ptr))),
    ]


def driver_version(device: Device) -> str:
    """Return the CUDA versions of the driver and of CuPy's runtime: `"CUDA 13.0, runtime 12.9"`."""
    from cupy.cuda import runtime

    driver, ours = (
        f"{v // 1000}.{v % 1000 // 10}" for v in (runtime.driverGetVersion(), runtime.runtimeGetVersion())
    )
    return f"CUDA {driver}, runtime {ours}"


def register_host_buffer(reg: CudaReg, array: npt.NDArray[Any]) -> bool:
    """Page-lock a contiguous array's memory, so that transfers from and to it are fast.

    The array is kept until as many calls of `unregister_host_buffer(array)`. Arrays within a locked one
    share its lock; an array that is partly in another cannot be locked.

    Returns:
        Whether the system allowed it.

    Source: ggml_backend_cuda_register_host_buffer.
    """
    return reg.host_buffer_type.registrations.add(host_bytes(array, "register_host_buffer"))


def unregister_host_buffer(reg: CudaReg, array: npt.NDArray[Any]) -> None:
    """Undo `register_host_buffer` (ggml_backend_cuda_unregister_host_buffer)."""
    reg.host_buffer_type.registrations.remove(array.ctypes.data)
