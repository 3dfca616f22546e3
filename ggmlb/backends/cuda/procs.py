"""CUDA's optional functions for `BackendReg.get_proc_address`, such as all-reduce sums by NCCL."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from ggmlb.backends.cuda.backend import CudaBackend
from ggmlb.backends.cuda.buffer import CudaBuffer, pins_memory
from ggmlb.backends.cuda.driver import cuda_errors
from ggmlb.backends.cuda.plan import uses_graphs
from ggmlb.core.dtypes import DType
from ggmlb.core.tensor import Tensor
from ggmlb.interface import Backend
from ggmlb.interface.data import host_bytes
from ggmlb.interface.procs import set_abort_callback
from ggmlb.parallel.row_split import split_buffer_type

if TYPE_CHECKING:
    from ggmlb.backends.cuda import CudaReg
    from ggmlb.backends.cuda.cupy_driver import Collective
    from ggmlb.interface import Device


def procs(reg: CudaReg) -> Mapping[str, Callable[..., Any]]:
    """Return CUDA's optional functions by name, for `BackendReg.get_proc_address`."""
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
    """Return names and values of CUDA's features and settings (ggml_backend_get_features)."""
    return [
        ("ARCHS", ",".join(str(c) for c in sorted({d.facts.capability for d in reg.devices}))),
        ("CUBLAS", str(int(reg.devices[0].has_blas))),
        ("GRAPHS", str(int(uses_graphs()))),
        ("PINNED", str(int(pins_memory()))),
        ("REGISTER_HOST", str(int(reg.devices[0].caps.buffer_from_host_ptr))),
    ]


def driver_version(device: Device) -> str:
    """Return the CUDA versions of driver and runtime, such as `"CUDA 13.0, runtime 12.9"`."""
    from cupy.cuda import runtime

    driver, ours = (
        f"{v // 1000}.{v % 1000 // 10}" for v in (runtime.driverGetVersion(), runtime.runtimeGetVersion())
    )
    return f"CUDA {driver}, runtime {ours}"


def register_host_buffer(reg: CudaReg, array: npt.NDArray[Any]) -> bool:
    """Page-lock a contiguous array's memory, so that transfers from and to it are fast.

    Each call needs an `unregister_host_buffer(array)`; until then, the array is kept alive. Arrays within a
    locked one share its lock; an array that is partly in another cannot be locked.

    Returns:
        Whether the system allowed it.

    Source: ggml_backend_cuda_register_host_buffer.
    """
    return reg.host_buffer_type.registrations.add(host_bytes(array, "register_host_buffer"))


def unregister_host_buffer(reg: CudaReg, array: npt.NDArray[Any]) -> None:
    """Undo `register_host_buffer` (ggml_backend_cuda_unregister_host_buffer)."""
    reg.host_buffer_type.registrations.remove(array.ctypes.data)


SUMMED = frozenset({DType.F32, DType.F16, DType.BF16})


class Communicator:
    """A group of streams, each of another card, for all-reduce sums by NCCL."""

    def __init__(self, backends: Sequence[CudaBackend], collective: Collective) -> None:
        self.backends = tuple(backends)
        self.collective = collective


def comm_init(backends: Sequence[Backend]) -> Communicator | None:
    """Connect streams for all-reduce; `None` if NCCL is missing or two streams share a card.

    Source: ggml_backend_comm_init.
    """
    own = [b for b in backends if isinstance(b, CudaBackend)]
    cards = [b.device.index for b in own]
    if len(own) < len(backends) or not own or len(set(cards)) < len(cards):
        return None
    driver = own[0].device.driver
    # NCCL restores the current device: it must be one of the group.
    with cuda_errors(driver, f"connect {', '.join(b.name for b in own)}"), own[0].device.on():
        collective = driver.collective(cards)
    return None if collective is None else Communicator(own, collective)


def comm_free(comm: Communicator) -> None:
    """Release a group's NCCL connection (ggml_backend_comm_free)."""
    with comm.backends[0].device.on():
        comm.collective.free()


def comm_allreduce_tensor(comm: Communicator, tensors: Sequence[Tensor]) -> bool:
    """Queue an all-reduce sum, in place: each stream's tensor becomes the sum of all.

    Args:
        comm: From `comm_init`.
        tensors: One for each stream, in that order, of one type and shape, on the stream's card.

    Returns:
        Whether it was queued; not for types other than f32, f16 and bf16, nor for tensors with gaps.

    Source: ggml_backend_comm_allreduce_tensor.
    """
    first = tensors[0]
    for backend, t in zip(comm.backends, tensors, strict=True):
        buffer = t.buffer
        if not isinstance(buffer, CudaBuffer) or buffer.device is not backend.device:
            return False
        if t.dtype not in SUMMED or not t.is_contiguous() or (t.dtype, t.ne) != (first.dtype, first.ne):
            return False
    if first.is_empty:
        return True
    places = []
    for backend, t in zip(comm.backends, tensors, strict=True):
        assert isinstance(t.buffer, CudaBuffer)
        t.buffer.streams.add(backend.stream)
        places.append((t.buffer.address + t.offset, backend.stream.handle))
    with ExitStack() as stack:
        # Only here are several streams' locks taken together: always in the order of the cards.
        for backend in sorted(comm.backends, key=lambda b: b.device.index):
            stack.enter_context(backend.stream.lock)
        device = comm.backends[0].device
        stack.enter_context(cuda_errors(device.driver, f"sum {first.describe()} over cards"))
        stack.enter_context(device.on())
        comm.collective.all_reduce(places, first.n_elements, first.dtype)
    return True
