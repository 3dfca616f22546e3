"""CpuBackend: a synchronous stream, which computes in the calling thread."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import numpy as np

from ggmlb.backends.common.workspace import Workspace
from ggmlb.backends.cpu.blas import one_blas_thread
from ggmlb.backends.cpu.plan import CpuLowering, CpuPlan
from ggmlb.backends.cpu.threads import Threads
from ggmlb.core.enums import Status
from ggmlb.core.graph import Graph
from ggmlb.interface import Backend, GraphPlan
from ggmlb.interface.host import aligned_empty
from ggmlb.system.process import checked_n_threads

if TYPE_CHECKING:
    from ggmlb.backends.cpu.device import CpuDevice


class CpuBackend(Backend):
    """A CPU stream: computes graphs by NumPy calls.

    Args:
        device: The CPU.
        n_threads: Number of threads, the caller's included.
    """

    guid = "ggmlb-cpu-numpy"
    device: CpuDevice

    def __init__(self, device: CpuDevice, n_threads: int) -> None:
        super().__init__(device)
        self._workspace = Workspace(aligned_empty)
        self._threads = Threads(n_threads, self._stream_lock)

    @property
    def n_threads(self) -> int:
        """Number of threads, the caller's included."""
        return self._threads.n

    def set_n_threads(self, n: int) -> None:
        """Use `n` threads from now on (ggml_backend_cpu_set_n_threads).

        Existing plans keep their number of threads.

        Raises:
            ArgumentError: `n` is less than 1.
            GraphError: Called from a function that this backend calls.
        """
        self._stream_lock.run(self, self._use_threads, checked_n_threads(n))

    def _use_threads(self, n: int) -> None:
        self._threads.free()
        self._threads = Threads(n, self._stream_lock)
        self._plans.clear()

    def _plan(self, graph: Graph) -> GraphPlan:
        return CpuPlan(self, graph, CpuLowering(self.device.kinds, self._workspace, self._threads))

    def _compute(self, plan: GraphPlan) -> Status:
        # Infinities and NaN are valid values of a graph, used in masks.
        with np.errstate(all="ignore"), one_blas_thread:
            return cast("CpuPlan", plan).run()

    def _start_timing(self) -> bool:
        return True  # CpuPlan.run records the times

    def _free(self) -> None:
        self._threads.free()
