"""The stream of a meta device: a stream on each of its devices."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, cast

from ggmlb.core.enums import Status
from ggmlb.core.graph import Graph
from ggmlb.core.tensor import Tensor
from ggmlb.interface import Backend, GraphPlan
from ggmlb.interface.data import Bytes
from ggmlb.parallel.meta.buffer import MetaBuffer
from ggmlb.parallel.meta.plan import MetaPlan
from ggmlb.parallel.meta.reduce import MetaCommunicator

if TYPE_CHECKING:
    from ggmlb.parallel.meta.device import MetaDevice


class MetaBackend(Backend):
    """A stream on each device of a meta device.

    Attributes:
        backends: The devices' streams (ggml_backend_meta_n_backends, ggml_backend_meta_simple_backend).
        communicator: Computes sums over the devices.
    """

    guid = "ggmlb-meta"

    device: MetaDevice

    def __init__(self, device: MetaDevice, params: Mapping[str, Any] | None = None) -> None:
        super().__init__(device)
        with ExitStack() as opened:
            self.backends = tuple(opened.enter_context(d.init_backend(params)) for d in device.devices)
            self.communicator = MetaCommunicator(self.backends)
            opened.pop_all()

    @property
    def streams(self) -> tuple[Backend, ...]:
        """The devices' streams."""
        return tuple(stream for backend in self.backends for stream in backend.streams)

    def _plan(self, graph: Graph) -> GraphPlan:
        return MetaPlan(self, graph)

    def _compute(self, plan: GraphPlan) -> Status:
        for stage in cast("MetaPlan", plan).stages:
            if self.is_aborted():
                return Status.ABORTED
            for backend, own in zip(self.backends, stage.plans, strict=True):
                if own is not None:
                    backend.graph_plan_compute(own)
            if stage.then is not None:
                stage.then()
        return Status.SUCCESS

    def _plan_free(self, plan: GraphPlan) -> None:
        cast("MetaPlan", plan).release()

    def _set_tensor_async(self, tensor: Tensor, data: Bytes, offset: int) -> None:
        buffer = tensor.buffer
        if not (isinstance(buffer, MetaBuffer) and buffer.buft.device is self.device):
            return super()._set_tensor_async(tensor, data, offset)
        if data.size < (tensor.view_src or tensor).nbytes:
            self._synchronize()  # `scatter` may read the rest of the tensor
        for backend, (own, part, start) in zip(
            self.backends, buffer.scatter(tensor, data, offset), strict=True
        ):
            backend.set_tensor_async(own, part, start)

    def _synchronize(self) -> None:
        for backend in self.backends:
            backend.synchronize()

    def _free(self) -> None:
        self.communicator.free()
        for backend in self.backends:
            backend.free()
