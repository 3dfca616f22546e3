"""OpenClBackend: a stream as an in-order command queue, with its events and its clock."""

from __future__ import annotations

import itertools
from time import perf_counter_ns
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import pyopencl as cl

from ggmlb.backends.common.fusion import Group
from ggmlb.backends.gpu import RULES, Target
from ggmlb.backends.gpu.stream import GpuBackend
from ggmlb.backends.opencl.buffer import OpenClBuffer, queue_copy
from ggmlb.backends.opencl.plan import OpenClPlan
from ggmlb.backends.opencl.runtime import check_outcome, cl_errors, guard, is_done
from ggmlb.core.enums import Status
from ggmlb.core.graph import Graph
from ggmlb.core.tensor import Tensor
from ggmlb.interface import Backend, Buffer, Command, Event, GraphPlan
from ggmlb.interface.data import Bytes, Pieces
from ggmlb.parallel.row_split import is_split

if TYPE_CHECKING:
    from ggmlb.backends.opencl.device import OpenClDevice

_queue_ids = itertools.count()

MAX_HELD = 256
"""Number of held transfer events at which finished ones are dropped."""

N_LOOKS = 5
"""Number of clock comparisons, of which the fastest is used."""


class OpenClEvent(Event):
    """An event of a queue: a marker after the commands queued so far.

    Attributes:
        marker: OpenCL's event; `None` until recorded.
    """

    device: OpenClDevice

    def __init__(self, device: OpenClDevice) -> None:
        super().__init__(device)
        self.marker: cl.Event | None = None

    def _synchronize(self) -> None:
        if self.marker is not None:
            with cl_errors(f"wait for an event of {self.device.name}", device=self.device.name):
                self.marker.wait()
            check_outcome(self.marker, f"event of {self.device.name}", self.device.name)

    def _free(self) -> None:
        self.marker = None


class OpenClBackend(GpuBackend):
    """A stream on an OpenCL device: an in-order command queue.

    Attributes:
        queue: PyOpenCL's queue.
        target: Parameters of the kernels' work split.
    """

    guid = "ggmlb-opencl"

    device: OpenClDevice

    def __init__(self, device: OpenClDevice, target: Target) -> None:
        super().__init__(device)
        self.target = target
        self.queue = cl.CommandQueue(device.context, device.cl_device)
        self._id = next(_queue_ids)
        # A transfer's event holds the host array and may only be dropped when done: its destructor waits
        # with the GIL held, which deadlocks if the work depends on another Python thread.
        self._held: list[cl.Event] = []
        self._last: cl.Event | None = None
        self._clock: QueueClock | None = None

    # -- graphs --------------------------------------------------------------------------------

    def can_fuse(self, group: Group) -> bool:
        """Whether OpenCL has a fused kernel for the group (not if it has a row-split product)."""
        return not any(map(is_split, group.nodes)) and RULES.find(group, self.target) is not None

    def _plan(self, graph: Graph) -> GraphPlan:
        guard.check(f"plan a graph on {self.name}")
        return OpenClPlan(self, graph)

    def _compute(self, plan: GraphPlan) -> Status:
        plan = cast("OpenClPlan", plan)
        with cl_errors(f"queue a graph on {self.name}", device=self.name):
            try:
                status, last = self._queue_steps(plan)
            except BaseException:  # as Ctrl-C: queued commands still use the buffers
                self._note(cl.enqueue_marker(self.queue), *plan.buffers)
                raise
            finally:
                if plan.has_indices:
                    self.bad_indices.note_use()
            if last is not None:
                self._note(last, *plan.buffers)
        return status

    def _queue_steps(self, plan: OpenClPlan) -> tuple[Status, cl.Event | None]:
        """Queue the plan's steps; return the status, and the event of the last step."""
        queue, enqueue, event = self.queue, cl.enqueue_nd_range_kernel, None
        abort, clock, n = self.abort_callback, self._clock, 0
        for steps, product in plan.stages:
            for kernel, global_size, local_size in steps:
                if abort is not None and abort():
                    return Status.ABORTED, event
                event = enqueue(queue, kernel, global_size, local_size)
                if clock is not None:
                    clock.note(plan.name_of(n), event)
                    n += 1
            if product is not None:
                if abort is not None and abort():
                    return Status.ABORTED, event
                product.run()
        return Status.SUCCESS, event

    # -- transfers -----------------------------------------------------------------------------

    def _queue_move(
        self, call: str, is_write: bool, tensor: Tensor, host: Bytes, where: int | Pieces
    ) -> bool:
        buffer = cast("OpenClBuffer | None", self._own(tensor))
        if buffer is None or not isinstance(where, int) or buffer.packing(tensor):
            return False
        at = tensor.offset + where
        with cl_errors(f"{call} on {tensor.describe()}", device=self.name):
            memory, queue = buffer.memory, self.queue
            if is_write:
                event = cl.enqueue_copy(queue, memory, host, dst_offset=at, is_blocking=False)
            else:
                event = cl.enqueue_copy(queue, host, memory, src_offset=at, is_blocking=False)
            self._hold(event, buffer)
            self._time_copy(event, tensor)
        return True

    def _queue_copy(self, src: Tensor, dst: Tensor, after: Backend | None) -> None:
        source = after if isinstance(after, OpenClBackend) and after is not self else None
        with cl_errors(f"copy {src.describe()} to {dst.describe()}", device=self.name):
            event = queue_copy(self.queue, src, dst, None if source is None else [source._mark()])
            self._note(event, cast("OpenClBuffer", src.buffer), cast("OpenClBuffer", dst.buffer))
            self._time_copy(event, src)
            if source is not None:  # later work of the source may overwrite it
                cl.enqueue_barrier(source.queue, wait_for=[event])
                source.queue.flush()

    # -- order ---------------------------------------------------------------------------------

    def _mark(self) -> cl.Event:
        """Return an event for all work queued so far, and start that work."""
        marker = cl.enqueue_marker(self.queue)
        self.queue.flush()
        return marker

    def _note(self, event: cl.Event, *buffers: OpenClBuffer) -> None:
        """Start the queued work, and record its last event as a use of the buffers."""
        self._last = event
        for buffer in buffers:
            buffer.note_use(self._id, event)
        self.queue.flush()  # another queue that waits for it may never start otherwise

    # -- timing --------------------------------------------------------------------------------

    def _start_timing(self) -> bool:
        assert self.commands is not None
        with cl_errors(f"time the work of {self.name}", device=self.name):
            profiling = cl.command_queue_properties.PROFILING_ENABLE
            self.queue = cl.CommandQueue(self.device.context, self.device.cl_device, properties=profiling)
            self._clock = QueueClock(self.queue, self.commands)
        return True

    def _stop_timing(self) -> None:
        clock, self._clock = self._clock, None
        assert clock is not None
        with cl_errors(f"time the work of {self.name}", device=self.name):
            clock.settle()
            self.queue = cl.CommandQueue(self.device.context, self.device.cl_device)

    def _time_copy(self, event: cl.Event, tensor: Tensor) -> None:
        if self._clock is not None:
            self._clock.note(tensor.describe(), event, is_copy=True)

    def _hold(self, event: cl.Event, buffer: OpenClBuffer) -> None:
        self._held.append(event)
        self._note(event, buffer)
        if len(self._held) > MAX_HELD:
            self._held = [e for e in self._held if not is_done(e)]

    def _event_record(self, event: Event) -> None:
        with cl_errors(f"record an event on {self.name}", device=self.name):
            cast("OpenClEvent", event).marker = self._mark()

    def _event_wait(self, event: Event) -> None:
        if not isinstance(event, OpenClEvent) or event.device.context is not self.device.context:
            event.synchronize()
        elif event.marker is not None:
            with cl_errors(f"wait for an event on {self.name}", device=self.name):
                cl.enqueue_barrier(self.queue, wait_for=[event.marker])

    def finish_and_read(self, buffer: Buffer, words: npt.NDArray[np.int64]) -> None:
        """Queue a copy of the buffer to `words` after all queued work, and wait for both."""
        record = cast("OpenClBuffer", buffer)
        with cl_errors(f"read the index record of {self.name}", device=self.name):
            self._hold(cl.enqueue_copy(self.queue, words, record.memory, is_blocking=False), record)
        self.finish()

    def finish(self) -> None:
        """Wait for all queued work, and check that it succeeded."""
        with cl_errors(f"synchronize {self.name}", device=self.name):
            self.queue.finish()
            if self._last is not None and not is_done(self._last):
                self._last.wait()  # rusticl 22.3's clFinish does not wait for commands that clFlush began
        ended, self._held = self._held, []
        if self._last is not None:
            ended.append(self._last)
            self._last = None
        for event in ended:
            check_outcome(event, self.name, self.name)


class _Look(NamedTuple):
    """Duration of a comparison, device time, and offset to the host's clock [ns]."""

    took: int
    at: int
    offset: int


class QueueClock:
    """Timing of a profiling queue: records its commands, and sets their times when it is idle."""

    def __init__(self, queue: cl.CommandQueue, commands: list[Command]) -> None:
        self._queue = queue
        self._commands = commands
        self._events: list[tuple[Command, cl.Event]] = []
        self._first = _look(queue)

    def note(self, name: str, event: cl.Event, is_copy: bool = False) -> None:
        """Record a queued command, by its event, under a name."""
        command = Command(name, is_copy)
        self._commands.append(command)
        self._events.append((command, event))

    def settle(self) -> None:
        """Set the start and stop times of the recorded commands; they must be finished."""
        first, last = self._first, _look(self._queue)
        drift = (last.offset - first.offset) / max(last.at - first.at, 1)
        for command, event in self._events:
            times = event.profile
            command.start, command.stop = (
                at + first.offset + round((at - first.at) * drift) for at in (times.start, times.end)
            )


def _look(queue: cl.CommandQueue) -> _Look:
    """Read both clocks, as close in time as possible."""
    looks = []
    for _ in range(N_LOOKS):
        before = perf_counter_ns()
        marker = cl.enqueue_marker(queue)
        marker.wait()
        after = perf_counter_ns()
        at = marker.profile.end
        looks.append(_Look(after - before, at, (before + after) // 2 - at))
    return min(looks)
