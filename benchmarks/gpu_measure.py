"""What the GPU benchmark measures with: a device under ggmlb, its raw copies, and PyTorch beside it."""

from __future__ import annotations

import math
import shutil
import statistics
import subprocess
from collections.abc import Callable
from time import perf_counter
from typing import Any

import numpy as np

from ggmlb import Context, Graph, alloc_ctx_tensors, device_by_name
from ggmlb.core.tensor import Tensor
from ggmlb.interface import Device

SPREAD_NBYTES = 1 << 30
"""So much memory is walked through between two uses of the same: no cache has it."""

FILLING = 0x2B
"""Every byte of the data: small positive numbers in all floating-point types, and harmless blocks."""


class Bench:
    """A device, and how long calls take on it.

    Attributes:
        smoke: Sizes are tiny and one round is enough: the script is tried, nothing is measured.
    """

    def __init__(self, name: str, smoke: bool) -> None:
        self.device: Device = device_by_name(name)
        self.backend = self.device.init_backend()
        self.smoke = smoke
        self.is_cuda = self.device.reg.name == "CUDA"

    def size(self, full: int, tiny: int) -> int:
        """Return an extent, as it is or for a trial."""
        return tiny if self.smoke else full

    def seconds(self, call: Callable[[], object], wait: Callable[[], object] | None = None) -> float:
        """Return the median time of a call that only queues work [s]; `wait` ends it."""
        wait = wait or self.backend.synchronize
        for _ in range(1 if self.smoke else 3):
            call()
        wait()
        start = perf_counter()
        call()
        wait()
        once = perf_counter() - start
        n_calls = 1 if self.smoke else max(1, min(1000, math.ceil(0.03 / once)))
        rounds = []
        for _ in range(1 if self.smoke else 7):
            start = perf_counter()
            for _ in range(n_calls):
                call()
            wait()
            rounds.append((perf_counter() - start) / n_calls)
        return statistics.median(rounds)

    def node_seconds(
        self, make: Callable[[Context], Tensor], nbytes: int, fill: Callable[[Context], None] | None = None
    ) -> float:
        """Return the time of one node [s]: of many in one graph, each with memory of its own.

        Args:
            make: Makes the node and its leafs.
            nbytes: What it reads and writes [bytes].
            fill: Writes leafs that cannot have any value, as row numbers.

        Raises:
            UnsupportedOpError: The device cannot compute it.
        """
        n = 2 if self.smoke else max(4, min(256, SPREAD_NBYTES // nbytes))
        ctx = Context()
        graph = Graph().build_forward_expand(*[make(ctx) for _ in range(n)])
        with alloc_ctx_tensors(ctx, self.backend) as buffer:
            buffer.clear(FILLING)
            if fill is not None:
                fill(ctx)
            return self.seconds(lambda: self.backend.graph_compute_async(graph)) / n

    def close(self) -> None:
        """Free the stream."""
        self.backend.free()


class RawCopies:
    """Bytes per second that plain copies reach: by the CUDA runtime, or by NumPy on other devices."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._cupy: Any = None
        if bench.is_cuda:
            import cupy

            self._cupy = cupy

    def on_device(self, nbytes: int) -> float:
        """Bytes read and written on the device per second."""
        if self._cupy is None:
            src, dst = np.zeros(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
            return 2 * nbytes / self._bench.seconds(lambda: np.copyto(dst, src), lambda: None)
        cupy, stream = self._cupy, self._cupy.cuda.Stream(non_blocking=True)
        a, b = cupy.cuda.alloc(nbytes), cupy.cuda.alloc(nbytes)
        copy = cupy.cuda.runtime.memcpyAsync
        seconds = self._bench.seconds(lambda: copy(b.ptr, a.ptr, nbytes, 3, stream.ptr), stream.synchronize)
        return 2 * nbytes / seconds

    def host(self, nbytes: int, to_device: bool, pinned: bool) -> float:
        """Bytes copied per second between host and device."""
        if self._cupy is None:
            return self.on_device(nbytes) / 2
        cupy, stream = self._cupy, self._cupy.cuda.Stream(non_blocking=True)
        device = cupy.cuda.alloc(nbytes)
        if pinned:
            memory = cupy.cuda.alloc_pinned_memory(nbytes)
            host = np.frombuffer(memory, np.uint8, nbytes)
        else:
            host = np.empty(nbytes, np.uint8)
        host[:] = FILLING
        pair = (device.ptr, host.ctypes.data) if to_device else (host.ctypes.data, device.ptr)
        copy, kind = cupy.cuda.runtime.memcpyAsync, 1 if to_device else 2
        return nbytes / self._bench.seconds(lambda: copy(*pair, nbytes, kind, stream.ptr), stream.synchronize)


class Torch:
    """PyTorch on the same device, or on the CPU; `why` it is missing, if it is."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self.torch: Any = None
        self.why = ""
        try:
            import torch
        except ImportError:
            self.why = "PyTorch is not installed"
            return
        if bench.is_cuda and not torch.cuda.is_available():
            self.why = "this PyTorch has no CUDA"
            return
        self.torch = torch
        self.device = "cuda" if bench.is_cuda else "cpu"
        # cuBLAS sums halves in f32 in ggmlb; the same is asked of PyTorch.
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False

    def seconds(self, call: Callable[[], object]) -> float:
        """Return the median time of a call [s]."""
        wait = self.torch.cuda.synchronize if self.device == "cuda" else (lambda: None)
        with self.torch.inference_mode():
            return self._bench.seconds(call, wait)


def machine(bench: Bench) -> str:
    """Return the device, its memory, and the driver where it is a CUDA card."""
    _, total = bench.device.memory
    parts = [f"{bench.device.name}: {bench.device.description}, {total / 2**30:.0f} GiB"]
    if bench.is_cuda:
        import cupy

        runtime = cupy.cuda.runtime
        parts.append(
            f"CUDA runtime {runtime.runtimeGetVersion()}, of the driver {runtime.driverGetVersion()}"
        )
        query = [
            "nvidia-smi",
            "--query-gpu=driver_version,clocks.max.sm,power.limit",
            "--format=csv,noheader",
        ]
        if shutil.which(query[0]):
            lines = subprocess.run(query, capture_output=True, text=True, check=False).stdout.splitlines()
            parts += [f"driver, clock, power: {line}" for line in lines[:1]]
    return "; ".join(parts)
