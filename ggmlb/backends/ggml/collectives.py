"""Work of several devices by a library's own functions: sums, and matrices with rows split over them.

CUDA, SYCL and RPC have `ggml_backend_comm_*`, SYCL has `ggml_backend_split_buffer_type` (ggml 0.26).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import ExitStack
from ctypes import c_bool, c_float, c_int, c_size_t, c_void_p
from math import inf
from typing import TYPE_CHECKING, Final, cast

from ggmlb.backends.ggml.backend import GgmlBackend
from ggmlb.backends.ggml.buffer import GgmlBufferType
from ggmlb.backends.ggml.library import guard
from ggmlb.core.arguments import checked
from ggmlb.core.enums import TensorFlag
from ggmlb.core.errors import ArgumentError
from ggmlb.core.tensor import Tensor
from ggmlb.interface import Backend

if TYPE_CHECKING:
    from ggmlb.backends.ggml import GgmlReg
    from ggmlb.backends.ggml.device import GgmlDevice

MAX_SHARES: Final = 128
"""Most devices of a library that share the rows of a matrix."""


class GgmlCommunicator:
    """A group of streams of one library that sums tensors."""

    def __init__(self, backends: Sequence[GgmlBackend], handle: int) -> None:
        self.backends = tuple(backends)
        proc = backends[0].device.proc
        self._free = proc("ggml_backend_comm_free", None, c_void_p)
        self._allreduce = proc("ggml_backend_comm_allreduce_tensor", c_bool, c_void_p, c_void_p)
        self._handle = handle

    def allreduce(self, tensors: Sequence[Tensor]) -> bool:
        """Queue an in-place sum: each stream's tensor becomes the sum of all.

        Args:
            tensors: One for each stream, in that order, of one type and shape, on the stream's device.

        Returns:
            Whether it was queued; `False` if the library cannot sum these.

        Source: ggml_backend_comm_allreduce_tensor.
        """
        library = self.backends[0].device.library
        memory, n = library.room(len(tensors)), len(tensors)
        for i, (backend, t) in enumerate(zip(self.backends, tensors, strict=True)):
            if t.buffer is None or not backend.device.supports_buft(t.buffer.buft):
                return False
            if (t.dtype, t.ne) != (tensors[0].dtype, tensors[0].ne):
                return False
            library.pack(memory, i, t, (*backend.device.place(t), 0), flags=t.flags | TensorFlag.COMPUTE)
        start = ctypes.addressof(memory)
        pointers = (c_void_p * n)(*[start + i * library.tensor_size for i in range(n)])
        guard.enter("sum tensors over devices")
        try:
            with ExitStack() as locks:
                for backend in sorted(self.backends, key=id):  # all threads take them in one order
                    locks.enter_context(backend.holding(memory))
                return bool(self._allreduce(self._handle, pointers))
        finally:
            guard.leave()

    def free(self) -> None:
        """Free the group in the library (ggml_backend_comm_free)."""
        self._free(self._handle)


def comm_init(backends: Sequence[Backend]) -> GgmlCommunicator | None:
    """Connect streams for sums; `None` if their library has no such function, or connects other devices only.

    Source: ggml_backend_comm_init.
    """
    own = [b for b in backends if isinstance(b, GgmlBackend)]
    if not own or len(own) < len(backends) or len({b.device.library for b in own}) > 1:
        return None
    init = own[0].device.proc("ggml_backend_comm_init", c_void_p, c_void_p, c_size_t)
    handle = init and init((c_void_p * len(own))(*[b.handle for b in own]), len(own))
    return GgmlCommunicator(own, handle) if handle else None


@checked
def split_buffer_type(
    reg: GgmlReg, main_device: int, tensor_split: Sequence[float] | None = None
) -> GgmlBufferType | None:
    """Return the library's buffer type that splits rows of matrices over devices; `None` if it has none.

    Args:
        reg: The registration; `get_proc_address` binds it.
        main_device: Index in `reg.devices` of the device that computes with it.
        tensor_split: The share of each of `reg.devices`, in any unit; by default as the library chooses.

    Raises:
        ArgumentError: There is no such device; or shares are negative, too many, or of another backend.

    Source: ggml_backend_split_buffer_type_t.
    """
    devices = cast("Sequence[GgmlDevice]", reg.devices)
    if not 0 <= main_device < len(devices):
        raise ArgumentError(f"split_buffer_type: there is no device {main_device}; there are {len(devices)}")
    given = tuple(tensor_split or ())
    if len(given) > len(devices) or not all(0 <= share < inf for share in given):
        raise ArgumentError(
            f"split_buffer_type: tensor_split is {list(given)}; give a share, 0 or more, for each of the "
            f"{len(devices)} devices"
        )
    main, shares = devices[main_device], (c_float * MAX_SHARES)()
    find = main.proc("ggml_backend_split_buffer_type", c_void_p, c_int, c_void_p)
    if find is None:
        return None
    group = [d for d in devices if d.library is main.library and d.backend_name == main.backend_name]
    for device, share in zip(devices, given, strict=False):
        if device in group:
            shares[group.index(device)] = share
        elif share:
            raise ArgumentError(
                f"split_buffer_type: {main.name} cannot split rows with {device.name}; give it the share 0"
            )
    handle = find(group.index(main), shares)  # shares that are all 0 let the library choose
    return GgmlBufferType(main, handle) if handle else None
