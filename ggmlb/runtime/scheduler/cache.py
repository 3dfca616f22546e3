"""Cache of a scheduler's executables: first by graph object, then by equality of graphs."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Mapping

from ggmlb.core.errors import FreedError, GraphError
from ggmlb.core.graph import Graph
from ggmlb.core.placement import placement_clock
from ggmlb.core.tensor import Tensor
from ggmlb.runtime.compile.assign import AssignRules
from ggmlb.runtime.compile.executable import Executable, compile_graph, requests_of
from ggmlb.runtime.compile.read import IndexedGraph, is_compute

MAX_EXECUTABLES = 8
"""Most cached executables: applications rarely alternate between more topologies."""


class ExecutableCache:
    """The executables of the last topologies, the latest first.

    Args:
        rules: The backends, and the scheduler's options.
        n_copies: Number of copies of tensors that one device sends to another.
        keep_graphs: Whether graphs keep their executables and placement as long as they exist.
    """

    def __init__(self, rules: AssignRules, n_copies: int, keep_graphs: bool) -> None:
        self._rules, self._n_copies = rules, n_copies
        self.keep_graphs = keep_graphs
        self._latest: deque[Executable] = deque(maxlen=MAX_EXECUTABLES)
        self._kept: weakref.WeakKeyDictionary[Graph, Executable] = weakref.WeakKeyDictionary()

    def kept(self, graph: Graph) -> Executable | None:
        """Return the executable kept for this graph object (option `keep_graphs`), if no tensor was moved."""
        executable = self._kept.get(graph)
        if executable is None or executable.n_nodes != len(graph.nodes):
            return None
        try:
            executable.check()
        except (GraphError, FreedError):
            return None  # compiling it again succeeds, or raises with the reason
        return executable

    def find(self, graph: Graph, user: Mapping[Tensor, int]) -> Executable | None:
        """Return the cached executable of an equal graph with equal `user` requests, bound to `graph`.

        Args:
            graph: The graph; tensors in compute memory do not match (see `compile`).
            user: The requested backends.
        """
        for executable in self._latest:
            tensors = executable.match(graph, user)
            if tensors is not None:
                self.drop(executable)
                executable.bind(tensors)
                if executable is not self._latest[0]:
                    self._latest.remove(executable)
                    self._latest.appendleft(executable)
                return executable
        return None

    def compile(self, graph: Graph, user: Mapping[Tensor, int]) -> tuple[Executable, bool]:
        """Remove the placement of tensors in compute memory; compile the graph unless a cached one is equal.

        Returns:
            The executable, and whether it is new.

        Raises:
            UnsupportedOpError: No backend runs a node, or (strict) the requested one does not.
            FreedError: A tensor is in a freed buffer.
        """
        indexed = IndexedGraph(graph, is_compute)
        if indexed.own:
            for tensor, buffer in zip(indexed.tensors, indexed.buffers, strict=True):
                if buffer is None:
                    tensor.buffer = None
            placement_clock.tick()
            known = self.find(graph, user)
            if known is not None:
                return known, False
        requests = requests_of(indexed.tensors, user)
        executable = compile_graph(indexed, self._rules, requests, self._n_copies)
        self._latest.appendleft(executable)
        return executable, True

    def keep(self, graph: Graph, executable: Executable) -> None:
        """Remember a placed graph's executable for this graph object, if option `keep_graphs` is set."""
        if self.keep_graphs:
            self._kept[graph] = executable

    def drop(self, of: Executable | Tensor) -> None:
        """Forget the kept graphs of the executable `of`, or those that contain the tensor `of`."""
        for graph, executable in list(self._kept.items()):
            if of in graph if isinstance(of, Tensor) else of is executable:
                del self._kept[graph]

    def clear(self) -> None:
        """Discard all executables, because their memory was freed."""
        for executable in self._kept.values():
            executable.release()
        self._kept.clear()
        self._latest.clear()

    def __len__(self) -> int:
        return len(self._latest)
