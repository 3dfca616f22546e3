"""Tensor parallelism: a device made of several, which compute every node together.

    state     how results are sharded, and checks of what a user asks for
    layout    which part of a view each device holds
    buffer, device, backend, plan, reduce    the interfaces, over those of the simple devices

Where no rule speaks, operands are gathered and each device computes the whole: any graph runs.

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
