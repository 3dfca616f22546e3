"""NCCL and cuBLAS of the simulated driver: over NumPy, and queued as kernels are."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ggmlb.core.dtypes import DType
from tests.support.host_streams import Op
from tests.support.ptx.blas import NOT_INITIALISED, HostBlas

if TYPE_CHECKING:
    from tests.support.host_driver import HostCards


class HostNccl:
    """NCCL, as CuPy binds it, over NumPy: the first stream that gets there waits for the others, and sums."""

    NCCL_FLOAT16, NCCL_FLOAT32, NCCL_BFLOAT16, NCCL_SUM = 6, 7, 9, 0
    NcclError = type("NcclError", (RuntimeError,), {})

    def __init__(self, cards: HostCards) -> None:
        self._cards = cards
        self._group: list[tuple[int, int, int, int]] | None = None
        self.NcclCommunicator = self  # and its own communicators

    def initAll(self, devices: Sequence[int]) -> list[HostNccl]:
        return [self for _ in devices]

    def destroy(self) -> None:
        pass

    def groupStart(self) -> None:
        assert self._group is None
        self._group = []

    def allReduce(self, send: int, receive: int, count: int, datatype: int, op: int, stream: int) -> None:
        assert (send, op) == (receive, self.NCCL_SUM)
        assert self._group is not None, "one thread calls for all devices: in a group"
        if self._group and "sum" in self._cards.fail:
            raise self.NcclError("unhandled system error")
        self._group.append((send, count, datatype, stream))

    def groupEnd(self) -> None:
        """Queue the sums of all devices; the first one's tells how many of what."""
        assert self._group is not None
        calls, self._group = self._group, None
        if "sum" in self._cards.fail:
            raise self.NcclError("a call of the group failed")
        n, dtype = calls[0][1], {6: DType.F16, 7: DType.F32, 9: DType.BF16}[calls[0][2]]
        streams = [self._cards.streams[stream] for *_, stream in calls]
        before = [stream.n_queued for stream in streams]
        done: list[bool] = []

        def run() -> None:
            if done:
                return
            done.append(True)
            for stream, n_queued in zip(streams, before, strict=True):
                stream.run_to(n_queued)
            parts: list[Any] = [
                (ctypes.c_char * (n * dtype.type_size)).from_address(call[0]) for call in calls
            ]
            arrays = [np.frombuffer(memory, dtype.numpy) for memory in parts]
            total = np.sum([array.astype(np.float32) for array in arrays], axis=0)
            for array in arrays:
                array[...] = total

        for address, _, _, handle in calls:
            self._cards.put(handle, Op("all_reduce", run, (address,)))


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

    def __init__(self, cards: HostCards) -> None:
        self._cards = cards
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
            self._cards.put(self._streams[handle], Op("gemm", run, addresses))
            return 0

        return call
