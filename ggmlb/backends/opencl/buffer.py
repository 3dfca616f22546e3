"""Device memory: one OpenCL buffer for each Buffer, with tensors at byte offsets."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import pyopencl as cl
import pyopencl.array

from ggmlb.backends.opencl.runtime import cl_errors, is_done
from ggmlb.core.placement import overlap
from ggmlb.core.tensor import Tensor
from ggmlb.interface import Buffer, BufferType
from ggmlb.interface.data import Bytes

if TYPE_CHECKING:
    from ggmlb.backends.opencl.device import OpenClDevice

ALIGNMENT = 128
"""Alignment of tensors [bytes]: base alignment and cache line of PoCL and common GPUs."""


class OpenClBufferType(BufferType):
    """The memory of an OpenCL device."""

    device: OpenClDevice

    def __init__(self, device: OpenClDevice, name: str | None = None) -> None:
        super().__init__(device, name or device.name, ALIGNMENT)

    @property
    def max_size(self) -> int:
        """Largest single allocation of the runtime [bytes]."""
        return int(self.device.cl_device.max_mem_alloc_size)

    def _alloc_buffer(self, nbytes: int) -> OpenClBuffer:
        device = self.device
        if nbytes > device.ledger.free:
            raise self.out_of_memory(nbytes)
        if not nbytes:
            return self._buffer(None, 0)
        with cl_errors(f"allocate {nbytes:,} bytes on {self.name}", self, nbytes, device=device.name):
            memory = cl.Buffer(device.context, cl.mem_flags.READ_WRITE, nbytes)
            # Runtimes reserve memory at first use; use it now, while a failure can be handled.
            undefined = cl.mem_migration_flags.CONTENT_UNDEFINED
            cl.enqueue_migrate_mem_objects(device.transfers, [memory], undefined).wait()
        return self._buffer(memory, nbytes)

    def _buffer(self, memory: cl.Buffer | None, nbytes: int) -> OpenClBuffer:
        return OpenClBuffer(self, memory, nbytes)


class OpenClBuffer(Buffer):
    """An OpenCL buffer.

    Synchronous transfers run on the device's transfer queue, after queued work that uses this buffer, and
    independent of other work.

    Attributes:
        device: The device it belongs to.
    """

    def __init__(
        self,
        buft: OpenClBufferType,
        memory: cl.Buffer | None,
        nbytes: int,
        host: Bytes | None = None,
        *,
        is_ours: bool = True,
    ) -> None:
        super().__init__(buft, nbytes)
        self.device = buft.device
        self._memory = memory
        self._host = host
        self.is_read_only = host is not None and not host.flags.writeable
        self._uses: dict[int, cl.Event] = {}
        ledger = self.device.ledger
        ticket = ledger.take(nbytes if is_ours and host is None else 0)
        self._release = weakref.finalize(self, ledger.give_back, memory, ticket, self._uses)
        self._release.atexit = False

    @classmethod
    def over_host_memory(cls, buft: OpenClBufferType, array: Bytes) -> OpenClBuffer:
        """Return a buffer over the array's memory."""
        if not array.size:
            return cls(buft, None, 0, array)
        access = cl.mem_flags.READ_WRITE if array.flags.writeable else cl.mem_flags.READ_ONLY
        name = buft.device.name
        with cl_errors(f"use {array.size:,} bytes of host memory on {name}", buft, array.size, device=name):
            memory = cl.Buffer(buft.device.context, access | cl.mem_flags.USE_HOST_PTR, hostbuf=array)
        return cls(buft, memory, array.size, array)

    @property
    def base(self) -> cl.Buffer | None:
        """The OpenCL buffer; `None` for a size of 0, which OpenCL does not have."""
        return self._memory

    @property
    def host_memory(self) -> Bytes | None:
        """The array under the buffer."""
        return self._host

    @property
    def memory(self) -> cl.Buffer:
        """The OpenCL buffer; not for empty buffers."""
        assert self._memory is not None
        return self._memory

    def note_use(self, queue_id: int, event: cl.Event) -> None:
        """Remember the last command of a backend's queue that uses the buffer."""
        self._uses[queue_id] = event

    def uses(self) -> list[cl.Event]:
        """Return the commands that may still use the buffer."""
        return [event for event in list(self._uses.values()) if not is_done(event)]

    def _set_tensor(self, tensor: Tensor, data: Bytes, offset: int) -> None:
        with cl_errors(f"set_tensor on {tensor.describe()}", device=self.device.name):
            cl.enqueue_copy(
                self.device.transfers,
                self.memory,
                data,
                dst_offset=tensor.offset + offset,
                wait_for=self.uses(),
                is_blocking=True,
            )

    def _get_tensor(self, tensor: Tensor, out: Bytes, offset: int) -> None:
        with cl_errors(f"get_tensor on {tensor.describe()}", device=self.device.name):
            cl.enqueue_copy(
                self.device.transfers,
                out,
                self.memory,
                src_offset=tensor.offset + offset,
                wait_for=self.uses(),
                is_blocking=True,
            )

    def _memset_tensor(self, tensor: Tensor, value: int, offset: int, size: int) -> None:
        self._fill(value, tensor.offset + offset, size)

    def _clear(self, value: int) -> None:
        self._fill(value, 0, self.size)

    def _fill(self, value: int, offset: int, nbytes: int) -> None:
        with cl_errors(f"fill {nbytes:,} bytes on {self.name}", device=self.device.name):
            cl.enqueue_fill_buffer(
                self.device.transfers,
                self.memory,
                np.full(1, value, np.uint8),
                offset,
                nbytes,
                wait_for=self.uses(),
            ).wait()

    def _cpy_tensor(self, src: Tensor, dst: Tensor) -> bool:
        source = src.buffer
        if not isinstance(source, OpenClBuffer) or not can_copy(source, src, self, dst):
            return False
        with cl_errors(f"copy {src.describe()} to {dst.describe()}", device=self.device.name):
            queue_copy(self.device.transfers, src, dst, [*source.uses(), *self.uses()]).wait()
        return True

    def _as_array(
        self, tensor: Tensor, dtype: np.dtype[Any], shape: tuple[int, ...], strides: tuple[int, ...]
    ) -> cl.array.Array:
        queue, memory = self.device.transfers, self._memory
        return cl.array.Array(queue, shape, dtype, strides=strides, data=memory, offset=tensor.offset)

    def _free(self) -> None:
        self._release()
        self._memory = None
        self._host = None


def queue_copy(
    queue: cl.CommandQueue, src: Tensor, dst: Tensor, wait_for: list[cl.Event] | None = None
) -> cl.Event:
    """Queue a copy between tensors for which `can_copy` is true."""
    source, target = src.buffer, dst.buffer
    assert isinstance(source, OpenClBuffer)
    assert isinstance(target, OpenClBuffer)
    return cl.enqueue_copy(
        queue,
        target.memory,
        source.memory,
        src_offset=src.offset,
        dst_offset=dst.offset,
        byte_count=src.nbytes,
        wait_for=wait_for,
    )


def can_copy(src_buffer: OpenClBuffer, src: Tensor, dst_buffer: OpenClBuffer, dst: Tensor) -> bool:
    """Whether one command can copy between tensors: one context, equal packing, no overlap."""
    if src_buffer.device.context is not dst_buffer.device.context:
        return False
    packing = src_buffer.packing(src)
    if packing != dst_buffer.packing(dst) or (packing and (src.view_src or dst.view_src)):
        return False
    return not overlap(src, dst)
