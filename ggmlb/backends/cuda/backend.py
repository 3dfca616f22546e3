"""CudaBackend: a CUDA stream as a backend."""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt

from ggmlb.backends.common.fusion import gather
from ggmlb.backends.cuda.buffer import CudaBuffer, can_pitch, queue_copy
from ggmlb.backends.cuda.clock import Clock
from ggmlb.backends.cuda.cublas import WORKSPACE_NBYTES, CuBlas
from ggmlb.backends.cuda.driver import CopyKind, cuda_errors, guard
from ggmlb.backends.cuda.lowering import can_fuse
from ggmlb.backends.cuda.plan import CudaPlan, IdleGraphs
from ggmlb.backends.cuda.stream import CudaEvent, DeferredRelease
from ggmlb.backends.cuda.work import Arena, allocate
from ggmlb.backends.gpu.bad_index import BadIndices
from ggmlb.core.errors import BackendError
from ggmlb.core.placement import overlap
from ggmlb.interface import Backend
from ggmlb.parallel.row_split import Helpers

if TYPE_CHECKING:
    from ggmlb.backends.common.fusion import Group
    from ggmlb.backends.cuda.device import CudaDevice
    from ggmlb.backends.cuda.stream import Stream
    from ggmlb.core.enums import Status
    from ggmlb.core.graph import Graph
    from ggmlb.core.tensor import Tensor
    from ggmlb.interface import Buffer, Event, GraphPlan
    from ggmlb.interface.data import Bytes, Pieces

MAX_HELD = 64
"""Number of kept host arrays of transfers at which finished ones are dropped."""

STAGED_NBYTES = 64 << 10
"""Largest write of pageable memory that CUDA takes over at once [bytes]; others may wait for the stream."""


class CudaBackend(Backend):
    """A non-blocking CUDA stream; several streams of a device run concurrently.

    Attributes:
        stream: The CUDA stream.
        arena: Scratch memory shared by its plans.
        clock: Times its work between `start_timing` and `stop_timing`.
        idle_graphs: Executable graphs of dropped plans, for reuse.
        helpers: Its helper streams on other cards, for split products.
        bad_indices: The record of out-of-range indices of its kernels.
    """

    guid = "ggmlb-cuda-cupy"

    device: CudaDevice

    def __init__(self, device: CudaDevice) -> None:
        super().__init__(device)
        self._driver = device.driver
        with cuda_errors(self._driver, f"open a stream on {device.name}"):
            self.stream = device.open_stream()
        self.arena = Arena()
        self.idle_graphs = IdleGraphs(self._driver, device.index)
        # Host arrays must be kept until an event shows that their transfer is done, even if this backend is
        # dropped with work in its stream.
        self._remains = DeferredRelease(self._driver, self.stream, self.idle_graphs)
        self._held = self._remains.held
        self._n_held = 0
        give_back = device.memory_pool.give_back
        self._leave = weakref.finalize(self, give_back, self._remains, (self.stream,))
        self._leave.atexit = False
        self._last_plan: CudaPlan | None = None
        self.clock: Clock | None = None
        self.helpers = Helpers()
        self.bad_indices = BadIndices()

    @property
    def blas(self) -> CuBlas:
        """The stream's cuBLAS handle and workspace, created when a plan first needs them."""
        if self._remains.blas is None:
            workspace = allocate(self, WORKSPACE_NBYTES)
            blas = CuBlas(self.device.blas_library(), workspace.address, workspace.size)
            self._remains.blas = blas, workspace
        return self._remains.blas[0]

    @property
    def streams(self) -> tuple[Backend, ...]:
        """Itself and its helper streams."""
        return (self, *self.helpers.streams)

    # -- graphs --------------------------------------------------------------------------------

    def can_fuse(self, group: Group) -> bool:
        """Whether a kernel computes a group of nodes at once."""
        device = self.device
        return device.kinds.fuses(group, lambda g: can_fuse(g, device), device.has_blas)

    def graph_optimize(self, graph: Graph) -> None:
        """Move the nodes of fused groups together."""
        gather(graph, self.can_fuse)

    def _plan(self, graph: Graph) -> GraphPlan:
        self.device.check_process(f"plan a graph on {self.name}")
        with cuda_errors(self._driver, f"plan a graph on {self.name}"), self.device.on():
            return CudaPlan(self, graph)

    def _compute(self, plan: GraphPlan) -> Status:
        plan = cast("CudaPlan", plan)
        self.device.check_process(f"compute on {self.name}")
        self._last_plan = plan
        try:
            with self.device.on():
                return plan.run()
        except self._driver.errors as error:
            raise BackendError(self._late(error)) from None
        finally:
            if plan.has_indices:
                self.bad_indices.note_use()

    def _plan_free(self, plan: GraphPlan) -> None:
        if self._last_plan is plan:
            self._last_plan = None
        cast("CudaPlan", plan).release()

    # -- transfers -----------------------------------------------------------------------------

    def _set_tensor_async(self, tensor: Tensor, data: Bytes, offset: int) -> None:
        if not self._copy("set_tensor_async", CopyKind.TO_DEVICE, tensor, data, offset):
            super()._set_tensor_async(tensor, data, offset)

    def _set_tensor_2d_async(self, tensor: Tensor, data: Bytes, pieces: Pieces) -> None:
        if not self._copy("set_tensor_2d_async", CopyKind.TO_DEVICE, tensor, data, 0, pieces):
            super()._set_tensor_2d_async(tensor, data, pieces)

    def _get_tensor_async(self, tensor: Tensor, out: Bytes, offset: int) -> None:
        if not self._copy("get_tensor_async", CopyKind.TO_HOST, tensor, out, offset):
            super()._get_tensor_async(tensor, out, offset)

    def _get_tensor_2d_async(self, tensor: Tensor, out: Bytes, pieces: Pieces) -> None:
        if not self._copy("get_tensor_2d_async", CopyKind.TO_HOST, tensor, out, 0, pieces):
            super()._get_tensor_2d_async(tensor, out, pieces)

    def _copy(
        self,
        call: str,
        kind: CopyKind,
        tensor: Tensor,
        host: Bytes,
        offset: int,
        pieces: Pieces | None = None,
    ) -> bool:
        """Copy between host memory and a tensor; return whether the device can.

        Where CUDA would wait for the device, the copy is made on the stream of blocking transfers, so that
        other threads may use this stream meanwhile.
        """
        buffer, at = self._own(tensor), tensor.offset + offset
        if buffer is None or (pieces is not None and not can_pitch(pieces)):
            return False
        what = f"{call} on {tensor.describe()}"
        with self._transfer(what), self.device.on(), self._timed(tensor):
            is_staged = kind is CopyKind.TO_DEVICE and host.size <= STAGED_NBYTES
            if not is_staged and not self._driver.is_pinned(host):
                buffer.copy(what, kind, at, host, pieces)
                return True
            with self.stream.lock:
                buffer.queue(kind, at, host, self.stream.handle, pieces)
                self._hold(buffer, host)
        return True

    def _cpy_tensor_async(self, backend_src: Backend, src: Tensor, dst: Tensor) -> bool:
        if not isinstance(backend_src, CudaBackend) or overlap(src, dst):
            return False
        source, target = backend_src._own(src), self._own(dst)
        if source is None or target is None:
            return False
        self._queue_copy(source, src, target, dst, after=backend_src.stream)
        return True

    def _copy_on_stream(self, src: Tensor, dst: Tensor) -> bool:
        source, target = src.buffer, dst.buffer
        if not isinstance(source, CudaBuffer) or not isinstance(target, CudaBuffer) or overlap(src, dst):
            return False
        if self.device not in (source.device, target.device):
            return False
        self._queue_copy(source, src, target, dst)
        return True

    def _queue_copy(
        self, source: CudaBuffer, src: Tensor, target: CudaBuffer, dst: Tensor, after: Stream | None = None
    ) -> None:
        """Queue a copy; with `after`, behind that stream's work, and before what comes next there."""
        self.device.reg.peers.enable(source.device, target.device)
        with self._transfer(f"copy {src.describe()} to {dst.describe()}"), self.device.on():
            if after is not None:
                self.stream.wait_for([after])
            with self._timed(src), self.stream.lock:
                queue_copy(src, dst, self.stream.handle)
            source.streams.add(self.stream)
            target.streams.add(self.stream)
            if after is not None:
                after.wait_for([self.stream])

    def _own(self, tensor: Tensor) -> CudaBuffer | None:
        """Return the tensor's buffer if it is on this device; else `None`."""
        buffer = tensor.buffer
        return buffer if isinstance(buffer, CudaBuffer) and buffer.device is self.device else None

    def _transfer(self, call: str) -> AbstractContextManager[None]:
        self.device.check_process(call)
        return cuda_errors(self._driver, call)

    def _hold(self, buffer: CudaBuffer, array: npt.NDArray[Any]) -> None:
        """Keep a host array until the work queued so far is done; requires the stream's lock."""
        buffer.streams.add(self.stream)
        self._held.append((self.stream.mark(), array))
        self._n_held += 1
        if len(self._held) > MAX_HELD:
            self._drop_held()

    def _drop_held(self, until: int = 0) -> None:
        """Drop arrays of finished transfers: the first `until` ever held, and others with finished events."""
        with self.stream.lock:
            n, first = 0, self._n_held - len(self._held)
            for event, _ in self._held:  # in the order of the stream
                if first + n >= until and not self._driver.event_done(event):
                    break
                self.stream.unmark(event)
                n += 1
            del self._held[:n]

    # -- timing --------------------------------------------------------------------------------

    def _start_timing(self) -> bool:
        assert self.commands is not None
        with cuda_errors(self._driver, f"time the work of {self.name}"), self.device.on():
            self.clock = Clock(self._driver, self.stream, self.commands)
        return True

    def _stop_timing(self) -> None:
        clock, self.clock = self.clock, None
        assert clock is not None
        with cuda_errors(self._driver, f"time the work of {self.name}"), self.device.on():
            clock.settle()

    def _timed(self, tensor: Tensor) -> AbstractContextManager[None]:
        """Context manager that times a copy if timing is on; enters before the stream's lock: it may wait."""
        clock = self.clock
        return nullcontext() if clock is None else clock.time(tensor.describe(), is_copy=True)

    # -- order ---------------------------------------------------------------------------------

    def _event_record(self, event: Event) -> None:
        what = f"record an event on {self.name}"
        with cuda_errors(self._driver, what), self.device.on(), self.stream.lock:
            self._driver.event_record(cast("CudaEvent", event).handle, self.stream.handle)

    def _event_wait(self, event: Event) -> None:
        if not isinstance(event, CudaEvent):
            event.synchronize()
            return
        what = f"wait for an event on {self.name}"
        with cuda_errors(self._driver, what), self.device.on(), self.stream.lock:
            self._driver.stream_wait(self.stream.handle, event.handle)

    def _synchronize(self) -> None:
        self.bad_indices.finish(self)

    def finish_and_read(self, buffer: Buffer, words: npt.NDArray[np.int64]) -> None:
        """As `RecordStream.finish_and_read`, one after the other: CUDA would wait under the stream's lock."""
        self.finish()
        what = f"read the index record of {self.name}"
        cast("CudaBuffer", buffer).copy(what, CopyKind.TO_HOST, 0, words)

    def finish(self) -> None:
        """As `RecordStream.finish`."""
        guard.enter(f"synchronize {self.name}")
        try:
            n = self._n_held  # others may queue more before the wait ends
            self.stream.synchronize()
            self._last_plan = None
            with self.device.on():
                self._drop_held(until=n)
            self.device.memory_pool.sweep_if_idle()
        except self._driver.errors as error:
            raise BackendError(self._late(error)) from None
        finally:
            guard.leave()

    def _late(self, error: Exception) -> str:
        """Return the error for earlier queued work; CUDA does not report which work failed."""
        plan = self._last_plan
        if plan is None:
            return f"{self.name}: queued work failed: {error}"
        return (
            f"{self.name}: queued work failed, {plan.describe()} or a transfer beside it: {error}; run again "
            "with GGMLB_CUDA_SYNC=1 to learn the node"
        )

    def _free(self) -> None:
        self._last_plan = None
        self.helpers.free()
        self._leave.detach()
        with cuda_errors(self._driver, f"close the stream of {self.name}"):
            self._remains.close()
