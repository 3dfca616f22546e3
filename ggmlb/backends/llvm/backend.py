"""LlvmBackend: a synchronous stream with threads of its own; computing a plan is one call of machine code."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from ggmlb.backends.common.fusion import Group, gather
from ggmlb.backends.common.workspace import Workspace
from ggmlb.backends.llvm.lowering.context import RULES
from ggmlb.backends.llvm.plan import LlvmPlan
from ggmlb.backends.llvm.pool import Pool
from ggmlb.core.enums import Status
from ggmlb.core.graph import Graph
from ggmlb.interface import Backend, GraphPlan
from ggmlb.interface.host import aligned_empty
from ggmlb.system.process import checked_n_threads

if TYPE_CHECKING:
    from ggmlb.backends.llvm.codegen.library import Library
    from ggmlb.backends.llvm.device import LlvmDevice


class LlvmBackend(Backend):
    """A stream that computes graphs by compiled kernels.

    Args:
        device: The device, which caches lowered steps by kind of node for all its streams.
        n_threads: Number of threads, including the caller's.
        library: The kernels.

    Raises:
        ArgumentError: Less than one thread.
    """

    guid = "ggmlb-llvm"

    def __init__(self, device: LlvmDevice, n_threads: int, library: Library) -> None:
        super().__init__(device)
        self.library = library
        self.scratch = Workspace(aligned_empty)
        self.activations = Workspace(aligned_empty)
        self.kinds = device.kinds
        self.pool = Pool(checked_n_threads(n_threads), library)

    @property
    def n_threads(self) -> int:
        """Number of threads, including the caller's."""
        return self.pool.n

    @property
    def lowered_for(self) -> tuple[Library, int]:
        """Part of the cache key of lowered nodes: the kernels and the number of threads."""
        return self.library, self.pool.n

    def set_n_threads(self, n: int) -> None:
        """Set the number of threads for later graphs.

        Raises:
            ArgumentError: `n` is less than 1.
            GraphError: Called from a callback of this backend.
        """
        self._stream_lock.run(self, self._use_threads, checked_n_threads(n))

    def _use_threads(self, n: int) -> None:
        self.pool.free()
        self.pool = Pool(n, self.library)
        self._plans.clear()

    def can_fuse(self, group: Group) -> bool:
        """Whether one kernel computes the whole group of nodes."""
        return RULES.find(group) is not None

    def graph_optimize(self, graph: Graph) -> None:
        """Reorder nodes so that those of a fused group follow each other."""
        gather(graph, self.can_fuse, RULES.patterns)

    def _plan(self, graph: Graph) -> GraphPlan:
        return LlvmPlan(self, graph)

    def _compute(self, plan: GraphPlan) -> Status:
        return cast("LlvmPlan", plan).run()

    def _free(self) -> None:
        self.pool.free()
