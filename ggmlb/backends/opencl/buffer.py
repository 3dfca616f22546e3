"""Device memory, one OpenCL buffer for each Buffer with tensors at byte offsets; and pinned host memory."""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import pyopencl as cl
import pyopencl.array

from ggmlb.backends.gpu.buffer import GpuBuffer, PinnedBufferType
from ggmlb.backends.opencl.runtime import cl_errors, is_done
from ggmlb.core.placement import overlap
from ggmlb.core.tensor import Tensor
from ggmlb.interface import BufferType
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


class OpenClBuffer(GpuBuffer):
    """A buffer in the memory of an OpenCL device."""

    device: OpenClDevice

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
        """Return a buffer that uses an array's memory in place (CL_MEM_USE_HOST_PTR)."""
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
        """The host array whose memory the buffer uses; `None` if it has memory of its own."""
        return self._host

    @property
    def memory(self) -> cl.Buffer:
        """The OpenCL buffer object; must not be read for buffers of size 0, which have none."""
        assert self._memory is not None
        return self._memory

    def note_use(self, queue_id: int, event: cl.Event) -> None:
        """Remember `event` as the last command of a queue that uses the buffer."""
        self._uses[queue_id] = event

    def uses(self) -> list[cl.Event]:
        """Return the events of unfinished commands that use the buffer."""
        return [event for event in list(self._uses.values()) if not is_done(event)]

    def _set_tensor(self, tensor: Tensor, data: Bytes, offset: int) -> None:
        start = tensor.offset + offset
        self._transfer(f"set_tensor on {tensor.describe()}", self.memory, data, dst_offset=start)

    def _get_tensor(self, tensor: Tensor, out: Bytes, offset: int) -> None:
        start = tensor.offset + offset
        self._transfer(f"get_tensor on {tensor.describe()}", out, self.memory, src_offset=start)

    def _transfer(self, call: str, dst: Any, src: Any, **start: Any) -> None:
        """Copy after the commands that use the buffer, and wait for it."""
        with cl_errors(call, device=self.device.name):
            cl.enqueue_copy(self.device.transfers, dst, src, wait_for=self.uses(), is_blocking=True, **start)

    def _fill(self, value: int, offset: int, nbytes: int) -> None:
        with cl_errors(f"fill {nbytes:,} bytes on {self.name}", device=self.device.name):
            pattern = np.full(1, value, np.uint8)
            cl.enqueue_fill_buffer(
                self.device.transfers, self.memory, pattern, offset, nbytes, wait_for=self.uses()
            ).wait()

    def can_copy(self, src: Tensor, dst: Tensor) -> bool:
        """Whether one command copies `src` to `dst`: same context, same packing, no overlap."""
        source = src.buffer
        if not isinstance(source, OpenClBuffer) or source.device.context is not self.device.context:
            return False
        packing = source.packing(src)
        if packing != self.packing(dst) or (packing and (src.view_src or dst.view_src)):
            return False
        return not overlap(src, dst)

    def _copy_from(self, src: Tensor, dst: Tensor) -> None:
        source = src.buffer
        assert isinstance(source, OpenClBuffer)
        with cl_errors(f"copy {src.describe()} to {dst.describe()}", device=self.device.name):
            queue_copy(self.device.transfers, src, dst, [*source.uses(), *self.uses()]).wait()

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
    """Queue a copy between tensors for which `OpenClBuffer.can_copy` is true."""
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


class MemoryLedger:
    """Count of a device's allocated memory, because OpenCL reports no free memory and overcommits.

    Buffers are released by any thread, and by the garbage collector at any point. Each change is one
    atomic operation on a dict or deque, so that no lock is needed.

    Attributes:
        total: The device's memory [bytes].
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self._tickets = itertools.count()
        self._sizes: dict[int, int] = {}
        self._leaving: deque[tuple[cl.Buffer | None, int, list[cl.Event]]] = deque()

    @property
    def free(self) -> int:
        """Free memory [bytes]; memory that pending commands still use is not free."""
        self._sweep()
        return max(0, self.total - sum(list(self._sizes.values())))

    def take(self, nbytes: int) -> int:
        """Count an allocation of `nbytes`; return a ticket, by which `give_back` uncounts it."""
        ticket = next(self._tickets)
        self._sizes[ticket] = nbytes
        return ticket

    def give_back(self, memory: cl.Buffer | None, ticket: int, uses: Mapping[int, cl.Event]) -> None:
        """Keep a dropped buffer's memory until the commands that use it have ended; then uncount it."""
        self._leaving.append((memory, ticket, list(uses.values())))
        self._sweep()

    def _sweep(self) -> None:
        for _ in range(len(self._leaving)):
            try:
                leaving = self._leaving.popleft()
            except IndexError:  # another sweep has it
                return
            if all(map(is_done, leaving[2])):
                del self._sizes[leaving[1]]
            else:
                self._leaving.append(leaving)


class OpenClHostBufferType(PinnedBufferType):
    """Host memory allocated by the OpenCL runtime; it stays mapped while any NumPy view of it exists."""

    device: OpenClDevice

    def __init__(self, device: OpenClDevice) -> None:
        super().__init__(device, f"{device.name}_Host", ALIGNMENT)

    @property
    def max_size(self) -> int:
        """Largest single allocation of the runtime [bytes]."""
        return int(self.device.cl_device.max_mem_alloc_size)

    def _pinned(self, nbytes: int) -> Bytes:
        device = self.device
        what = f"allocate {nbytes:,} bytes of host memory for {device.name}"
        with cl_errors(what, self, nbytes, device=device.name):
            memory = cl.Buffer(device.context, cl.mem_flags.READ_WRITE | cl.mem_flags.ALLOC_HOST_PTR, nbytes)
            access = cl.map_flags.READ | cl.map_flags.WRITE
            array: Bytes
            array, _ = cl.enqueue_map_buffer(
                device.transfers,
                memory,
                access,  # type: ignore[arg-type]
                0,
                (nbytes,),
                np.dtype(np.uint8),
            )
        return array
