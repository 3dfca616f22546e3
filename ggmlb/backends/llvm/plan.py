"""LlvmPlan: a table of steps run by machine code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ggmlb.backends.common.fusion import Group, fuse
from ggmlb.backends.llvm.lowering import lower
from ggmlb.backends.llvm.lowering.steps import Steps
from ggmlb.core.enums import Status
from ggmlb.core.errors import BackendError
from ggmlb.core.graph import Graph
from ggmlb.interface import GraphPlan
from ggmlb.system import progress

if TYPE_CHECKING:
    from ggmlb.backends.llvm.backend import LlvmBackend
    from ggmlb.backends.llvm.lowering.steps import Step


class LlvmPlan(GraphPlan):
    """Steps with the addresses of all operands bound; computing again allocates nothing."""

    def __init__(self, backend: LlvmBackend, graph: Graph) -> None:
        super().__init__(backend, graph)
        self._pool = backend.pool
        self._items = fuse(graph, backend.can_fuse)
        self._ends: list[int] = []
        with progress.task(f"{backend.name}: compiling kernels") as task:
            self._steps = Steps(backend, task)
            for item in self._items:
                lower(item, self._steps)
                self._ends.append(len(self._steps.steps))
        self._table = self._steps.pack()
        self._faults = self._table.errors.data  # after a step, NumPy's code is in no cache any more

    @property
    def steps(self) -> Sequence[Step]:
        """The steps, in order."""
        return self._steps.steps

    def run(self) -> Status:
        """Compute the steps; before each node, call the backend's abort callback if there is one.

        Raises:
            BackendError: A step found bad data; names the node.
        """
        table, steps = self._table, self._steps
        table.errors[:] = 0
        if self.backend.abort_callback is None:
            self._pool.run(table.address, 0, len(steps.steps), steps.shares)
        else:
            first = 0
            for end in self._ends:
                if self.backend.abort_callback():
                    return Status.ABORTED
                if end > first:
                    self._pool.run(table.address, first, end, steps.shares)
                first = end
        if any(self._faults):
            self._raise()
        return Status.SUCCESS

    def _raise(self) -> None:
        row, limit, i = self._table.errors[:3].tolist()
        item = next(n for n, end in zip(self._items, self._ends, strict=True) if end >= i)
        node = item.result if isinstance(item, Group) else item
        raise BackendError(
            f"{self.backend.name} failed to compute {node.describe()}: "
            f"row number {row} for a tensor of {limit} rows"
        )
