"""ggml's backend layer for Python, GPU first: one compute graph, many devices.

    Context, Tensor, Graph        describe what to compute; one method per ggml op
    devices, init_best, ...       the devices of this machine (`ggmlb.interface.registry`)
    alloc_ctx_tensors, ...        place tensors in a device's memory (`ggmlb.runtime.alloc`)
    Scheduler                     split a graph over several devices, and run it
    open_gguf, save_gguf          metadata and tensors of a GGUF file (`ggmlb.models.gguf`)
    evaluate                      allocate and compute in one call, for notebooks

Importing this package imports NumPy only. A backend and its array library are imported when one of its
devices is first requested.
"""

import typing as _typing

from ggmlb.core.arguments import checked as _checked
from ggmlb.core.context import Context
from ggmlb.core.dtypes import DType, can_quantize, dequantize, quantize
from ggmlb.core.enums import (
    BufferUsage,
    DeviceType,
    GluOp,
    Hint,
    Op,
    OpPool,
    Prec,
    RopeType,
    ScaleFlag,
    ScaleMode,
    SortOrder,
    Status,
    TensorFlag,
    TriType,
    UnaryOp,
)
from ggmlb.core.errors import (
    AllocationError,
    ArgumentError,
    BackendBroken,
    BackendError,
    BackendUnavailable,
    BoundsError,
    DeviceLostError,
    DTypeError,
    Error,
    FreedError,
    GraphError,
    MissingBackendError,
    MissingModelError,
    ModelError,
    NotAllocatedError,
    RegistryError,
    SanitizerError,
    ShapeError,
    UnknownOpError,
    UnsupportedOpError,
)
from ggmlb.core.graph import Graph
from ggmlb.core.tensor import Tensor
from ggmlb.inspect import views as _views
from ggmlb.interface import (
    API_VERSION,
    Backend,
    BackendReg,
    Buffer,
    BufferType,
    Caps,
    Device,
    DeviceProps,
    Event,
    GraphPlan,
    MultiBuffer,
    planned_memory,
    tensor_alloc,
    tensor_copy,
    tensor_copy_async,
    view_init,
)
from ggmlb.interface.arrays import tensor_of as _tensor_of
from ggmlb.interface.registry import (
    cpu_buffer_from_ptr,
    cpu_buffer_type,
    default_devices,
    device_by_name,
    device_by_type,
    devices,
    init_best,
    init_by_name,
    init_by_type,
    load,
    load_all,
    load_all_from_path,
    reg_by_name,
    register,
    register_device,
    regs,
    set_default_devices,
    unavailable,
    unload,
)
from ggmlb.runtime.alloc import (
    GraphAllocator,
    TensorAllocator,
    alloc_ctx_tensors,
    alloc_ctx_tensors_size,
    override_for,
)
from ggmlb.runtime.evaluate import evaluate
from ggmlb.runtime.scheduler import NodePlacement, Scheduler
from ggmlb.system import env as _env

if _typing.TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence

    from ggmlb.backends.ggml.registration import GgmlRegistration
    from ggmlb.backends.ray.cluster import Cluster
    from ggmlb.inspect.compare import GraphCopy, compare_graph_backend, graph_copy
    from ggmlb.inspect.sanitizer import Sanitizer, sanitize
    from ggmlb.models.gguf import GgufFile
    from ggmlb.models.gguf.writer import TensorData, Writable
    from ggmlb.parallel.meta import (
        MetaBackend,
        MetaBuffer,
        MetaBufferType,
        SplitAxis,
        SplitState,
        meta_device,
        split_evenly,
    )

__version__ = "0.1.0"


@_checked
def open_gguf(path: "str | os.PathLike[str]") -> "GgufFile":
    """Open a GGUF file: tensors by name, metadata by key; both are read lazily.

    Args:
        path: The file; of a split model, the first part (`...-00001-of-0000N.gguf`).

    Raises:
        ModelError: The file is missing, cut short or corrupt, or of another format.
    """
    from ggmlb.models.gguf import GgufFile

    return GgufFile(path)


@_checked
def save_gguf(
    path: "str | os.PathLike[str]", metadata: "Mapping[str, Writable]", tensors: "Mapping[str, TensorData]"
) -> None:
    """Write `metadata` and `tensors` to a GGUF file; see `ggmlb.models.gguf.save_gguf` for their values.

    Raises:
        ArgumentError: A key, name or value that the format does not have.
        DTypeError: ggml has no such type.
        ShapeError: A tensor's bytes do not fit its extents.
        ModelError: The file cannot be written.

    Source: gguf_write_to_file.
    """
    from ggmlb.models.gguf import save_gguf

    save_gguf(path, metadata, tensors)


@_checked
def connect(
    address: str = "auto", devices: "Sequence[str] | None" = None, shared: "Sequence[str]" = ()
) -> "Cluster":
    """Connect to a Ray cluster, and register its machines' devices, by names such as `node1/CUDA0`.

    Args:
        address: Of the cluster, as `ray.init` takes it: `"auto"` for the one that this machine belongs to,
            `"local"` to start one on this machine. Without effect where Ray is connected already.
        devices: Names of the devices that each machine offers; all of a machine's by default.
        shared: Folders with the same files on all machines, whose weights each reads itself.

    Returns:
        The connection, a context manager: its end releases the devices.

    Raises:
        BackendUnavailable: Ray is not installed, there is no cluster, or a machine does not answer.
        BackendBroken: A machine has another version of ggmlb or Python.
        RegistryError: There is a connection already, or a machine has no device of that name.
    """
    from ggmlb.backends.ray.cluster import connect

    return connect(address, devices, shared)


@_checked
def register_with_ggml(
    device: "Device | str", library: "str | os.PathLike[str] | None" = None, repack: bool = True
) -> "GgmlRegistration":
    """Register a device with a compiled ggml in this process, so that llama.cpp and others compute on it.

    In ggml it is a GPU named `ggmlb-` and its name. Environment variable `GGMLB_REGISTER_WITH_GGML` has names
    of devices, with commas between them, to register when ggmlb is imported.

    Args:
        device: The device, or its name.
        library: `"xllamacpp"`, `"llama-cpp-python"`, `"ggml-python"`, or the path of a `libggml`. By default
            the one that this process has loaded, else the one that is installed.
        repack: Whether weights are stored as the device computes them fastest, if it has such memory
            (`extra_bufts`). If not, they are used where the file is mapped, if the device can.

    Returns:
        The registration; its `unregister` ends it.

    Raises:
        BackendUnavailable: There is no such library or more than one, or its version is unknown.
        BackendBroken: The library cannot be loaded.
        RegistryError: There is no such device, or it is registered already.

    Source: ggml_backend_register.
    """
    from ggmlb.backends.ggml.registration import register_with_ggml

    return register_with_ggml(device, library, repack)


# Hooks: upper rooms register functions with classes of lower rooms, which do not import them.
Context.array_importer = staticmethod(_tensor_of)
_views.register()

_LATE = {
    "inspect.compare": "GraphCopy compare_graph_backend graph_copy",
    "inspect.sanitizer": "Sanitizer sanitize",
    "parallel.meta": "MetaBackend MetaBuffer MetaBufferType SplitAxis SplitState meta_device split_evenly",
}
"""Public names of rarely used modules, which are imported at first access."""


def __getattr__(name: str) -> "_typing.Any":
    from importlib import import_module

    for module, names in _LATE.items():
        if name in names.split():
            found = globals()[name] = getattr(import_module(f"{__name__}.{module}"), name)
            return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> "list[str]":
    return sorted({*globals(), *__all__})


if _env.flag("GGMLB_SANITIZE", default=False):
    __getattr__("Sanitizer")().start()

for _name in (_env.text("GGMLB_REGISTER_WITH_GGML") or "").split(","):
    if _name:
        register_with_ggml(_name.strip())

__all__ = [
    "API_VERSION",
    "AllocationError",
    "ArgumentError",
    "Backend",
    "BackendBroken",
    "BackendError",
    "BackendReg",
    "BackendUnavailable",
    "BoundsError",
    "Buffer",
    "BufferType",
    "BufferUsage",
    "Caps",
    "Context",
    "DType",
    "DTypeError",
    "Device",
    "DeviceLostError",
    "DeviceProps",
    "DeviceType",
    "Error",
    "Event",
    "FreedError",
    "GluOp",
    "Graph",
    "GraphAllocator",
    "GraphCopy",
    "GraphError",
    "GraphPlan",
    "Hint",
    "MetaBackend",
    "MetaBuffer",
    "MetaBufferType",
    "MissingBackendError",
    "MissingModelError",
    "ModelError",
    "MultiBuffer",
    "NodePlacement",
    "NotAllocatedError",
    "Op",
    "OpPool",
    "Prec",
    "RegistryError",
    "RopeType",
    "Sanitizer",
    "SanitizerError",
    "ScaleFlag",
    "ScaleMode",
    "Scheduler",
    "ShapeError",
    "SortOrder",
    "SplitAxis",
    "SplitState",
    "Status",
    "Tensor",
    "TensorAllocator",
    "TensorFlag",
    "TriType",
    "UnaryOp",
    "UnknownOpError",
    "UnsupportedOpError",
    "__version__",
    "alloc_ctx_tensors",
    "alloc_ctx_tensors_size",
    "can_quantize",
    "compare_graph_backend",
    "connect",
    "cpu_buffer_from_ptr",
    "cpu_buffer_type",
    "default_devices",
    "dequantize",
    "device_by_name",
    "device_by_type",
    "devices",
    "evaluate",
    "graph_copy",
    "init_best",
    "init_by_name",
    "init_by_type",
    "load",
    "load_all",
    "load_all_from_path",
    "meta_device",
    "open_gguf",
    "override_for",
    "planned_memory",
    "quantize",
    "reg_by_name",
    "register",
    "register_device",
    "register_with_ggml",
    "regs",
    "sanitize",
    "save_gguf",
    "set_default_devices",
    "split_evenly",
    "tensor_alloc",
    "tensor_copy",
    "tensor_copy_async",
    "unavailable",
    "unload",
    "view_init",
]
