"""Tensor parallelism: a meta device, made of several devices that compute each node together.

    state     how results are sharded, and checks of users' split states
    layout    slices of views
    sums      which results are summed over the devices
    buffer, device, backend, plan, reduce    the interfaces, implemented on those of the simple devices

Without a shard rule, operands are gathered and each device computes the whole node, so that any graph runs.

Source: ggml-backend-meta.cpp.
"""

from ggmlb.core.sharding import MIRRORED, SplitAxis, SplitState
from ggmlb.parallel.meta.backend import MetaBackend
from ggmlb.parallel.meta.buffer import MetaBuffer, MetaBufferType
from ggmlb.parallel.meta.device import MetaDevice, meta_device
from ggmlb.parallel.meta.state import split_by, split_evenly

__all__ = [
    "MIRRORED",
    "MetaBackend",
    "MetaBuffer",
    "MetaBufferType",
    "MetaDevice",
    "SplitAxis",
    "SplitState",
    "meta_device",
    "split_by",
    "split_evenly",
]
