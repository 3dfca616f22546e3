"""CUDA graphs: steps captured once, replayed with one call.

A segment of a plan runs step by step the first time, which compiles, loads and warms up whatever does so
lazily. The second time it is captured, and from then on replayed. An executable graph that a plan leaves
behind serves the next plan of the same kernels in the same order: only its arguments are changed, which
costs less than to make one anew, and so a graph that is built again for each step is replayed from its
first run on.
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
"""Executable graphs of plans that are gone, kept for plans to come."""

LEAST_STEPS = 2
"""Fewer are launched as fast by themselves."""


class IdleGraphs:
    """Executable graphs that no plan uses, by what they were captured from; the oldest go first."""

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
        """Take back what a segment held: one graph, or none."""
        if not held:
            return
        if not self._is_closed:
            self._idle[held.pop()] = key
            return
        with suppress(*self._driver.errors), self._driver.on(self._device):
            self._driver.exec_free(held.pop())

    def trim(self, n_kept: int = MAX_IDLE) -> None:
        """Release all but the newest; not from a finaliser, which may run in the middle of anything."""
        while len(self._idle) > n_kept:
            executable, _ = self._idle.popitem(last=False)
            with self._driver.on(self._device):
                self._driver.exec_free(executable)

    def close(self) -> None:
        """Release all, and keep none from now on: the stream is gone."""
        self._is_closed = True
        self.trim(0)


class Segment:
    """Steps that are captured together.

    Attributes:
        steps: In order.
        why_not: Why they are not captured, where something refused; else `None`.
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
        """Whether it becomes a CUDA graph."""
        return len(self.steps) >= LEAST_STEPS and self.why_not is None

    @property
    def is_captured(self) -> bool:
        """Whether it is one."""
        return bool(self._held)

    def run(self, stream: Stream) -> None:
        """Queue the steps: one by one, or as a graph."""
        if not self._held and (not self.can_capture or not self._make(stream)):
            for step in self.steps:
                step.call(stream.handle)
            return
        self._driver.exec_launch(self._held[0], stream.handle)

    def _make(self, stream: Stream) -> bool:
        """Capture the steps, if it is time; return whether there is an executable graph now."""
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
        """Return the steps as a graph; `None` where something refuses, which is noted and warned of."""
        driver, graph = self._driver, None
        try:
            with stream.lock:
                driver.capture_begin(stream.handle)
                try:
                    for step in self.steps:
                        step.call(stream.handle)
                finally:
                    # Whatever happened, the stream must not stay in capture: all later calls would fail.
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
        """Leave the executable graph to others."""
        self._release()
