"""Memory, streams and devices of the played CuPy."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from .._host import HOST
from . import compiler, driver, memory, nccl, runtime

__all__ = ["compiler", "driver", "memory", "nccl", "runtime"]

_local = threading.local()


def is_available() -> bool:
    return True


class UnownedMemory:
    def __init__(self, ptr: int, size: int, owner: object, device_id: int = -1) -> None:
        assert device_id >= 0
        self.ptr, self.size, self.device_id = ptr, size, device_id
        self._owner = owner


class _Memory:
    """CuPy's own: freed with its last array."""

    def __init__(self, size: int) -> None:
        self.size, self.device_id = size, max(runtime.getDevice(), 0)
        with HOST.on(self.device_id):
            self.ptr = HOST.malloc(max(size, 1))

    def __del__(self) -> None:
        HOST.free(self.ptr)


class MemoryPointer:
    def __init__(self, mem: Any, offset: int) -> None:
        self.mem, self.ptr = mem, mem.ptr + offset
        self.device_id = mem.device_id

    def __add__(self, offset: int) -> MemoryPointer:
        return MemoryPointer(self.mem, self.ptr - self.mem.ptr + offset)


def alloc(size: int) -> MemoryPointer:
    return MemoryPointer(_Memory(size), 0)


def alloc_pinned_memory(size: int) -> Any:
    return np.zeros(size, np.uint8)


class Device:
    def __init__(self, device: int | None = None) -> None:
        self.id = device or 0

    def __enter__(self) -> Device:
        self._before = runtime.getDevice()
        runtime.setDevice(self.id)
        return self

    def __exit__(self, *args: object) -> None:
        runtime.setDevice(self._before)


class Stream:
    """A stream that is current within a block: what was queued on it runs before, as NumPy has no streams."""

    null: Stream

    def __init__(
        self, null: bool = False, non_blocking: bool = False, ptds: bool = False, priority: int | None = None
    ) -> None:
        with HOST.on(max(runtime.getDevice(), 0)):
            self.ptr = 0 if null else HOST.stream_new()

    @classmethod
    def from_external(cls, obj: Any) -> Stream:
        version, handle = obj.__cuda_stream__()
        assert version == 0
        assert isinstance(handle, int)
        stream = cls(null=True)
        stream.ptr = handle
        return stream

    def __enter__(self) -> Stream:
        self.synchronize()
        self._before, _local.stream = get_current_stream(), self
        return self

    def __exit__(self, *args: object) -> None:
        _local.stream = self._before

    def synchronize(self) -> None:
        runtime.streamSynchronize(self.ptr)


Stream.null = Stream(null=True)


def get_current_stream(device_id: int = -1) -> Stream:
    return getattr(_local, "stream", Stream.null)
