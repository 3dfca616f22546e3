"""Snapshots of host memory on their way to a device, in host memory that the device reads by itself.

What a queued upload reads must stay as it is, while whoever computed it may overwrite it at once. So the
scheduler copies it first; out of page-locked memory, the transfer then needs no other copy, and no thread.
"""

from __future__ import annotations

import ctypes
import weakref
from collections import defaultdict, deque
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ggmlb.core.enums import DeviceType
from ggmlb.core.errors import Error

if TYPE_CHECKING:
    from ggmlb.core.tensor import Tensor
    from ggmlb.interface import Backend, Buffer, BufferType
    from ggmlb.interface.data import Bytes

MOST_LOCKED: Final = 256 << 20
"""Bytes that are locked for a stream; what is on its way beyond that lies in ordinary memory."""

LEAST_BLOCK: Final = 4096
"""Bytes of the smallest block."""


class Staging:
    """Blocks of a device's own kind of host memory; one serves again once nobody holds an array in it.

    Devices that compute in the host's memory have no use for it, and get arrays of NumPy's.
    """

    def __init__(self, backend: Backend) -> None:
        device = backend.device
        is_apart = device.type is DeviceType.GPU and device.caps.host_buffer
        self._memory: BufferType | None = device.host_buffer_type if is_apart else None
        self._free: defaultdict[int, deque[Buffer]] = defaultdict(deque)
        self._nbytes = 0

    def snapshot(self, src: Tensor) -> Bytes:
        """Return a copy of a tensor's bytes, whose memory serves again when the array is gone."""
        size = max(LEAST_BLOCK, 1 << (src.nbytes - 1).bit_length())
        buffer, block = src.buffer, self._take(size)
        if block is None or buffer is None:
            return src.get()
        # An owner of its own, as views of a NumPy array hold its base, and not the array.
        memory: Any = (ctypes.c_ubyte * src.nbytes).from_address(block.base.ctypes.data)
        weakref.finalize(memory, self._free[size].append, block).atexit = False
        array: Bytes = np.frombuffer(memory, np.uint8)
        return buffer.get_tensor(src, out=array)

    def _take(self, size: int) -> Buffer | None:
        if self._memory is None:
            return None
        try:
            return self._free[size].popleft()
        except IndexError:
            pass
        if self._nbytes + size > MOST_LOCKED:
            return None
        try:
            block = self._memory.alloc_buffer(size)
        except Error:
            return None
        self._nbytes += size
        return block
