"""GraphPlan: a graph lowered for one stream, and how a plan knows that it is still right."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from ggmlb.errors import FreedError
from ggmlb.placement import placement_clock

if TYPE_CHECKING:
    from ggmlb.graph import Graph
    from ggmlb.interface.backend import Backend
    from ggmlb.tensor import Tensor


class GraphPlan:
    """A graph lowered for one backend: steps with their arrays and arguments bound.

    A plan stays valid while its tensors stay where they are and keep their parameters; while the placement
    clock stands still, that needs no look at them. It holds the tensors, not the graph, so that a backend's
    cache of plans does not keep graphs alive.

    Attributes:
        backend: The backend that made it, and alone can run it.
        nodes: The nodes it computes.
    """

    def __init__(self, backend: Backend, graph: Graph) -> None:
        self.backend = backend
        self.nodes = tuple(graph.nodes)
        self._graph = weakref.ref(graph)
        self._checked_at = placement_clock.now
        self._binding = binding(self.nodes)
        self.is_freed = False

    def is_valid_for(self, graph: Graph) -> bool:
        """Whether computing the plan computes the graph as it is now.

        Raises:
            FreedError: An operand lies in a freed buffer.
        """
        if len(graph.nodes) != len(self.nodes):
            return False
        now = placement_clock.now
        if self._checked_at == now and self._graph() is graph:
            return True
        if any(a is not b for a, b in zip(self.nodes, graph.nodes, strict=True)):
            return False
        if binding(self.nodes) != self._binding:
            return False
        self._checked_at, self._graph = now, weakref.ref(graph)
        return True


def binding(nodes: tuple[Tensor, ...]) -> list[Any]:
    """Return all that a plan binds and that may change: places, operands and parameters.

    The buffers themselves, not their ids: a plan must notice a new buffer that has the id of a dropped one.

    Raises:
        FreedError: An operand lies in a freed buffer.
    """
    facts: list[Any] = []
    for node in nodes:
        facts += (node.buffer, node.offset, node.src, dict(node.params))
        for s in node.src:
            if s is not None:
                if s.buffer is not None and s.buffer.is_freed:
                    raise FreedError(
                        f"{s.describe()}, a source of {node.describe()}, lies in a freed buffer; "
                        "place it again"
                    )
                facts += (s.buffer, s.offset)
    return facts
