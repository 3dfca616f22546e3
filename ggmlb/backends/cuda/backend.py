"""CudaBackend: a CUDA stream as a backend."""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, cast

import numpy as np
import numpy.typing as npt

from ggmlb.backends.cuda.buffer import MappedBuffer, can_pitch, queue_copy
from ggmlb.backends.cuda.cublas import WORKSPACE_NBYTES, CuBlas
from ggmlb.backends.cuda.driver import CopyKind, cuda_errors, guard
from ggmlb.backends.cuda.kernels import RULES
from ggmlb.backends.cuda.lowering import can_fuse
from ggmlb.backends.cuda.plan import CudaPlan, IdleGraphs
from ggmlb.backends.cuda.stream import Clock, CudaEvent, DeferredRelease
from ggmlb.backends.gpu.stream import GpuBackend
from ggmlb.core.errors import BackendError

if TYPE_CHECKING:
    from ggmlb.backends.common.fusion import Group
    from ggmlb.backends.cuda.buffer import CudaBuffer
    from ggmlb.backends.cuda.device import CudaDevice
    from ggmlb.core.enums import Status
    from ggmlb.core.graph import Graph
    from ggmlb.core.tensor import Tensor
    from ggmlb.interface import Backend, Buffer, Event, GraphPlan
    from ggmlb.interface.data import Bytes, Pieces

STAGED_NBYTES = 64 << 10
"""Largest write of pageable memory that CUDA stages at once [bytes]; others may wait for the stream."""


class CudaBackend(GpuBackend):
    """A non-blocking CUDA stream; several streams of a device run concurrently.

    Attributes:
        stream: The CUDA stream.
        clock: Times its work between `start_timing` and `stop_timing`.
        idle_graphs: Executable graphs of dropped plans, for reuse.
    """

    guid = "ggmlb-cuda-cupy"

    device: CudaDevice
    rules = RULES

    def __init__(self, device: CudaDevice) -> None:
        super().__init__(device)
        self._driver = device.driver
        with cuda_errors(self._driver, f"open a stream on {device.name}"):
            self.stream = device.open_stream()
        self.idle_graphs = IdleGraphs(self._driver, device.index)
        # Host arrays must be kept until an event shows that their transfer is done, even if this backend is
        # dropped with work in its stream.
        self._remains = DeferredRelease(self._driver, self.stream, self.idle_graphs)
        self._held = self._remains.held
        give_back = device.memory_pool.give_back
        self._leave = weakref.finalize(self, give_back, self._remains.close, (self.stream,))
        self._leave.atexit = False
        self._last_plan: CudaPlan | None = None
        self.clock: Clock | None = None

    @property
    def blas(self) -> CuBlas:
        """The stream's cuBLAS handle and workspace, created when a plan first needs them."""
        if self._remains.blas is None:
            workspace = cast("CudaBuffer", self.alloc_buffer(WORKSPACE_NBYTES))
            blas = CuBlas(self.device.blas_library(), workspace.address, workspace.size)
            self._remains.blas = blas, workspace
        return self._remains.blas[0]

    # -- graphs --------------------------------------------------------------------------------

    def can_fuse(self, group: Group) -> bool:
        """Whether CUDA has a fused kernel for the group."""
        return can_fuse(group, self.device.target)

    def _plan(self, graph: Graph) -> GraphPlan:
        with cuda_errors(self._driver, f"plan a graph on {self.name}"), self.device.on():
            return CudaPlan(self, graph)

    def _compute(self, plan: GraphPlan) -> Status:
        plan = cast("CudaPlan", plan)
        guard.check(f"compute on {self.name}")
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
        super()._plan_free(plan)

    # -- transfers -----------------------------------------------------------------------------

    def _queue_move(
        self, call: str, is_write: bool, tensor: Tensor, host: Bytes, where: int | Pieces
    ) -> bool:
        """As `GpuBackend._queue_move`.

        Copies of pageable memory block in CUDA, so they use the transfer stream: other threads may use this
        stream meanwhile. Writes follow this stream's work, not that of others: weights are uploaded while
        another stream computes.
        """
        buffer = cast("CudaBuffer | None", self._own(tensor))
        if buffer is None or not can_pitch(where):
            return False
        kind = CopyKind.TO_DEVICE if is_write else CopyKind.TO_HOST
        with cuda_errors(self._driver, call, tensor=tensor), self.device.on(), self._timed(tensor):
            is_staged = is_write and host.size <= STAGED_NBYTES
            if not is_staged and not self._driver.is_pinned(host):
                what = f"{call} on {tensor.describe()}"
                after = [self.stream] if is_write else list(buffer.streams)
                buffer.copy(what, kind, tensor.offset, host, where, after)
                return True
            with self.stream.lock:
                buffer.queue(kind, tensor.offset, host, where, self.stream.handle)
                buffer.streams.add(self.stream)
                self._held.add(host)
        return True

    def _queue_copy(self, src: Tensor, dst: Tensor, after: Backend | None) -> None:
        source, target = cast("CudaBuffer", src.buffer), cast("CudaBuffer", dst.buffer)
        other = after.stream if isinstance(after, CudaBackend) else None
        self.device.peers.enable(source.device, target.device)
        what = f"copy {src.describe()} to {dst.describe()}"
        with cuda_errors(self._driver, what), self.device.on():
            if other is not None:
                self.stream.wait_for([other])
            with self._timed(src), self.stream.lock:
                queue_copy(src, dst, self.stream.handle)
            source.streams.add(self.stream)
            target.streams.add(self.stream)
            if other is not None:
                other.wait_for([self.stream])

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
        """Context manager that times a copy if timing is on; it may wait: enter before taking the lock."""
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

    def new_record(self, nbytes: int) -> MappedBuffer:
        """Return zeroed page-locked host memory, which kernels write and the host reads in place."""
        with cuda_errors(self._driver, f"allocate page-locked memory for {self.name}"):
            return MappedBuffer(self.device.buffer_type, self._driver.pinned(nbytes))

    def finish_and_read(self, buffer: Buffer, words: npt.NDArray[np.int64]) -> None:
        """Wait for queued work, which includes the kernels' writes to the record, then copy it to `words`."""
        self.finish()
        words[:] = cast("MappedBuffer", buffer).memory.view(np.int64)

    def finish(self) -> None:
        """Wait for all queued work, and release the memory that was kept for it."""
        guard.enter(f"synchronize {self.name}")
        try:
            n = self._held.n_held  # others may queue more before the wait ends
            self.stream.synchronize()
            self._last_plan = None
            with self.stream.lock:
                self._held.drop(n)
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
        super()._free()
        self._leave.detach()
        with cuda_errors(self._driver, f"close the stream of {self.name}"):
            self._remains.close()
