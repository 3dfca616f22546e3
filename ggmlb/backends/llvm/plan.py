"""LlvmPlan: a table of steps run by machine code."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ggmlb.backends.common.fusion import Group, fuse
from ggmlb.backends.llvm.table import Table
from ggmlb.core.enums import Status
from ggmlb.core.errors import BackendError
from ggmlb.core.graph import Graph
from ggmlb.interface import GraphPlan
from ggmlb.system import progress

if TYPE_CHECKING:
    from ggmlb.backends.llvm.backend import LlvmBackend


class LlvmPlan(GraphPlan):
    """A table of steps; computing again allocates nothing."""

    def __init__(self, backend: LlvmBackend, graph: Graph) -> None:
        super().__init__(backend, graph)
        self._pool = backend.pool
        with progress.task(f"{backend.name}: compiling kernels") as task:
            self._items = fuse(graph, backend.can_fuse, by_place=False)
            self._table = Table(backend, self._items, task)
        self._span = self._pool.span(self._table.address, 0, self._table.n_steps)
        self._faults = self._table.errors.data  # after a step, NumPy's code is in no cache any more

    @property
    def n_steps(self) -> int:
        """Number of steps."""
        return self._table.n_steps

    def run(self) -> Status:
        """Compute the steps; before each node, call the backend's abort callback if there is one.

        Raises:
            BackendError: A step found bad data; names the node.
        """
        table = self._table
        if self.backend.abort_callback is None:
            self._pool.run(self._span, table.shares)
        else:
            first = 0
            for end in table.ends:
                if self.backend.is_aborted():
                    return Status.ABORTED
                if end > first:
                    self._pool.run(self._pool.span(table.address, first, end), table.shares)
                first = end
        if self._faults[2]:  # the step, counted from 1
            self._raise()
        return Status.SUCCESS

    def _raise(self) -> None:
        table = self._table
        row, limit, i = table.errors[:3].tolist()
        table.errors[:] = 0
        at = next(k for k, end in enumerate(table.ends) if end >= i)
        item = self._items[at]
        node = item.result if isinstance(item, Group) else item
        raise BackendError(
            f"{self.backend.name} failed to compute {node.describe()}: "
            f"row number {row} for a tensor of {limit} rows"
        )
