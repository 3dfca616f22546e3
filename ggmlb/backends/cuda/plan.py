"""CudaPlan: a graph lowered once, and queued with one call for each of its CUDA graphs."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

from ggmlb.backends.cuda.graphs import Segment
from ggmlb.backends.cuda.lowering import lower
from ggmlb.backends.cuda.work import Binder
from ggmlb.core.enums import Status
from ggmlb.core.errors import BackendError
from ggmlb.core.graph import Graph
from ggmlb.interface import GraphPlan
from ggmlb.system import env

if TYPE_CHECKING:
    from ggmlb.backends.cuda.backend import CudaBackend
    from ggmlb.backends.cuda.buffer import CudaBuffer
    from ggmlb.backends.cuda.work import Part, Step


def uses_graphs() -> bool:
    """Whether plans are captured into CUDA graphs."""
    return env.flag("GGMLB_CUDA_GRAPHS", default=True)


class CudaPlan(GraphPlan):
    """A plan of steps bound to addresses.

    The plan owns every buffer that its steps use, because a captured graph keeps none alive. Steps read
    positions, row indices and other changing values from tensors, so that they do not change between
    runs.

    Attributes:
        parts: The nodes with their steps.
        segments: The same steps, divided where some cannot be captured.
        buffers: The buffers that they use.
        slots: Slots for bad indices of its steps.
    """

    if TYPE_CHECKING:

        @property
        def backend(self) -> CudaBackend:
            """As `GraphPlan.backend`."""

    def __init__(self, backend: CudaBackend, graph: Graph) -> None:
        super().__init__(backend, graph)
        binder = Binder(backend)
        self.parts: list[Part] = lower(graph, backend, binder)
        binder.bind(self.parts)
        self.slots = binder.slots
        self.buffers: tuple[CudaBuffer, ...] = tuple(binder.buffers.values())
        self.segments: list[Segment] = self._segments()
        self._wait = env.flag("GGMLB_CUDA_SYNC", default=False)
        self._by_node = self._wait or not uses_graphs()
        for buffer in self.buffers:
            buffer.streams.add(backend.stream)

    def _segments(self) -> list[Segment]:
        segments: list[Segment] = []
        run: list[Step] = []
        driver, idle = self.backend.device.driver, self.backend.idle_graphs
        for part in self.parts:
            for step in part.steps:
                if step.key is None:
                    if run:
                        segments.append(Segment(driver, idle, run))
                    segments.append(Segment(driver, idle, [step]))
                    run = []
                else:
                    run.append(step)
        if run:
            segments.append(Segment(driver, idle, run))
        return segments

    def run(self) -> Status:
        """Queue the steps.

        Steps are launched one by one with an abort callback, during timing, or without CUDA graphs; with
        GGMLB_CUDA_SYNC=1, with a wait after each node.
        """
        backend = self.backend
        if self._by_node or backend.abort_callback is not None or backend.clock is not None:
            return self._run_by_node()
        try:
            for segment in self.segments:
                segment.run(backend.stream)
        except backend.device.driver.errors as error:
            raise BackendError(f"{backend.name} failed to queue {self.describe()}: {error}") from None
        return Status.SUCCESS

    def _run_by_node(self) -> Status:
        backend = self.backend
        abort, stream, clock = backend.abort_callback, backend.stream, backend.clock
        for part in self.parts:
            if abort is not None and abort():
                return Status.ABORTED
            try:
                with nullcontext() if clock is None else clock.time(_told(part)):
                    for step in part.steps:
                        step.call(stream.handle)
                if self._wait:
                    stream.synchronize()
            except backend.device.driver.errors as error:
                raise BackendError(f"{backend.name} failed to compute {_told(part)}: {error}") from None
        return Status.SUCCESS

    def describe(self) -> str:
        """Return a description of the plan, for messages."""
        if not self.parts:
            return "a graph of views"
        return f"a graph of {len(self.parts)} nodes, up to {self.parts[-1].nodes[-1].describe()}"

    def release(self) -> None:
        """Release its graphs, steps and buffers."""
        for segment in self.segments:
            segment.release()
        self.segments = []
        self.parts = []
        self.buffers = ()


def _told(part: Part) -> str:
    return " with ".join(node.describe() for node in part.nodes)
