"""Abstract base classes of a backend (ggml-backend.h and ggml-backend-impl.h).

    BackendReg ── Device ──┬── BufferType ── Buffer     memory
                           ├── Backend ── GraphPlan     a stream on the device, and work bound for it
                           └── Event                    a point in a stream's work

A buffer of host memory is a `HostBuffer`; several buffers as one are a `MultiBuffer`.

Public methods check their arguments and raise the errors, once for all backends. A backend implements the
underscored hooks: all abstract ones, and others where the default can be improved.
"""

from ggmlb.interface.backend import Backend, Command
from ggmlb.interface.buffer import Buffer, MultiBuffer, PartedBuffer
from ggmlb.interface.buffer_type import BufferType
from ggmlb.interface.device import API_VERSION, BackendReg, Caps, Device, DeviceProps
from ggmlb.interface.event import Event
from ggmlb.interface.host import HostBuffer, HostBufferType
from ggmlb.interface.plan import GraphPlan
from ggmlb.interface.planned import PlannedBuffer, planned_memory
from ggmlb.interface.transfer import tensor_alloc, tensor_copy, tensor_copy_async, view_init

__all__ = [
    "API_VERSION",
    "Backend",
    "BackendReg",
    "Buffer",
    "BufferType",
    "Caps",
    "Command",
    "Device",
    "DeviceProps",
    "Event",
    "GraphPlan",
    "HostBuffer",
    "HostBufferType",
    "MultiBuffer",
    "PartedBuffer",
    "PlannedBuffer",
    "planned_memory",
    "tensor_alloc",
    "tensor_copy",
    "tensor_copy_async",
    "view_init",
]
