"""GraphPlan: a graph lowered for one stream, and how a plan knows that it is still right."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from ggmlb.core.enums import TensorFlag
from ggmlb.core.errors import FreedError
from ggmlb.core.graph import Graph
from ggmlb.core.lifetime import Unique
from ggmlb.core.placement import Zeros, placement_clock, zeros_of
from ggmlb.core.tensor import Tensor

if TYPE_CHECKING:
    from ggmlb.interface.backend import Backend


class GraphPlan(Unique):
    """A graph lowered for one backend: steps with their arrays and arguments bound.

    A plan stays valid while its tensors stay where they are and keep their parameters; while the placement
    clock stands still, that needs no look at them. Once they moved or changed, the backend lowers the nodes
    again before it computes: as in ggml, a plan computes what its tensors are when it runs. It holds the
    tensors, but neither the graph nor the backend: a backend's cache of plans keeps no graphs alive, and no
    backend that was dropped.

    Attributes:
        nodes: The nodes it computes.
        owner_checks: The graph's: such a plan only checks that its memory was not freed.
    """

    def __init__(self, backend: Backend, graph: Graph) -> None:
        self._backend = weakref.ref(backend)
        self.nodes = tuple(graph.nodes)
        self.owner_checks = graph.owner_checks
        self._graph, self._whole = weakref.ref(graph), graph.whole
        self._replacement: GraphPlan | None = None
        self._checked_at = placement_clock.now
        self._binding = None if self.owner_checks else binding(self.nodes)
        self._memory = {t.buffer for node in self.nodes for t in (node, *node.src) if t is not None}
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

    @property
    def current(self) -> GraphPlan:
        """What is computed: the plan itself, or the one that replaced it when its tensors had changed."""
        return self if self._replacement is None else self._replacement

    def graph(self) -> Graph:
        """Return a graph of its nodes, part of the whole that they were planned in."""
        graph = Graph(self.nodes)
        graph.whole, graph.owner_checks = self._whole, self.owner_checks
        return graph

    def replace(self, plan: GraphPlan) -> None:
        """Let another plan of the same nodes be computed from now on."""
        self._replacement = plan

    def is_valid_for(self, graph: Graph) -> bool:
        """Whether computing what is lowered computes the graph as it is now.

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
        """Whether its tensors are what it bound; while the placement clock stands still, they are.

        Raises:
            FreedError: A buffer that the plan uses was freed.
        """
        now = placement_clock.now
        if self._checked_at == now:
            return True
        if self._binding is not None and not _is_same(binding(self.nodes), self._binding):
            return False
        for buffer in self._memory:
            if buffer is not None and buffer.is_freed:
                raise FreedError(
                    f"graph_plan_compute: a {buffer.name} buffer of the plan was freed; place its "
                    "tensors again"
                )
        self._checked_at = now
        return True


Binding = tuple[list[Any], Zeros]


def binding(nodes: tuple[Tensor, ...]) -> Binding:
    """Return all that a plan binds and that may change: places, operands, parameters, what must be kept.

    The buffers themselves, not their ids: a plan must notice a new buffer that has the id of a dropped one.
    """
    facts: list[Any] = []
    params = [dict(node.params) for node in nodes]
    for node in nodes:
        buffer = node.buffer
        usage = None if buffer is None else buffer.usage
        facts += (buffer, usage, node.offset, node.src, node.flags & ~TensorFlag.COMPUTE)
        for s in node.src:
            if s is not None:
                facts += (s.buffer, s.offset)
    facts += params
    return facts, zeros_of(params)


def _is_same(a: Binding, b: Binding) -> bool:
    try:
        return a == b
    except ValueError:  # arrays in a custom function's data have no truth value
        return False
