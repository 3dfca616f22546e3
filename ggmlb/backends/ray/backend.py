"""RayBackend: a stream on a device of another machine."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, cast

from ggmlb.backends.ray.buffer import RayBuffer, queue_copy
from ggmlb.backends.ray.link import Planned
from ggmlb.backends.ray.wire import graph_record
from ggmlb.core.enums import Status
from ggmlb.core.graph import Graph
from ggmlb.core.tensor import Tensor
from ggmlb.interface import Backend, Buffer, Event, GraphPlan
from ggmlb.interface.data import Bytes
from ggmlb.system.process import checked_n_threads

if TYPE_CHECKING:
    from ggmlb.backends.ray.device import RayDevice
    from ggmlb.backends.ray.link import Call


class RayEvent(Event):
    """An event of a remote stream: complete when the actor call with the work before it is done.

    Attributes:
        call: The call; `None` until recorded, or if no work was pending then.
    """

    device: RayDevice

    def __init__(self, device: RayDevice) -> None:
        super().__init__(device)
        self.call: Call | None = None

    def _synchronize(self) -> None:
        if self.call is not None and self.call.first is None:
            self.call.wait()

    def _free(self) -> None:
        self.call = None


class RayPlan(GraphPlan):
    """A graph plan on another machine.

    Attributes:
        planned: Its remote handle, and the reads expected after it.
    """

    def __init__(self, backend: RayBackend, graph: Graph) -> None:
        super().__init__(backend, graph)
        record = graph_record(graph.nodes, graph.use_counts(), _handle)
        link = backend.device.link
        self.planned = Planned(link.ask("plan", backend.handle, record))
        self.release = weakref.finalize(self, link.release, "free", self.planned.handle)
        self.release.atexit = False


class RayBackend(Backend):
    """A stream on a device of another machine; all work on that machine runs in the order of the calls.

    Attributes:
        handle: The remote stream's handle.
    """

    guid = "ggmlb-ray"

    device: RayDevice

    def __init__(self, device: RayDevice, handle: int) -> None:
        super().__init__(device)
        self.handle = handle
        self._release = weakref.finalize(self, device.link.release, "free", handle)
        self._release.atexit = False

    def set_n_threads(self, n: int) -> None:
        """Set the number of remote threads for later plans, if the device has threads.

        Raises:
            ArgumentError: `n` is less than 1.
        """
        self.device.link.ask("threads", self.handle, checked_n_threads(n))
        self._plans.clear()

    def _plan(self, graph: Graph) -> GraphPlan:
        return RayPlan(self, graph)

    def _compute(self, plan: GraphPlan) -> Status:
        planned, link = cast("RayPlan", plan).planned, self.device.link
        if self.abort_callback is None:
            link.compute(planned)
            return Status.SUCCESS
        if self.is_aborted() or link.compute_unless(self.is_aborted, planned):
            return Status.ABORTED
        return Status.SUCCESS

    def _plan_free(self, plan: GraphPlan) -> None:
        cast("RayPlan", plan).release()

    def _set_tensor_async(self, tensor: Tensor, data: Bytes, offset: int) -> None:
        if isinstance(tensor.buffer, RayBuffer):
            tensor.buffer.queue_write(tensor, data, offset)
        else:
            super()._set_tensor_async(tensor, data, offset)

    def _get_tensor_async(self, tensor: Tensor, out: Bytes, offset: int) -> None:
        if isinstance(tensor.buffer, RayBuffer):
            tensor.buffer.queue_read(tensor, out, offset)
        else:
            super()._get_tensor_async(tensor, out, offset)

    def _cpy_tensor_async(self, backend_src: Backend, src: Tensor, dst: Tensor) -> bool:
        return isinstance(backend_src, RayBackend) and queue_copy(src, dst)

    def _copy_on_stream(self, src: Tensor, dst: Tensor) -> bool:
        return queue_copy(src, dst)

    def _event_record(self, event: Event) -> None:
        cast("RayEvent", event).call = self.device.link.mark()

    def _event_wait(self, event: Event) -> None:
        if not isinstance(event, RayEvent):
            event.synchronize()
        elif event.call is not None and event.call.link is not self.device.link:
            self.device.link.after(event.call)

    def _synchronize(self) -> None:
        self.device.link.settle()

    def _free(self) -> None:
        self._release()


def _handle(buffer: Buffer) -> int:
    assert isinstance(buffer, RayBuffer)  # others are rejected before a graph is planned
    return buffer.handle
