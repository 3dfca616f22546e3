"""GraphPlan: a graph lowered for one stream, and the check that it is still valid."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from ggmlb.core.arguments import named
from ggmlb.core.enums import TensorFlag
from ggmlb.core.errors import FreedError
from ggmlb.core.graph import Graph
from ggmlb.core.lifetime import Unique
from ggmlb.core.placement import Zeros, are_equal, placement_clock, zeros_of
from ggmlb.core.tensor import Tensor

if TYPE_CHECKING:
    from ggmlb.interface.backend import Backend


@named("a plan, as graph_plan_create(graph) makes one")
class GraphPlan(Unique):
    """A graph lowered for one backend: steps with their arrays and arguments bound.

    A plan is valid until its tensors move or their parameters change; while the placement clock is
    unchanged, this needs no check. After a change, the backend lowers the nodes again before it computes:
    as in ggml, a plan computes the current tensors. It holds references to the tensors, but not to the
    graph or the backend, so that a cache of plans keeps neither alive.

    Attributes:
        owner_checks: As `Graph.owner_checks`; if true, the plan only checks for freed memory.
    """

    def __init__(self, backend: Backend, graph: Graph) -> None:
        self._backend = weakref.ref(backend)
        self.nodes = tuple(graph.nodes)
        self.owner_checks = graph.owner_checks
        self._graph, self._whole = weakref.ref(graph), graph.whole
        self._replacement: GraphPlan | None = None
        self._checked_at = placement_clock.now
        self._binding = None if self.owner_checks else binding(self.nodes)
        self._memory = graph.memory()
        self.is_freed = False

    @property
    def backend(self) -> Backend:
        """The backend that created it; no other can run it.

        Raises:
            FreedError: The backend was garbage-collected.
        """
        backend = self._backend()
        if backend is None:
            raise FreedError(
                "the backend of this plan was garbage-collected; keep a reference to it as long as its plans"
            )
        return backend

    @property
    def current(self) -> GraphPlan:
        """The plan itself, or the plan that replaced it after its tensors changed."""
        return self if self._replacement is None else self._replacement

    def graph(self) -> Graph:
        """Return its nodes as a graph: a view of the graph that was planned."""
        graph = Graph(self.nodes)
        graph.whole, graph.owner_checks = self._whole, self.owner_checks
        return graph

    def replace(self, plan: GraphPlan) -> None:
        """Replace this plan by another of the same nodes."""
        self._replacement = plan

    def is_valid_for(self, graph: Graph) -> bool:
        """Whether the lowered steps compute the graph's current nodes and tensors.

        Raises:
            FreedError: A buffer that the plan uses was freed.
        """
        if len(graph.nodes) != len(self.nodes):
            return False
        current = self.current
        if current._checked_at == placement_clock.now and self._graph() is graph:
            return True
        if any(a is not b for a, b in zip(self.nodes, graph.nodes, strict=True)):
            return False
        if not current.is_up_to_date():
            return False
        self._graph = weakref.ref(graph)
        return True

    def is_up_to_date(self) -> bool:
        """Whether its tensors and their parameters are unchanged since it was made.

        Raises:
            FreedError: A buffer that the plan uses was freed.
        """
        now = placement_clock.now
        if self._checked_at == now:
            return True
        if self._binding is not None and not are_equal(binding(self.nodes), self._binding):
            return False
        for buffer in self._memory:
            if buffer is not None and buffer.is_freed:
                raise FreedError(
                    f"graph_plan_compute: a {buffer.name} buffer of the plan was freed; allocate its "
                    "tensors again"
                )
        self._checked_at = now
        return True


Binding = tuple[list[Any], Zeros]


def binding(nodes: tuple[Tensor, ...]) -> Binding:
    """Return placements, operands and parameters of nodes, to compare them later.

    The buffers themselves, not their ids: a plan must notice a new buffer that has the id of a dropped one.
    """
    state: list[Any] = []
    params = [dict(node.params) for node in nodes]
    for node in nodes:
        buffer = node.buffer
        usage = None if buffer is None else buffer._usage  # readable also if freed
        state += (buffer, usage, node.offset, node.src, node.flags & ~TensorFlag.COMPUTE)
        for s in node.src:
            if s is not None:
                state += (s.buffer, s.offset)
    state += params
    return state, zeros_of(params)
