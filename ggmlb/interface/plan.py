"""GraphPlan: a graph lowered for one stream, and how a plan knows that it is still right."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from ggmlb.errors import FreedError
from ggmlb.graph import Graph
from ggmlb.placement import placement_clock
from ggmlb.tensor import Tensor

if TYPE_CHECKING:
    from ggmlb.interface.backend import Backend


class GraphPlan:
    """A graph lowered for one backend: steps with their arrays and arguments bound.

    A plan stays valid while its tensors stay where they are and keep their parameters; while the placement
    clock stands still, that needs no look at them. It holds the tensors, but neither the graph nor the
    backend: a backend's cache of plans keeps no graphs alive, and no backend that was dropped.

    Attributes:
        nodes: The nodes it computes.
    """

    def __init__(self, backend: Backend, graph: Graph) -> None:
        self._backend = weakref.ref(backend)
        self.nodes = tuple(graph.nodes)
        self._graph = weakref.ref(graph)
        self._checked_at = placement_clock.now
        self._binding = binding(self.nodes)
        self._memory = {t.buffer for node in self.nodes for t in (node, *node.src) if t is not None}
        self._alive_at = -1
        self.is_freed = False

    @property
    def backend(self) -> Backend:
        """The backend that made it, and alone can run it.

        Raises:
            FreedError: It is gone.
        """
        backend = self._backend()
        if backend is None:
            raise FreedError("the backend of this plan is gone; keep the backend as long as its plans")
        return backend

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

    def check_memory(self) -> None:
        """Refuse to compute in memory that was freed; while the placement clock stands still, none was.

        Raises:
            FreedError: A buffer that the plan uses was freed.
        """
        now = placement_clock.now
        if self._alive_at != now:
            for buffer in self._memory:
                if buffer is not None and buffer.is_freed:
                    raise FreedError(
                        f"graph_plan_compute: a {buffer.name} buffer of the plan was freed; place its "
                        "tensors again, and make another plan"
                    )
            self._alive_at = now


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
