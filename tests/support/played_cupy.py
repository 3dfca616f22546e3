"""Simulated cards for a process that has `played/` first on its path, and what scripts need of CuPy.

So what else runs on a card only is run without: `scripts/test_gpu.py`, `benchmarks/gpu.py`. CuPy is the
installed one, but for the few names below: its arrays compute nothing.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from functools import cached_property
from typing import Any, ClassVar

import cupy
import numpy as np
from cupy.cuda import runtime as rt

import ggmlb.backends.cuda
from ggmlb.backends.cuda.cupy_driver import CupyDriver
from ggmlb.backends.cuda.driver import CopyKind
from tests.support.host_driver import HostDriver
from tests.support.host_streams import Op
from tests.support.played_libcuda import answer


class PlayedDriver(HostDriver):
    """The driver of the cards below the libcuda.so.1 of this process, which CuPy's bindings call too."""

    on = CupyDriver.on  # type: ignore[assignment]
    _launch = staticmethod(CupyDriver._launch)

    @cached_property
    def _library(self) -> Any:
        return answer(ctypes.CDLL("libcuda.so.1"), self.cards)


HOST = PlayedDriver(capacity=8 << 30)


def _on_a_card(call: Callable[..., Any]) -> Callable[..., Any]:
    """Let a function run with a context: the first device's where none is current, as in the runtime."""

    def called(*args: Any, **options: Any) -> Any:
        with HOST.on(HOST.cards.current_device or 0):
            return call(*args, **options)

    return called


class Stream:
    """A stream that is current within a block."""

    current: ClassVar[list[Stream]] = []

    @_on_a_card
    def __init__(self, ptr: int | None = None, non_blocking: bool = False) -> None:
        self.ptr = HOST.stream_new() if ptr is None else ptr
        self.synchronize = _on_a_card(lambda: HOST.stream_synchronize(self.ptr))

    @classmethod
    def from_external(cls, obj: Any) -> Stream:
        version, ptr = obj.__cuda_stream__()
        assert (version, type(ptr)) == (0, int)
        return cls(ptr)

    def __enter__(self) -> Stream:
        self.current.append(self)
        return self

    def __exit__(self, *args: object) -> None:
        self.current.pop()


class Memory:
    """Memory of the current device, which is freed with this."""

    @_on_a_card
    def __init__(self, size: int) -> None:
        self.ptr = HOST.malloc(size)

    @_on_a_card
    def __del__(self) -> None:
        HOST.free(self.ptr)


class RawKernel:
    """The tests' only one: it spins for as many cycles as its argument says."""

    def __init__(self, code: str, name: str) -> None:
        assert name == "spin"

    def __call__(self, grid: Any, block: Any, args: Any) -> None:
        (cycles,) = args
        HOST.cards.put(Stream.current[-1].ptr, Op("spin", lambda: time.sleep(cycles / 2e9)))


@_on_a_card
def _copy(dst: int, src: int, size: int, kind: int, stream: int) -> None:
    HOST.copy(dst, src, size, CopyKind(kind), stream)


@_on_a_card
def _synchronize() -> None:
    for stream in list(HOST.cards.streams):
        HOST.stream_synchronize(stream)


def install() -> None:
    """Put all of it in its places, which must be there."""
    places: dict[Any, dict[str, Any]] = {
        ggmlb.backends.cuda: {"load_driver": lambda: HOST},
        rt: {"memcpyAsync": _copy, "deviceSynchronize": _synchronize},
        cupy.cuda: {
            "is_available": lambda: True, "Device": lambda device=0: HOST.on(device), "alloc": Memory,
            "alloc_pinned_memory": lambda size: np.zeros(size, np.uint8), "Stream": Stream,
        },
        cupy: {"RawKernel": RawKernel},
    }  # fmt: skip
    for place, names in places.items():
        for name, value in names.items():
            assert hasattr(place, name), f"{place} has no {name}"
            setattr(place, name, value)
