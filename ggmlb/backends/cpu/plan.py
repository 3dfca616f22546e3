"""CpuPlan: a list of bound NumPy calls."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from operator import length_hint
from time import perf_counter_ns
from typing import TYPE_CHECKING

from ggmlb.core.enums import NO_OPS, Status
from ggmlb.core.errors import AllocationError, BackendError, Error
from ggmlb.core.graph import Graph
from ggmlb.interface import Backend, Command, GraphPlan

if TYPE_CHECKING:
    from ggmlb.backends.cpu.lowering import CpuLowering, Step


class CpuPlan(GraphPlan):
    """Steps, and for each node how many of them it counts: all that end with it."""

    def __init__(self, backend: Backend, graph: Graph, lowering: CpuLowering) -> None:
        super().__init__(backend, graph)
        self.steps, self.counts = lowering.lower(self.nodes)

    def run(self) -> Status:
        """Call the steps in order; before each node, call the backend's abort callback if there is one.

        If the backend is being timed, each node is.

        Raises:
            BackendError: NumPy failed, or a step found bad data; names the node.
        """
        steps = iter(self.steps)
        abort = self.backend.abort_callback
        commands = self.backend.commands
        if abort is None and commands is None:
            self._call(steps, None)
            return Status.SUCCESS
        for node, count in zip(self.nodes, self.counts, strict=True):
            if self.backend.is_aborted():
                return Status.ABORTED
            start = perf_counter_ns()
            self._call(steps, count)
            if commands is not None and count:
                commands.append(Command(node.describe(), False, start, perf_counter_ns()))
        return Status.SUCCESS

    def _call(self, steps: Iterator[Step], count: int | None) -> None:
        """Call the next steps, or all."""
        try:
            for step in islice(steps, count):
                step()
        except Exception as error:
            what = str(error) if isinstance(error, Error) else f"{type(error).__name__}: {error}"
            failed = self._node_of(len(self.steps) - length_hint(steps) - 1)
            kind = AllocationError if isinstance(error, MemoryError) else BackendError
            raise kind(f"{self.backend.name} failed to compute {failed}: {what}") from error

    def _node_of(self, step: int) -> str:
        """Describe the node of a step: the one that counts it, with those before it that run tile by tile."""
        together: list[str] = []
        for node, count in zip(self.nodes, self.counts, strict=True):
            if count:
                step -= count
                if step < 0:
                    return " with ".join([*together, node.describe()])
                together = []
            elif node.op not in NO_OPS and not node.is_empty:
                together.append(node.describe())
        raise AssertionError("more steps than the nodes have")
