"""Memory, streams and devices of the played CuPy."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
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
        self.ptr, self.device_id, self._owner = ptr, device_id, owner


class _Memory:
    """CuPy's own: freed with its last array."""

    def __init__(self, size: int) -> None:
        self.device_id = HOST.current_device or 0
        with HOST.on(self.device_id):
            self.ptr = HOST.malloc(max(size, 1))

    def __del__(self) -> None:
        HOST.free(self.ptr)


class MemoryPointer:
    def __init__(self, mem: UnownedMemory | _Memory, offset: int) -> None:
        self.mem, self.ptr = mem, mem.ptr + offset

    def __add__(self, offset: int) -> MemoryPointer:
        return MemoryPointer(self.mem, self.ptr - self.mem.ptr + offset)


def alloc(size: int) -> MemoryPointer:
    return MemoryPointer(_Memory(size), 0)


def alloc_pinned_memory(size: int) -> Any:
    return np.zeros(size, np.uint8)


@contextmanager
def Device(device: int = 0) -> Iterator[None]:
    with HOST.on(device):
        yield


class Stream:
    """A stream that is current within a block: what was queued on it runs before, as NumPy has no streams."""

    def __init__(self, null: bool = False, non_blocking: bool = False) -> None:
        with HOST.on(HOST.current_device or 0):
            self.ptr = 0 if null else HOST.stream_new()

    @classmethod
    def from_external(cls, obj: Any) -> Stream:
        stream = cls(null=True)
        version, stream.ptr = obj.__cuda_stream__()
        assert (version, type(stream.ptr)) == (0, int)
        return stream

    def __enter__(self) -> Stream:
        self.synchronize()
        self._before, _local.stream = get_current_stream(), self
        return self

    def __exit__(self, *args: object) -> None:
        _local.stream = self._before

    def synchronize(self) -> None:
        runtime.streamSynchronize(self.ptr)


def get_current_stream() -> Stream:
    return getattr(_local, "stream", None) or Stream(null=True)
