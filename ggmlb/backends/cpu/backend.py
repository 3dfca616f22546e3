"""The CPU's stream: it computes at once, in the calling thread."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import numpy as np

from ggmlb.backends.array.plan import ArrayPlan
from ggmlb.backends.array.workspace import Workspace
from ggmlb.backends.cpu.buffer import aligned_empty
from ggmlb.backends.cpu.lowering import CpuLowering
from ggmlb.backends.cpu.threads import Threads
from ggmlb.errors import ArgumentError
from ggmlb.interface import Backend, GraphPlan

if TYPE_CHECKING:
    from ggmlb.backends.cpu.device import CpuDevice
    from ggmlb.enums import Status
    from ggmlb.graph import Graph


class CpuBackend(Backend):
    """Computes plans of NumPy calls.

    Args:
        device: The CPU.
        n_threads: Threads for BLAS and for big element-wise work.
    """

    def __init__(self, device: CpuDevice, n_threads: int) -> None:
        super().__init__(device)
        self._workspace = Workspace(aligned_empty)
        self._threads = Threads(n_threads)

    @property
    def guid(self) -> str:
        """Identifies the kind."""
        return "ggmlb-cpu-numpy"

    @property
    def n_threads(self) -> int:
        """Threads that it uses."""
        return self._threads.n

    def set_n_threads(self, n: int) -> None:
        """Use `n` threads from now on, for BLAS too (ggml_backend_cpu_set_n_threads).

        BLAS has one setting per process: the last call counts for all backends.

        Raises:
            ArgumentError: `n` is less than 1.
        """
        if n < 1:
            raise ArgumentError(f"set_n_threads: {n} threads asked for; give 1 or more")
        import threadpoolctl  # type: ignore[import-untyped]

        self._threads.free()
        self._threads = Threads(n)
        self._plans.clear()  # plans bind the threads
        threadpoolctl.threadpool_limits(limits=n, user_api="blas")

    def _plan(self, graph: Graph) -> GraphPlan:
        return ArrayPlan(self, graph, CpuLowering(self._workspace, self._threads))

    def _compute(self, plan: GraphPlan) -> Status:
        # Infinities and NaN are values like others to a graph: masks are made of them.
        with np.errstate(all="ignore"):
            return cast("ArrayPlan", plan).run()

    def _free(self) -> None:
        self._threads.free()
