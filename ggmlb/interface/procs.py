"""Functions that several backends export by `BackendReg.get_proc_address`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ggmlb.core.arguments import checked
from ggmlb.core.errors import BackendError

if TYPE_CHECKING:
    from ggmlb.interface.backend import AbortCallback, Backend
    from ggmlb.interface.buffer_type import BufferType
    from ggmlb.interface.device import Device


@checked
def set_abort_callback(backend: Backend, callback: AbortCallback | None) -> None:
    """Set a callback called before each node of a graph; `True` stops the computation. `None` removes it.

    Source: ggml_backend_set_abort_callback_t.
    """
    backend.abort_callback = callback


@checked
def set_n_threads(backend: Backend, n: int) -> None:
    """Set the number of threads of a backend (ggml_backend_set_n_threads_t).

    Raises:
        ArgumentError: `n` is less than 1.
        BackendError: The backend has no threads to set.
    """
    set_threads = getattr(backend, "set_n_threads", None)
    if set_threads is None:
        raise BackendError(f"set_n_threads: {backend.name} has no threads to set; give a CPU backend")
    set_threads(n)


@checked
def dev_get_extra_bufts(device: Device) -> list[BufferType]:
    """Return a device's buffer types that repack weights (ggml_backend_dev_get_extra_bufts_t)."""
    return list(device.extra_bufts)
