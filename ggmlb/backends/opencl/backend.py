"""OpenClBackend: a stream as an in-order command queue."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, TypeGuard, cast

import numpy as np
import numpy.typing as npt
import pyopencl as cl

from ggmlb.backends.common.fusion import Group, gather
from ggmlb.backends.gpu import Target, can_fuse
from ggmlb.backends.gpu.bad_index import BadIndices
from ggmlb.backends.opencl.buffer import OpenClBuffer, can_copy, queue_copy
from ggmlb.backends.opencl.clock import QueueClock
from ggmlb.backends.opencl.plan import OpenClPlan
from ggmlb.backends.opencl.runtime import check_outcome, cl_errors, guard, is_done
from ggmlb.core.enums import Status
from ggmlb.core.graph import Graph
from ggmlb.core.tensor import Tensor
from ggmlb.interface import Backend, Buffer, Event, GraphPlan
from ggmlb.interface.data import Bytes
from ggmlb.parallel.row_split import Helpers, is_split

if TYPE_CHECKING:
    from ggmlb.backends.opencl.device import OpenClDevice

_queue_ids = itertools.count()

MAX_HELD = 256
"""Number of kept transfer events at which finished ones are dropped."""


class OpenClEvent(Event):
    """A marker in a backend's queue.

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


class OpenClBackend(Backend):
    """An in-order command queue.

    Attributes:
        queue: PyOpenCL's queue.
        target: Parameters of the kernels' work split.
        helpers: Its helper streams on other devices, for split products.
        bad_indices: The record of out-of-range indices of its kernels.
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
        self.helpers = Helpers()
        self.bad_indices = BadIndices()

    @property
    def streams(self) -> tuple[Backend, ...]:
        """Itself and its helper streams."""
        return (self, *self.helpers.streams)

    # -- graphs --------------------------------------------------------------------------------

    def can_fuse(self, group: Group) -> bool:
        """Whether a kernel computes a group of nodes at once."""
        target = self.target
        return self.device.kinds.fuses(
            group, lambda g: can_fuse(g, target) and not any(map(is_split, g.nodes)), target
        )

    def graph_optimize(self, graph: Graph) -> None:
        """Move the nodes of fused groups together."""
        gather(graph, self.can_fuse)

    def _plan(self, graph: Graph) -> GraphPlan:
        guard.check(f"plan a graph on {self.name}")
        return OpenClPlan(self, graph)

    def _compute(self, plan: GraphPlan) -> Status:
        plan = cast("OpenClPlan", plan)
        with cl_errors(f"queue a graph on {self.name}", device=self.name):
            try:
                status, last = self._queue_steps(plan)
            except BaseException:  # as Ctrl-C: what was queued runs, and its buffers are in use
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

    def _plan_free(self, plan: GraphPlan) -> None:
        cast("OpenClPlan", plan).release()

    # -- transfers -----------------------------------------------------------------------------

    def _set_tensor_async(self, tensor: Tensor, data: Bytes, offset: int) -> None:
        buffer = tensor.buffer
        if not self._owns(buffer) or buffer.packing(tensor):
            super()._set_tensor_async(tensor, data, offset)
            return
        with cl_errors(f"set_tensor_async on {tensor.describe()}", device=self.name):
            start = tensor.offset + offset
            event = cl.enqueue_copy(self.queue, buffer.memory, data, dst_offset=start, is_blocking=False)
            self._hold(event, buffer)
            self._time_copy(event, tensor)

    def _get_tensor_async(self, tensor: Tensor, out: Bytes, offset: int) -> None:
        buffer = tensor.buffer
        if not self._owns(buffer) or buffer.packing(tensor):
            super()._get_tensor_async(tensor, out, offset)
            return
        with cl_errors(f"get_tensor_async on {tensor.describe()}", device=self.name):
            start = tensor.offset + offset
            event = cl.enqueue_copy(self.queue, out, buffer.memory, src_offset=start, is_blocking=False)
            self._hold(event, buffer)
            self._time_copy(event, tensor)

    def _cpy_tensor_async(self, backend_src: Backend, src: Tensor, dst: Tensor) -> bool:
        source, target = src.buffer, dst.buffer
        if (
            not isinstance(backend_src, OpenClBackend)
            or not backend_src._owns(source)
            or not self._owns(target)
        ):
            return False
        if not can_copy(source, src, target, dst):
            return False
        with cl_errors(f"copy {src.describe()} to {dst.describe()}", device=self.name):
            across = backend_src is not self
            before = [backend_src._mark()] if across else None
            event = queue_copy(self.queue, src, dst, before)
            self._note(event, source, target)
            self._time_copy(event, src)
            if across:  # what comes next on the source may overwrite it
                cl.enqueue_barrier(backend_src.queue, wait_for=[event])
                backend_src.queue.flush()
        return True

    def _copy_on_stream(self, src: Tensor, dst: Tensor) -> bool:
        source, target = src.buffer, dst.buffer
        if not isinstance(source, OpenClBuffer) or not isinstance(target, OpenClBuffer):
            return False
        # One command of this queue, which must own one side and share a context with the other.
        if self.device not in (source.device, target.device) or not can_copy(source, src, target, dst):
            return False
        with cl_errors(f"copy {src.describe()} to {dst.describe()}", device=self.name):
            event = queue_copy(self.queue, src, dst)
            self._note(event, source, target)
            self._time_copy(event, src)
        return True

    def _owns(self, buffer: object) -> TypeGuard[OpenClBuffer]:
        return isinstance(buffer, OpenClBuffer) and buffer.device is self.device

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

    def _synchronize(self) -> None:
        self.bad_indices.finish(self)

    def finish_and_read(self, buffer: Buffer, words: npt.NDArray[np.int64]) -> None:
        """As `RecordStream.finish_and_read`."""
        record = cast("OpenClBuffer", buffer)
        with cl_errors(f"read the index record of {self.name}", device=self.name):
            self._hold(cl.enqueue_copy(self.queue, words, record.memory, is_blocking=False), record)
        self.finish()

    def finish(self) -> None:
        """As `RecordStream.finish`."""
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

    def _free(self) -> None:
        self.helpers.free()
