"""What a backend is made of: ggml-backend.h and ggml-backend-impl.h as abstract classes.

    BackendReg ── Device ──┬── BufferType ── Buffer     where data lies
                           ├── Backend ── GraphPlan     a stream on the device, and work bound for it
                           └── Event                    a point in a stream's work

The public methods check their arguments and word the errors, once for all backends. A backend writes
the underscored hooks below them: the abstract ones always, the others where it has something better
than the default.
"""

from ggmlb.interface.backend import Backend, Event, GraphPlan
from ggmlb.interface.buffer import Buffer, BufferType, MultiBuffer
from ggmlb.interface.device import API_VERSION, BackendReg, Caps, Device, DeviceProps
from ggmlb.interface.transfer import tensor_alloc, tensor_copy, tensor_copy_async, view_init

__all__ = [
    "API_VERSION",
    "Backend",
    "BackendReg",
    "Buffer",
    "BufferType",
    "Caps",
    "Device",
    "DeviceProps",
    "Event",
    "GraphPlan",
    "MultiBuffer",
    "tensor_alloc",
    "tensor_copy",
    "tensor_copy_async",
    "view_init",
]
