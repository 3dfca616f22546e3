"""NCCL and cuBLAS of the played driver: over NumPy, and queued as kernels are."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ggmlb.core.dtypes import DType
from tests.support.host_streams import Op
from tests.support.ptx.blas import NOT_INITIALISED, HostBlas

if TYPE_CHECKING:
    from tests.support.host_driver import HostDriver


class HostCollective:
    """NCCL over NumPy: the first stream that gets there waits for the others, and sums for all."""

    def __init__(self, driver: HostDriver) -> None:
        self._driver = driver

    def all_reduce(self, places: Sequence[tuple[int, int]], n: int, dtype: DType) -> None:
        streams = [self._driver.streams[stream] for _, stream in places]
        before = [stream.n_queued for stream in streams]
        done: list[bool] = []

        def run() -> None:
            if done:
                return
            done.append(True)
            for stream, count in zip(streams, before, strict=True):
                stream.run_to(count)
            nbytes = n * dtype.type_size
            parts: list[Any] = [(ctypes.c_char * nbytes).from_address(address) for address, _ in places]
            arrays = [np.frombuffer(part, dtype.numpy) for part in parts]
            total = np.sum([array.astype(np.float32) for array in arrays], axis=0)
            for array in arrays:
                array[...] = total

        for address, stream in places:
            self._driver.put(stream, Op("all_reduce", run, (address,)))

    def free(self) -> None:
        pass


_OPERANDS = {
    "cublasGemmEx": (7, 10, 14),
    "cublasGemmStridedBatchedEx": (7, 11, 16),
    "cublasGemmBatchedEx": (7, 10, 14),
}
"""Which arguments are addresses of device memory."""


class QueuedBlas:
    """cuBLAS over NumPy, whose products run when their stream does.

    Attributes:
        real: The functions.
    """

    def __init__(self, driver: HostDriver) -> None:
        self._driver = driver
        self.real = HostBlas()
        self._streams: dict[int, int] = {}

    def __getattr__(self, name: str) -> Callable[..., int]:
        function = getattr(self.real, name)

        def call(*args: Any) -> int:
            if name == "cublasSetStream_v2":
                self._streams[args[0].value] = args[1]
            if name not in _OPERANDS:
                return int(function(*args))
            handle = args[0].value
            if handle not in self.real.with_workspace:
                return NOT_INITIALISED

            def run() -> None:
                self.real.with_workspace.add(handle)
                status = function(*args)
                assert status == 0, f"{name}: {status}"

            addresses = tuple(args[i] for i in _OPERANDS[name])
            self._driver.put(self._streams[handle], Op("gemm", run, addresses))
            return 0

        return call
