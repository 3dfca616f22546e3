"""The optional functions of the registration, for `BackendReg.get_proc_address`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ggmlb.interface.data import host_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import numpy.typing as npt

    from ggmlb.interface import Backend


def set_abort_callback(backend: Backend, callback: Callable[[], bool] | None) -> None:
    """Ask `callback` before each node whether to stop; graphs are not replayed meanwhile."""
    backend.abort_callback = callback


def register_host_buffer(array: npt.NDArray[Any]) -> bool:
    """Page-lock a contiguous array's memory, so that transfers from and to it are fast.

    The array is kept until `unregister_host_buffer`.

    Returns:
        Whether the system let it.

    Source: ggml_backend_cuda_register_host_buffer.
    """
    from ggmlb.backends.cuda import backend_reg

    data = host_bytes(array, "register_host_buffer")
    return backend_reg().devices[0].registrations.add(data)


def unregister_host_buffer(array: npt.NDArray[Any]) -> None:
    """Undo `register_host_buffer` (ggml_backend_cuda_unregister_host_buffer)."""
    from ggmlb.backends.cuda import backend_reg

    backend_reg().devices[0].registrations.remove(array.ctypes.data)


def get_features() -> dict[str, str]:
    """Return how the backend is set up, as names and values (ggml_backend_get_features)."""
    from ggmlb import env
    from ggmlb.backends.cuda import backend_reg

    devices = backend_reg().devices
    return {
        "ARCHS": ",".join(str(c) for c in sorted({d.facts.capability for d in devices})),
        "GRAPHS": str(int(env.cuda_graphs())),
        "PINNED": str(int(env.cuda_pinned())),
        "REGISTER_HOST": str(int(env.cuda_register_host())),
    }


PROCS: Mapping[str, Callable[..., Any]] = {
    "set_abort_callback": set_abort_callback,
    "register_host_buffer": register_host_buffer,
    "unregister_host_buffer": unregister_host_buffer,
    "get_features": get_features,
}
