"""CUDA graphs: steps captured once and replayed with one call.

The first run of a plan's segment launches step by step, which compiles and loads kernels. The second run is
captured, later ones are replayed. The executable graph of a dropped plan is reused by the next plan with
the same kernels in the same order: updating its arguments is cheaper than instantiation, so that a graph
rebuilt for each token is replayed from its first run on.
"""

from __future__ import annotations

import warnings
import weakref
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from ggmlb.core.errors import BackendError

if TYPE_CHECKING:
    from ggmlb.backends.cuda.driver import Driver
    from ggmlb.backends.cuda.stream import Stream
    from ggmlb.backends.cuda.work import Step

MAX_IDLE = 32
"""Most executable graphs of dropped plans kept for reuse."""

LEAST_STEPS = 2
"""Least steps of a segment to capture; fewer are launched as fast one by one."""


class IdleGraphs:
    """Cache of unused executable graphs by the keys of their steps; the oldest are evicted first."""

    def __init__(self, driver: Driver, device: int) -> None:
        self._driver = driver
        self._device = device
        self._idle: OrderedDict[int, Hashable] = OrderedDict()
        self._is_closed = False

    def take(self, key: Hashable) -> int | None:
        """Return an idle graph captured from steps of the same keys."""
        for executable, its_key in reversed(list(self._idle.items())):
            if its_key == key and self._idle.pop(executable, None) is not None:
                return executable
        return None

    def give_back(self, held: list[int], key: Hashable) -> None:
        """Take back a segment's executable graph, if any."""
        if not held:
            return
        if not self._is_closed:
            self._idle[held.pop()] = key
            return
        with suppress(*self._driver.errors), self._driver.on(self._device):
            self._driver.exec_free(held.pop())

    def trim(self, n_kept: int = MAX_IDLE) -> None:
        """Release all but the newest; not to be called from a finaliser."""
        while len(self._idle) > n_kept:
            executable, _ = self._idle.popitem(last=False)
            with self._driver.on(self._device):
                self._driver.exec_free(executable)

    def close(self) -> None:
        """Release all, and keep none from now on."""
        self._is_closed = True
        self.trim(0)


class Segment:
    """Steps captured together.

    Attributes:
        steps: In order.
        why_not: Why capture failed; else `None`.
    """

    def __init__(self, driver: Driver, idle: IdleGraphs, steps: Sequence[Step]) -> None:
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
        """Whether the segment can be captured."""
        return len(self.steps) >= LEAST_STEPS and self.why_not is None

    @property
    def is_captured(self) -> bool:
        """Whether it has an executable graph."""
        return bool(self._held)

    def run(self, stream: Stream) -> None:
        """Queue the steps: one by one, or as a graph."""
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
        """Return the executable graph for reuse."""
        self._release()
