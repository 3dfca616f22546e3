"""Backend: a stream on a device, which computes graphs."""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from ggmlb.core.arguments import alias, answer, named
from ggmlb.core.enums import NO_OPS, Status
from ggmlb.core.errors import (
    AllocationError,
    BackendError,
    DeviceLostError,
    FreedError,
    GraphError,
    NotAllocatedError,
    UnsupportedOpError,
)
from ggmlb.core.graph import Graph
from ggmlb.core.lifetime import Freeable
from ggmlb.core.tensor import Tensor
from ggmlb.interface.data import Pieces
from ggmlb.interface.observe import Action, observers, reading, writing
from ggmlb.interface.stream_lock import StreamLock
from ggmlb.interface.transfer import move
from ggmlb.system import log

if TYPE_CHECKING:
    from ggmlb.interface.buffer import Buffer
    from ggmlb.interface.buffer_type import BufferType
    from ggmlb.interface.data import Bytes, Source
    from ggmlb.interface.device import Device
    from ggmlb.interface.event import Event
    from ggmlb.interface.plan import GraphPlan

AbortCallback = Callable[[], bool]
"""Called between steps; `True` stops the computation with `Status.ABORTED`."""
alias("AbortCallback", "Callable")


@dataclass(slots=True, eq=False)
class Command:
    """A computation or transfer on a stream, with its times.

    Attributes:
        name: Name of the computed or moved tensors.
        is_copy: Whether it only moved data.
        start: When it began [ns, on the clock of `time.perf_counter_ns`]; 0 until known.
        stop: When it ended [ns].
    """

    name: str
    is_copy: bool = False
    start: int = 0
    stop: int = 0


@named("a backend, as init_by_name(name) or device.init_backend() opens one")
class Backend(Freeable):
    """A stream on a device (ggml_backend).

    Work runs in the order of the calls: transfers, events, and graphs that it computes. `*_async` calls may
    return before the work is done; `synchronize` waits for all of it. A lock lets
    one thread at a time plan or compute, as steps share scratch memory (`StreamLock`).

    Attributes:
        device: The device it runs on.
        commands: Commands since `start_timing`; `None` without timing.
        abort_callback: Called between the steps of a graph, if the backend supports it
            (`set_abort_callback` through `BackendReg.get_proc_address`).
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self.commands: list[Command] | None = None
        self.abort_callback: AbortCallback | None = None
        self._stream_lock = StreamLock()
        self._plans: weakref.WeakKeyDictionary[Graph, GraphPlan] = weakref.WeakKeyDictionary()

    # -- properties ----------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """The device's name (ggml_backend_name)."""
        return self.device.name

    @property
    @abstractmethod
    def guid(self) -> str:
        """Identifier of the kind of backend (ggml_backend_guid)."""

    @property
    def streams(self) -> tuple[Backend, ...]:
        """The streams that do its work: itself or, if its device combines several, one on each of these."""
        return (self,)

    @property
    def default_buffer_type(self) -> BufferType:
        """The device's buffer type (ggml_backend_get_default_buffer_type)."""
        return self.device.buffer_type

    @property
    def alignment(self) -> int:
        """Alignment of tensors in its memory [bytes] (ggml_backend_get_alignment)."""
        return self.default_buffer_type.alignment

    @property
    def max_size(self) -> int:
        """Largest buffer of the default type [bytes] (ggml_backend_get_max_size)."""
        return self.default_buffer_type.max_size

    def alloc_buffer(self, nbytes: int) -> Buffer:
        """Reserve memory of the default type (ggml_backend_alloc_buffer); see `BufferType.alloc_buffer`."""
        return self.default_buffer_type.alloc_buffer(nbytes)

    def supports_op(self, op: Tensor) -> bool:
        """Whether its device computes the node (ggml_backend_supports_op)."""
        return self.device.supports_op(op)

    def supports_buft(self, buft: BufferType) -> bool:
        """Whether its ops can use memory of that type (ggml_backend_supports_buft)."""
        return self.device.supports_buft(buft)

    def offload_op(self, op: Tensor) -> bool:
        """Whether computing the node here is worth copying its weights (ggml_backend_offload_op)."""
        return self.device.offload_op(op)

    # -- graphs --------------------------------------------------------------------------------

    def graph_plan_create(self, graph: Graph) -> GraphPlan:
        """Lower the graph once, to be computed many times (ggml_backend_graph_plan_create).

        Raises:
            NotAllocatedError: A tensor of the graph is in no buffer.
            UnsupportedOpError: The device declines a node; the message says why.
            BackendError: A tensor is in memory that the device cannot use, or a result in read-only memory.
            FreedError: A tensor is in a freed buffer.
            GraphError: Called from a function that this backend calls (a custom op or callback).
        """
        return self._stream_lock.run(self, self._plan_part, graph)

    def graph_plan_update(self, plan: GraphPlan, graph: Graph) -> GraphPlan:
        """Return a plan for the graph: the given one if it is still valid, else a new one.

        Raises:
            Error: As `graph_plan_create`.

        Source: graph_plan_update of ggml_backend_i.
        """
        self._check_plan(plan, "graph_plan_update")
        return plan if plan.is_valid_for(graph) else self.graph_plan_create(graph)

    def graph_plan_compute(self, plan: GraphPlan) -> Status:
        """Queue the steps of a plan (ggml_backend_graph_plan_compute).

        If its tensors moved or their parameters changed, its nodes are lowered again first.

        Raises:
            FreedError: A buffer that the plan uses was freed.
            Error: As `graph_plan_create`.
        """
        return self._stream_lock.run(self, self._compute_part, plan)

    def graph_plan_free(self, plan: GraphPlan) -> None:
        """Release a plan (ggml_backend_graph_plan_free)."""
        self._stream_lock.run(self, self._free_part, plan)

    def graph_compute_async(self, graph: Graph) -> Status:
        """Queue the computation of a graph, whose plan is cached (ggml_backend_graph_compute_async).

        Returns:
            `Status.ABORTED` if the abort callback stopped it, else `Status.SUCCESS`.

        Raises:
            Error: As `graph_plan_create`.
        """
        plan = self._plans.get(graph)
        if plan is None or not plan.is_valid_for(graph):
            plan = self._plans[graph] = self.graph_plan_create(graph)
        return self._stream_lock.run(self, self._compute_part, plan)

    def graph_compute(self, graph: Graph) -> Status:
        """Compute a graph and wait for it (ggml_backend_graph_compute)."""
        status = self.graph_compute_async(graph)
        self.synchronize()
        return status

    def graph_optimize(self, graph: Graph) -> None:
        """Reorder or annotate the nodes of a split before allocation (graph_optimize of ggml_backend_i).

        `graph.add_alloc_dep` keeps a tensor allocated until a later node, for nodes that run out of order.
        """

    # -- transfers -----------------------------------------------------------------------------

    def set_tensor_async(
        self,
        tensor: Tensor,
        data: Source,
        offset: int = 0,
        size: int | None = None,
    ) -> None:
        """Queue a write of raw bytes, `size` or all of `data`, into a tensor from byte `offset` on.

        The backend keeps `data` alive; it must not be changed before `synchronize`.

        Raises:
            BoundsError: The bytes end beyond the tensor, or `data` is shorter than `size`.
            NotAllocatedError: The tensor is in no buffer.

        Source: ggml_backend_tensor_set_async.
        """
        call = "set_tensor_async"
        move(call, True, tensor.placed(call), tensor, data, offset, self._set_tensor_async, self, size)

    def get_tensor_async(self, tensor: Tensor, data: npt.NDArray[Any], offset: int = 0) -> None:
        """Queue a read of raw bytes of a tensor, from `offset` on, into the array `data`.

        The backend keeps `data` alive; it has the bytes after `synchronize`.

        Raises:
            ArgumentError: `data` is not a writable contiguous array.
            BoundsError: The bytes end beyond the tensor.
            NotAllocatedError: The tensor is in no buffer.

        Source: ggml_backend_tensor_get_async.
        """
        call = "get_tensor_async"
        move(call, False, tensor.placed(call), tensor, data, offset, self._get_tensor_async, self)

    def set_tensor_2d_async(
        self,
        tensor: Tensor,
        data: Source,
        offset: int,
        size: int,
        n_copies: int,
        stride_tensor: int,
        stride_data: int,
    ) -> None:
        """Queue a write of `n_copies` pieces of `size` bytes to places `stride_tensor` apart in a tensor.

        In `data`, they are `stride_data` apart.

        Source: ggml_backend_tensor_set_2d_async; see `Buffer.set_tensor_2d`.
        """
        pieces = Pieces(offset, size, n_copies, stride_tensor, stride_data)
        call = "set_tensor_2d_async"
        move(call, True, tensor.placed(call), tensor, data, pieces, self._set_tensor_2d_async, self)

    def get_tensor_2d_async(
        self,
        tensor: Tensor,
        data: Bytes,
        offset: int,
        size: int,
        n_copies: int,
        stride_tensor: int,
        stride_data: int,
    ) -> None:
        """Queue a read of `n_copies` pieces of `size` bytes, `stride_tensor` apart in a tensor, into `data`.

        In `data`, they are `stride_data` apart.

        Source: ggml_backend_tensor_get_2d_async; see `Buffer.get_tensor_2d`.
        """
        pieces = Pieces(offset, size, n_copies, stride_tensor, stride_data)
        call = "get_tensor_2d_async"
        move(call, False, tensor.placed(call), tensor, data, pieces, self._get_tensor_2d_async, self)

    def cpy_tensor_async(self, backend_src: Backend, src: Tensor, dst: Tensor) -> bool:
        """Queue a copy from another backend to this one, ordered after the work queued on both.

        Later work on either side waits for it.

        Returns:
            Whether it was queued; if not, `tensor_copy_async` synchronizes and copies.

        Source: cpy_tensor_async of ggml_backend_i.
        """
        dst.placed("cpy_tensor_async").check_writable("cpy_tensor_async", dst)
        if observers:
            action = Action("cpy_tensor_async", self, [reading(src), writing(dst)], source=backend_src)
            return action.run(self._cpy_tensor_async, backend_src, src, dst)
        return self._cpy_tensor_async(backend_src, src, dst)

    def copy_on_stream(self, src: Tensor, dst: Tensor) -> bool:
        """Queue a copy that waits only for this backend's queued work.

        The caller orders it with other backends' work by events: a scheduler lets a device send a result
        to an unused copy while the receiver still computes.

        Returns:
            Whether it was queued; if not, use `tensor_copy_async`.

        Source: the copy that ggml's backends queue on the source's stream in cpy_tensor_async.
        """
        dst.placed("copy_on_stream").check_writable("copy_on_stream", dst)
        if observers:
            action = Action("copy_on_stream", self, [reading(src), writing(dst)])
            return action.run(self._copy_on_stream, src, dst)
        return self._copy_on_stream(src, dst)

    def synchronize(self) -> None:
        """Block until all queued work is done (ggml_backend_synchronize).

        Raises:
            BackendError: Queued work failed.
        """
        if observers:
            return Action("synchronize", self).run(self._synchronize)
        return self._synchronize()

    def is_aborted(self) -> bool:
        """Ask the abort callback, if there is one, whether the computation should stop.

        Raises:
            ArgumentError: It returned neither true nor false.
        """
        callback = self.abort_callback
        return callback is not None and answer("the abort callback", callback())

    # -- events --------------------------------------------------------------------------------

    def event_record(self, event: Event) -> None:
        """Record the event after the work queued so far (ggml_backend_event_record).

        Raises:
            BackendError: The event belongs to another device.
            FreedError: The event was freed.
        """
        event.check_alive("event_record")
        if event.device is not self.device:
            raise BackendError(
                f"event_record: the event belongs to {event.device.name}, the backend runs on "
                f"{self.device.name}; create the event with the backend's own device"
            )
        event.is_recorded = True
        if observers:
            return Action("event_record", self, event=event).run(self._event_record, event)
        return self._event_record(event)

    def event_wait(self, event: Event) -> None:
        """Make later work wait for an event, also of another device (ggml_backend_event_wait).

        Raises:
            FreedError: The event was freed.
        """
        event.check_alive("event_wait")
        if observers:
            return Action("event_wait", self, event=event).run(self._event_wait, event)
        return self._event_wait(event)

    # -- timing --------------------------------------------------------------------------------

    def start_timing(self) -> bool:
        """Wait for the queued work, and start to time each piece of work.

        Returns:
            Whether the backend supports timing.

        Raises:
            GraphError: Timing is already on.
        """
        if self.commands is not None:
            raise GraphError(
                f"start_timing: this {self.name} backend is being timed already; call stop_timing"
            )
        self.synchronize()
        self.commands = []
        if not self._start_timing():
            self.commands = None
        return self.commands is not None

    def stop_timing(self) -> list[Command]:
        """Wait for the queued work; return the commands since `start_timing`, in order.

        Raises:
            GraphError: Timing is off.
        """
        commands = self.commands
        if commands is None:
            raise GraphError(f"stop_timing: this {self.name} backend is not being timed; call start_timing")
        self.synchronize()
        self._stop_timing()
        self.commands = None
        return commands

    # -- life ----------------------------------------------------------------------------------

    def free(self) -> None:
        """Finish the queued work and release the stream (ggml_backend_free).

        Raises:
            FreedError: It was freed before.
            BackendError: Queued work failed; the stream is released all the same.
            GraphError: Called from a function that this backend calls (a custom op or callback).
        """
        self._stream_lock.run(self, Backend._close, self)

    def __repr__(self) -> str:
        return f"<Backend {self.name}>"

    # -- checks --------------------------------------------------------------------------------

    @property
    def _title(self) -> str:
        return f"this {self.name} backend"

    def _check_plan(self, plan: GraphPlan, call: str) -> None:
        if self.is_freed:
            self.check_alive(call)
        if plan.backend is not self:
            raise GraphError(f"{call}: the plan belongs to another {plan.backend.name} backend; use that one")
        if plan.is_freed:
            raise FreedError(f"{call}: the plan was freed; create a new one")

    def _check_graph(self, graph: Graph) -> None:
        buffers = graph.memory()
        if any(b is None or b.is_freed or b.is_read_only or not self.supports_buft(b.buft) for b in buffers):
            self._find_fault(graph)
        if not graph.owner_checks:  # else the owner asked `declines` when it assigned the node
            for node in graph.nodes:
                why = self.device.declines(node)
                if why is not None:
                    raise UnsupportedOpError(
                        f"{self.name} cannot run {node.describe()}: {why}", reasons={self.name: why}
                    )

    def _find_fault(self, graph: Graph) -> None:
        """Raise an error about the first tensor that cannot be computed or written, if any."""
        usable: set[Buffer | None] = set()
        for node in graph.nodes:
            for tensor in (node, *node.src):
                if tensor is None or tensor.buffer in usable:
                    continue
                if tensor.buffer is None:
                    raise NotAllocatedError(
                        f"{self.name} cannot compute {node.describe()}: {tensor.describe()} is in no buffer; "
                        "place it with alloc_ctx_tensors, a GraphAllocator or Scheduler.alloc_graph first"
                    )
                if tensor.buffer.is_freed:
                    raise FreedError(
                        f"{self.name} cannot compute {node.describe()}: {tensor.describe()} is in a freed "
                        "buffer; allocate it again"
                    )
                if not self.supports_buft(tensor.buffer.buft):
                    raise BackendError(
                        f"{self.name} cannot compute {node.describe()}: {tensor.describe()} is in "
                        f"{tensor.buffer.name} memory, which it cannot use; let a Scheduler copy it"
                    )
                usable.add(tensor.buffer)
            if node.buffer is not None and node.buffer.is_read_only and node.op not in NO_OPS:
                node.buffer.check_writable("graph_compute", node)

    # -- work under the stream's lock ----------------------------------------------------------
    # Nested plans of the same stream run under the same lock.

    def _plan_part(self, graph: Graph) -> GraphPlan:
        self.check_alive("graph_plan_create")
        self._check_graph(graph)
        with Action("graph_plan_create", self):
            try:
                with log.timed("plans", log.DEBUG, "%s: plan of %d nodes", self.name, len(graph)):
                    return self._plan(graph)
            except MemoryError as error:
                raise self._no_scratch("graph_plan_create", error) from None
            except OSError as error:  # reading a kernel's or library's file
                raise BackendError(f"{self.name} cannot plan the graph: {error}") from error

    def _compute_part(self, plan: GraphPlan) -> Status:
        self._check_plan(plan, "graph_plan_compute")
        try:
            if observers:  # before planning again, whose checks say less than a sanitizer's
                return Action("graph_plan_compute", self, plan=plan).run(self._compute_current, plan)
            return self._compute_current(plan)
        except MemoryError as error:
            raise self._no_scratch("graph_plan_compute", error) from None

    def _no_scratch(self, call: str, error: MemoryError) -> MemoryError:
        """Return the error for a failed allocation of scratch memory."""
        if isinstance(error, AllocationError):
            return error
        free, total = self.device.memory
        return AllocationError(
            f"{call} on {self.name}: no room for scratch memory ({free:,} of {total:,} bytes free): {error}; "
            "use a smaller batch, or split the graph over more devices",
            free=free,
            total=total,
        )

    def _compute_current(self, plan: GraphPlan) -> Status:
        """Compute the current plan, lowered again if its tensors have changed."""
        current = plan.current
        if not current.is_up_to_date():
            graph = plan.graph()
            self._check_graph(graph)
            outdated, current = current, self._plan(graph)
            plan.replace(current)
            self._plan_free(outdated)
        return self._compute(current)

    def _free_part(self, plan: GraphPlan) -> None:
        self._check_plan(plan, "graph_plan_free")
        plan.is_freed = True
        self._plan_free(plan.current)

    def _close(self) -> None:
        self.check_alive("free")
        try:
            with suppress(DeviceLostError):  # its queue is lost, too
                self.synchronize()
        finally:
            self.is_freed = True
            self._plans.clear()
            self._free()

    # -- hooks ---------------------------------------------------------------------------------

    @abstractmethod
    def _plan(self, graph: Graph) -> GraphPlan:
        """Lower a checked graph."""

    @abstractmethod
    def _compute(self, plan: GraphPlan) -> Status:
        """Queue the plan's steps."""

    def _plan_free(self, plan: GraphPlan) -> None:
        """Release a plan."""

    def _free(self) -> None:
        """Release the stream."""

    def _set_tensor_async(self, tensor: Tensor, data: Bytes, offset: int) -> None:
        self._synchronize()  # a synchronous write must not overtake work that is queued
        tensor.placed("set_tensor_async")._set_tensor(tensor, data, offset)

    def _get_tensor_async(self, tensor: Tensor, out: Bytes, offset: int) -> None:
        self._synchronize()
        tensor.placed("get_tensor_async")._get_tensor(tensor, out, offset)

    def _set_tensor_2d_async(self, tensor: Tensor, data: Bytes, pieces: Pieces) -> None:
        for piece, start in pieces.cut(data):
            self._set_tensor_async(tensor, piece, start)

    def _get_tensor_2d_async(self, tensor: Tensor, out: Bytes, pieces: Pieces) -> None:
        for piece, start in pieces.cut(out):
            self._get_tensor_async(tensor, piece, start)

    def _cpy_tensor_async(self, backend_src: Backend, src: Tensor, dst: Tensor) -> bool:
        return False

    def _copy_on_stream(self, src: Tensor, dst: Tensor) -> bool:
        return False

    def _synchronize(self) -> None:
        """Wait for queued work."""

    def _event_record(self, event: Event) -> None:
        raise BackendError(f"{self.name} has no events; call synchronize")

    def _event_wait(self, event: Event) -> None:
        event.synchronize()

    def _start_timing(self) -> bool:
        """Start to append a `Command` to `commands` for each piece of work; `False` if not supported."""
        return False

    def _stop_timing(self) -> None:
        """Set the missing times of `commands`; the stream is idle."""
