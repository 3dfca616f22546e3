"""GpuBackend: base class of CUDA and OpenCL streams: fusion, copies, out-of-range indices."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, cast

from ggmlb.backends.common.fusion import Group, gather
from ggmlb.backends.gpu.bad_index import BadIndices
from ggmlb.backends.gpu.buffer import GpuBuffer
from ggmlb.backends.gpu.device import GpuDevice
from ggmlb.backends.gpu.lowering import RULES, GpuRules
from ggmlb.backends.gpu.plan import Arena, GpuPlan
from ggmlb.interface import Backend
from ggmlb.parallel.row_split import Helpers

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from ggmlb.core.graph import Graph
    from ggmlb.core.tensor import Tensor
    from ggmlb.interface import Buffer, GraphPlan
    from ggmlb.interface.data import Bytes, Pieces


class GpuBackend(Backend):
    """Base class of streams that run the portable kernels.

    Attributes:
        rules: The rules that lower its nodes.
        arena: Scratch memory shared by its plans.
        helpers: Its helper streams on other devices, for split products.
        bad_indices: The record of out-of-range indices of its kernels.
    """

    device: GpuDevice
    rules: ClassVar[GpuRules] = RULES

    def __init__(self, device: GpuDevice) -> None:
        super().__init__(device)
        self.arena = Arena(device.buffer_type)
        self.helpers = Helpers()
        self.bad_indices = BadIndices()

    @property
    def streams(self) -> tuple[Backend, ...]:
        """This stream and its helper streams on other devices."""
        return (self, *self.helpers.streams)

    # -- graphs --------------------------------------------------------------------------------

    @abstractmethod
    def can_fuse(self, group: Group) -> bool:
        """Whether the backend has a fused kernel for the group."""

    def graph_optimize(self, graph: Graph) -> None:
        """Reorder the graph so that the nodes of each fused group stand together."""
        gather(graph, self.can_fuse, self.rules.patterns)

    def _plan_free(self, plan: GraphPlan) -> None:
        cast("GpuPlan[Any]", plan).release()

    # -- transfers -----------------------------------------------------------------------------

    def _set_tensor_async(self, tensor: Tensor, data: Bytes, offset: int) -> None:
        if not self._queue_move("set_tensor_async", True, tensor, data, offset):
            super()._set_tensor_async(tensor, data, offset)

    def _set_tensor_2d_async(self, tensor: Tensor, data: Bytes, pieces: Pieces) -> None:
        if not self._queue_move("set_tensor_2d_async", True, tensor, data, pieces):
            super()._set_tensor_2d_async(tensor, data, pieces)

    def _get_tensor_async(self, tensor: Tensor, out: Bytes, offset: int) -> None:
        if not self._queue_move("get_tensor_async", False, tensor, out, offset):
            super()._get_tensor_async(tensor, out, offset)

    def _get_tensor_2d_async(self, tensor: Tensor, out: Bytes, pieces: Pieces) -> None:
        if not self._queue_move("get_tensor_2d_async", False, tensor, out, pieces):
            super()._get_tensor_2d_async(tensor, out, pieces)

    @abstractmethod
    def _queue_move(
        self, call: str, is_write: bool, tensor: Tensor, host: Bytes, where: int | Pieces
    ) -> bool:
        """Queue a copy between host memory and a tensor, from an offset on or of pieces.

        Returns:
            Whether the device can.
        """

    def _cpy_tensor_async(self, backend_src: Backend, src: Tensor, dst: Tensor) -> bool:
        if not isinstance(backend_src, type(self)):
            return False
        source, target = backend_src._own(src), self._own(dst)
        if source is None or target is None or not target.can_copy(src, dst):
            return False
        self._queue_copy(src, dst, backend_src)
        return True

    def _copy_on_stream(self, src: Tensor, dst: Tensor) -> bool:
        source, target = src.buffer, dst.buffer
        if not isinstance(source, GpuBuffer) or not isinstance(target, GpuBuffer):
            return False
        if self.device not in (source.device, target.device) or not target.can_copy(src, dst):
            return False
        self._queue_copy(src, dst, None)
        return True

    def _own(self, tensor: Tensor) -> GpuBuffer | None:
        """Return the tensor's buffer if it is on this device; else `None`."""
        buffer = tensor.buffer
        return buffer if isinstance(buffer, GpuBuffer) and buffer.device is self.device else None

    @abstractmethod
    def _queue_copy(self, src: Tensor, dst: Tensor, after: Backend | None) -> None:
        """Queue a copy; with `after`, between that stream's queued and later work."""

    # -- order ---------------------------------------------------------------------------------

    def _synchronize(self) -> None:
        self.bad_indices.finish(self)

    @abstractmethod
    def finish(self) -> None:
        """Wait for all queued work."""

    def new_record(self, nbytes: int) -> Buffer:
        """Return zeroed memory that kernels write and `finish_and_read` reads."""
        record = self.alloc_buffer(nbytes)
        record.clear(0)
        return record

    @abstractmethod
    def finish_and_read(self, buffer: Buffer, words: npt.NDArray[np.int64]) -> None:
        """Wait for all queued work, then copy a buffer to `words`, an array in host memory."""

    def _free(self) -> None:
        self.helpers.free()
        self.arena, self.bad_indices = Arena(self.device.buffer_type), BadIndices()  # drops their memory
