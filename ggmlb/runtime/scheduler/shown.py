"""What a scheduler shows of itself: facts about the last graph, pictures, traces and text."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ggmlb.core.enums import NO_OPS
from ggmlb.core.errors import GraphError
from ggmlb.core.graph import Graph
from ggmlb.inspect import draw
from ggmlb.inspect.html import Picture, escape
from ggmlb.inspect.trace import Trace
from ggmlb.interface import Backend, GraphPlan
from ggmlb.runtime.scheduler.report import Placement, placements, render

if TYPE_CHECKING:
    from ggmlb.runtime.scheduler.program import Program
    from ggmlb.runtime.scheduler.split import Split


class Shown:
    """The part of `Scheduler` that only looks."""

    _backends: tuple[Backend, ...]
    _graph: Graph | None
    _program: Program | None

    @property
    def splits(self) -> tuple[Split, ...]:
        """The splits of the last graph, in order of execution."""
        return tuple(self._program.splits) if self._program else ()

    @property
    def n_splits(self) -> int:
        """Number of splits of the last graph (ggml_backend_sched_get_n_splits)."""
        return len(self._program.splits) if self._program else 0

    @property
    def placement(self) -> list[Placement]:
        """For each node of the last graph: its device, the cause, what others said, and its copies."""
        if self._graph is None or self._program is None:
            return []
        return placements(self._graph, self._program)

    def trace(self, path: str | Path | None = None) -> Trace:
        """Keep when each device works, within a `with` block, for ui.perfetto.dev or chrome://tracing.

        Example: `with sched.trace("run.json"): sched.graph_compute(graph)`

        Args:
            path: The JSON file that is written at the end; without it, look at the trace's `events`.
        """
        return Trace(self._backends, path, name_plan=self._name_plan)

    def to_dot(self) -> str:
        """Return the split graph in Graphviz's DOT language: a colour for each device, a box for each split.

        Raises:
            GraphError: No graph was split yet.
        """
        graph, _ = self._need_graph("to_dot")
        return draw.to_dot(graph, self._backends, self.splits)

    def to_svg(self) -> str:
        """Return an SVG picture of the split graph, to be read from top to bottom; it needs no Graphviz.

        Each device has a lane and a colour, each split a box; curves between lanes are copies. Long splits
        are shortened. A node's cause and operands show when the pointer rests on it.

        Raises:
            GraphError: No graph was split yet.
        """
        return self._picture(*self._need_graph("to_svg")).svg()

    def _picture(self, graph: Graph, program: Program) -> Picture:
        causes = {node: str(program.cause(node)) for node in graph.nodes if node.op not in NO_OPS}
        return draw.draw(self._backends, self.splits, causes)

    def _need_graph(self, call: str) -> tuple[Graph, Program]:
        if self._graph is None or self._program is None:
            raise GraphError(f"{call}: there is no graph yet; call split_graph or alloc_graph first")
        return self._graph, self._program

    def _name_plan(self, plan: GraphPlan) -> str:
        numbers = (f"split {i}:" for i, s in enumerate(self.splits) if any(p is plan for p in s.plans))
        return f"{next(numbers, 'compute')} {len(plan.nodes)} nodes on {plan.backend.name}"

    # -- Python --------------------------------------------------------------------------------

    def __repr__(self) -> str:
        names = ", ".join(b.name for b in self._backends)
        return f"<Scheduler on {names}: {self.n_splits} splits>"

    def _repr_html_(self) -> str:
        """The picture of the split graph, for a notebook."""
        if self._graph is None or self._program is None:
            return escape(repr(self))
        return self._picture(self._graph, self._program).html(repr(self))

    def __str__(self) -> str:
        """Splits, their inputs with sizes, and why each node landed where it did."""
        if self._graph is None or self._program is None:
            return f"{self!r}, no graph yet"
        return render(self._graph, self._program)
