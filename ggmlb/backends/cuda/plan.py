"""CudaPlan: a graph lowered once, captured in CUDA graphs, and replayed with one call for each.

The first run of a plan's segment launches step by step, which compiles and loads kernels. The second run is
captured, later ones are replayed. The executable graph of a dropped plan is reused by the next plan with
the same kernels in the same order: updating its arguments is cheaper than instantiation, so that a graph
rebuilt for each token is replayed from its first run on.
"""

from __future__ import annotations

import itertools
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from contextlib import nullcontext, suppress
from struct import unpack_from
from typing import TYPE_CHECKING, NamedTuple, cast

from ggmlb.backends.cuda.driver import CopyKind
from ggmlb.backends.cuda.lowering import CudaLowering, Request
from ggmlb.backends.gpu import Launch, layout
from ggmlb.backends.gpu.plan import GpuPlan
from ggmlb.core.enums import Status
from ggmlb.core.errors import BackendError
from ggmlb.system import env

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from ggmlb.backends.cuda.backend import CudaBackend
    from ggmlb.backends.cuda.buffer import CudaBuffer
    from ggmlb.backends.cuda.cupy_driver import CupyDriver
    from ggmlb.backends.cuda.driver import Call
    from ggmlb.backends.cuda.stream import Stream
    from ggmlb.backends.gpu.kinds import BoundItems
    from ggmlb.core.graph import Graph
    from ggmlb.parallel.row_split import RowSplitProduct

MAX_IDLE = 32
"""Maximum number of executable graphs of dropped plans kept for reuse."""

LEAST_STEPS = 2
"""Fewest steps of a captured segment; fewer are launched as fast one by one."""


def uses_graphs() -> bool:
    """Whether plans are captured into CUDA graphs: unless GGMLB_CUDA_GRAPHS=0."""
    return env.flag("GGMLB_CUDA_GRAPHS", default=True)


class Step(NamedTuple):
    """A call to queue on a stream, and its key for reuse of CUDA graphs (`None`: not capturable)."""

    call: Call
    key: Hashable | None


class CudaPlan(GpuPlan[Step]):
    """A graph's steps, bound to device addresses and replayed as CUDA graphs; keeps its buffers alive.

    Attributes:
        segments: Its steps, divided at those that cannot be captured.
    """

    if TYPE_CHECKING:

        @property
        def backend(self) -> CudaBackend:
            """The CUDA stream that runs the plan."""

    def __init__(self, backend: CudaBackend, graph: Graph) -> None:
        device = backend.device
        super().__init__(backend, graph, CudaLowering(device.target))
        steps = [step for part in self.parts for step in part.steps]
        self.segments: list[Segment] = [
            Segment(device.driver, backend.idle_graphs, list(run))
            for captured, group in itertools.groupby(steps, lambda step: step.key is not None)
            for run in ([group] if captured else zip(group))
        ]
        self._wait = env.flag("GGMLB_CUDA_SYNC", default=False)
        self._by_node = self._wait or not uses_graphs()
        for buffer in self.buffers:
            buffer.streams.add(backend.stream)

    def _bind(self, bound: BoundItems[tuple[Request, Hashable]]) -> list[Step]:
        device = self.backend.device
        device.driver.prepare([r for r, _ in bound.new if isinstance(r, Launch)], device.index)
        values, starts = bound.blocks({buffer: buffer.address for buffer in self.buffers})
        blocks = values.data.cast("B")
        return [
            Step(self._call(request, blocks, start), key)
            for (request, key), start in zip(bound.steps, starts, strict=False)
        ]

    def _call(self, request: Request, blocks: memoryview, start: int) -> Call:
        if isinstance(request, Launch):
            device = self.backend.device
            block = blocks[start : start + layout(request.kernel, "cuda").size]
            return device.driver.bind(request, block.tobytes(), device.index)
        a, i, b, j, d, k = unpack_from("6q", blocks, start)
        return self.backend.blas.bind(request, (a + i, b + j, d + k), self._upload)

    def _split_step(self, product: RowSplitProduct) -> Step:
        return Step(lambda stream: product.run(), None)

    def _upload(self, table: npt.NDArray[np.uint64]) -> int:
        """Copy a table to device memory owned by the plan."""
        buffer = cast("CudaBuffer", self.backend.alloc_buffer(table.nbytes))
        self.buffers.append(buffer)
        buffer.copy("write a table of addresses", CopyKind.TO_DEVICE, 0, table)
        return buffer.address

    def run(self) -> Status:
        """Queue the steps on the stream.

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
                with nullcontext() if clock is None else clock.time(part.describe()):
                    for step in part.steps:
                        step.call(stream.handle)
                if self._wait:
                    stream.synchronize()
            except backend.device.driver.errors as error:
                raise BackendError(f"{backend.name} failed to compute {part.describe()}: {error}") from None
        return Status.SUCCESS

    def release(self) -> None:
        """Release the plan's CUDA graphs, steps and buffers."""
        for segment in self.segments:
            segment.release()
        self.segments = []
        super().release()


class IdleGraphs:
    """Cache of executable CUDA graphs of released plans, by the keys of their steps; evicts the oldest."""

    def __init__(self, driver: CupyDriver, device: int) -> None:
        self._driver = driver
        self._device = device
        self._idle: OrderedDict[int, Hashable] = OrderedDict()
        self._is_closed = False

    def take(self, key: Hashable) -> int | None:
        """Remove and return an executable graph whose steps have these keys; `None` if there is none."""
        for executable, its_key in reversed(list(self._idle.items())):
            if its_key == key and self._idle.pop(executable, None) is not None:
                return executable
        return None

    def give_back(self, held: list[int], key: Hashable) -> None:
        """Add an executable graph (in `held`, possibly empty) to the cache, under its steps' keys."""
        if not held:
            return
        if not self._is_closed:
            self._idle[held.pop()] = key
            return
        with suppress(*self._driver.errors), self._driver.on(self._device):
            self._driver.exec_free(held.pop())

    def trim(self, n_kept: int = MAX_IDLE) -> None:
        """Release all but the newest `n_kept` graphs; finalisers of objects must not call this."""
        while len(self._idle) > n_kept:
            executable, _ = self._idle.popitem(last=False)
            with self._driver.on(self._device):
                self._driver.exec_free(executable)

    def close(self) -> None:
        """Release all graphs in the cache, and from now on release any that is given back."""
        self._is_closed = True
        self.trim(0)


class Segment:
    """Steps of a plan that are captured together, as one CUDA graph.

    Attributes:
        steps: In order.
        why_not: Why capture failed; else `None`.
    """

    def __init__(self, driver: CupyDriver, idle: IdleGraphs, steps: Sequence[Step]) -> None:
        self._driver = driver
        self._idle = idle
        self._refusals: tuple[type[Exception], ...] = (*driver.errors, BackendError)
        self.steps = steps
        self.why_not: str | None = None
        self._key: Hashable = tuple(step.key for step in steps)
        self._is_warm = False
        self._held: list[int] = []
        self._release = weakref.finalize(self, idle.give_back, self._held, self._key)
        self._release.atexit = False

    @property
    def can_capture(self) -> bool:
        """Whether the segment is to be captured: it is long enough, and capture has not failed before."""
        return len(self.steps) >= LEAST_STEPS and self.why_not is None

    @property
    def is_captured(self) -> bool:
        """Whether the segment has an executable CUDA graph."""
        return bool(self._held)

    def run(self, stream: Stream) -> None:
        """Queue the segment's steps: one by one until they are captured, then as one CUDA graph."""
        if not self._held and (not self.can_capture or not self._make(stream)):
            for step in self.steps:
                step.call(stream.handle)
            return
        self._driver.exec_launch(self._held[0], stream.handle)

    def _make(self, stream: Stream) -> bool:
        """Capture the steps if due; return whether there is an executable graph."""
        executable = self._idle.take(self._key)
        if executable is None and not self._is_warm:
            self._is_warm = True
            return False
        graph = self._capture(stream)
        if graph is None:
            if executable is not None:
                self._driver.exec_free(executable)
            return False
        try:
            if executable is not None and not self._driver.exec_update(executable, graph):
                self._driver.exec_free(executable)
                executable = None
            self._held.append(self._driver.exec_new(graph) if executable is None else executable)
        finally:
            self._driver.graph_free(graph)
        self._idle.trim()
        return True

    def _capture(self, stream: Stream) -> int | None:
        """Return the steps as a graph; on failure, warn and return `None`."""
        driver, graph = self._driver, None
        try:
            with stream.lock:
                driver.capture_begin(stream.handle)
                try:
                    for step in self.steps:
                        step.call(stream.handle)
                finally:
                    # Always end the capture: otherwise all later calls on the stream would fail.
                    graph = driver.capture_end(stream.handle)
        except self._refusals as error:
            if graph is not None:
                driver.graph_free(graph)
            self.why_not = str(error)
            warnings.warn(f"steps are not replayed as a CUDA graph: {error}", RuntimeWarning, stacklevel=2)
            return None
        except BaseException:
            if graph is not None:
                driver.graph_free(graph)
            raise
        return graph

    def release(self) -> None:
        """Give the segment's executable graph to the cache, for reuse by other plans."""
        self._release()
