"""The plan of a graph over an array library: a list of bound calls."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ggmlb.enums import Status
from ggmlb.errors import BackendError, Error
from ggmlb.interface import GraphPlan

if TYPE_CHECKING:
    from ggmlb.backends.array.lowering import Lowering
    from ggmlb.graph import Graph
    from ggmlb.interface import Backend


class ArrayPlan(GraphPlan):
    """Steps, and for each node where its steps end."""

    def __init__(self, backend: Backend, graph: Graph, lowering: Lowering) -> None:
        super().__init__(backend, graph)
        self.steps, self.ends = lowering.lower(self.nodes)

    def run(self) -> Status:
        """Call the steps in order; between nodes, ask the backend's abort callback if there is one.

        Raises:
            BackendError: The array library failed; names the node.
        """
        i = 0
        abort = self.backend.abort_callback
        try:
            if abort is None:
                for i, step in enumerate(self.steps):
                    step()
            else:
                for end in self.ends:
                    if abort():
                        return Status.ABORTED
                    for i in range(i, end):
                        self.steps[i]()
                    i = end
        except Error:
            raise
        except Exception as error:
            node = next(n for n, end in zip(self.nodes, self.ends, strict=True) if i < end)
            raise BackendError(
                f"{self.backend.name} failed to compute {node.describe()}: {type(error).__name__}: {error}"
            ) from error
        return Status.SUCCESS
