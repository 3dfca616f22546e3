"""GgmlBackend: a stream on a device of a ggml library."""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import c_int, c_void_p
from typing import TYPE_CHECKING, Any, Final, TypeGuard, cast

from ggmlb.backends.ggml import abi
from ggmlb.backends.ggml.buffer import GgmlBuffer
from ggmlb.backends.ggml.library import guard
from ggmlb.backends.ggml.plan import GgmlPlan
from ggmlb.core.enums import Status
from ggmlb.core.errors import AllocationError, BackendError
from ggmlb.core.graph import Graph
from ggmlb.core.tensor import Tensor
from ggmlb.interface import Backend, Event, GraphPlan
from ggmlb.interface.data import Bytes, Pieces
from ggmlb.system.process import checked_n_threads

if TYPE_CHECKING:
    from ggmlb.backends.ggml.device import GgmlDevice

_SUCCESS: Final = 0
_ABORTED: Final = 1
_ALLOC_FAILED: Final = -2


class GgmlEvent(Event):
    """An event of a ggml device (`ggml_backend_event_t`).

    Attributes:
        handle: The C event.
    """

    device: GgmlDevice

    def __init__(self, device: GgmlDevice) -> None:
        super().__init__(device)
        self._c = device.library.load()
        self.handle = self._c["backend_event_new"](device.handle)
        self._end = weakref.finalize(self, self._c["backend_event_free"], self.handle)
        self._end.atexit = False

    def _synchronize(self) -> None:
        if self.is_recorded:
            self._c["backend_event_synchronize"](self.handle)

    def _free(self) -> None:
        self._end()


class GgmlBackend(Backend):
    """A stream on a ggml device (`ggml_backend_t`).

    Attributes:
        handle: The C backend.
        n_threads: Number of threads; 0 where the device decides.
    """

    device: GgmlDevice

    def __init__(self, device: GgmlDevice, handle: int) -> None:
        super().__init__(device)
        self.handle = handle
        self.n_threads = 0
        self._c = device.library.load()
        self._lock = threading.RLock()  # ggml's streams are for one thread at a time
        self._held: list[Any] = []  # memory that queued transfers use
        self._queued: set[GgmlPlan] = set()  # ggml's Vulkan reads a graph until it is computed
        self._end = weakref.finalize(self, self._c["backend_free"], handle)
        self._end.atexit = False
        self._set_abort = device.proc("ggml_backend_set_abort_callback", None, c_void_p, c_void_p, c_void_p)
        self._abort = abi.AbortFunction(self._asks_to_abort)
        self._raised: BaseException | None = None

    @property
    def guid(self) -> str:
        """GUID of the backend from ggml in hexadecimal, after the prefix `ggml-`."""
        address = self._c["backend_guid"](self.handle)
        return "ggml-" + (ctypes.string_at(address, 16).hex() if address else "backend")

    def set_n_threads(self, n: int) -> None:
        """Set the number of threads for later graphs.

        Raises:
            ArgumentError: `n` is less than 1.
            BackendError: The device has no threads to set.
        """
        n = checked_n_threads(n)
        set_n_threads = self.device.proc("ggml_backend_set_n_threads", None, c_void_p, c_int)
        if set_n_threads is None:
            raise BackendError(f"set_n_threads: {self.name} has no threads to set; give a CPU backend")
        with self._lock:
            set_n_threads(self.handle, n)
        self.n_threads = n

    @contextmanager
    def holding(self, memory: object) -> Iterator[None]:
        """Keep other threads from the C backend, and `memory` for what is queued there until it is done."""
        with self._lock:
            self._held.append(memory)
            yield

    # -- graphs --------------------------------------------------------------------------------

    def _plan(self, graph: Graph) -> GraphPlan:
        guard.check(f"plan a graph on {self.name}")
        return GgmlPlan(self, graph)

    def _compute(self, plan: GraphPlan) -> Status:
        if not plan.nodes:
            return Status.SUCCESS
        plan = cast("GgmlPlan", plan)
        guard.enter(f"compute a graph on {self.name}")
        try:
            with self._lock:
                status = self._run(plan)
        finally:
            guard.leave()
        raised, self._raised = self._raised, None
        if raised is not None:
            raise raised
        if status == _SUCCESS:
            return Status.SUCCESS
        if status == _ABORTED:
            return Status.ABORTED
        if status == _ALLOC_FAILED:
            raise AllocationError(
                f"{self.name} has not enough memory to compute the graph; use a smaller batch"
            )
        raise BackendError(
            f"{self.name} failed to compute a graph (ggml_status {status}); see Python's logger 'ggmlb.ggml'"
        )

    def _run(self, plan: GgmlPlan) -> int:
        compute: Callable[[int, int], int] = self._c["backend_graph_compute_async"]
        if self.device.caps.async_:
            self._queued.add(plan)
        has_callback, set_abort = self.abort_callback is not None, self._set_abort
        if has_callback and set_abort is None and self._asks_to_abort(None):
            return _ABORTED
        if has_callback and set_abort is not None:
            set_abort(self.handle, ctypes.cast(self._abort, c_void_p), None)
        try:
            for part in plan.parts:
                part.check_indices(self.name)
                status = compute(self.handle, part.c_graph)
                if status != _SUCCESS:
                    return status
            return _SUCCESS
        finally:
            if has_callback and set_abort is not None:
                set_abort(self.handle, None, None)

    def _asks_to_abort(self, _: int | None) -> bool:
        try:
            return self.is_aborted()
        except BaseException as error:  # nothing may be raised into C
            self._raised = error
            return True

    def _plan_free(self, plan: GraphPlan) -> None:
        self.wait()
        cast("GgmlPlan", plan).release()

    # -- transfers -----------------------------------------------------------------------------

    def _owns(self, buffer: object) -> TypeGuard[GgmlBuffer]:
        return isinstance(buffer, GgmlBuffer) and buffer.buft is self.device.buffer_type

    def _set_tensor_async(self, tensor: Tensor, data: Bytes, offset: int) -> None:
        if not self._move("backend_tensor_set_async", tensor, data, offset, data.size):
            super()._set_tensor_async(tensor, data, offset)

    def _get_tensor_async(self, tensor: Tensor, out: Bytes, offset: int) -> None:
        if not self._move("backend_tensor_get_async", tensor, out, offset, out.size):
            super()._get_tensor_async(tensor, out, offset)

    def _set_tensor_2d_async(self, tensor: Tensor, data: Bytes, pieces: Pieces) -> None:
        if not self._move("backend_tensor_set_2d_async", tensor, data, *pieces):
            super()._set_tensor_2d_async(tensor, data, pieces)

    def _get_tensor_2d_async(self, tensor: Tensor, out: Bytes, pieces: Pieces) -> None:
        if not self._move("backend_tensor_get_2d_async", tensor, out, *pieces):
            super()._get_tensor_2d_async(tensor, out, pieces)

    def _move(self, name: str, tensor: Tensor, data: Bytes, *where: int) -> bool:
        """Queue a transfer, if the tensor is in this device's memory and the library has the function."""
        if not self._owns(tensor.buffer) or name not in self._c:
            return False
        c_tensor = tensor.buffer.c_tensor(tensor)
        with self._lock:
            self._held += (c_tensor, data)
            self._c[name](self.handle, ctypes.addressof(c_tensor), data.ctypes.data, *where)
        return True

    def _cpy_tensor_async(self, backend_src: Backend, src: Tensor, dst: Tensor) -> bool:
        # Between streams, ggml's Vulkan (0.25) does not wait for the source: so synchronise both instead.
        return backend_src is self and self._copy_on_stream(src, dst)

    def _copy_on_stream(self, src: Tensor, dst: Tensor) -> bool:
        if not self._owns(src.buffer) or not self._owns(dst.buffer):
            return False
        source, target = src.buffer.c_tensor(src), dst.buffer.c_tensor(dst)
        with self._lock:
            self._held += (source, target)
            self._c["backend_tensor_copy_async"](
                self.handle, self.handle, ctypes.addressof(source), ctypes.addressof(target)
            )
        return True

    # -- order ---------------------------------------------------------------------------------

    def _event_record(self, event: Event) -> None:
        with self._lock:
            self._c["backend_event_record"](cast("GgmlEvent", event).handle, self.handle)

    def _event_wait(self, event: Event) -> None:
        if not isinstance(event, GgmlEvent) or event.device is not self.device:
            event.synchronize()
        elif event.is_recorded:
            with self._lock:
                self._c["backend_event_wait"](self.handle, event.handle)

    def wait(self) -> None:
        """Wait for the queued work."""
        with self._lock:
            self._c["backend_synchronize"](self.handle)
            self._held.clear()
            self._queued.clear()

    def _synchronize(self) -> None:
        guard.check(f"synchronize {self.name}")
        self.wait()
        self.device.free_dropped()

    def _free(self) -> None:
        self._end()
        self.device.streams.discard(self)
