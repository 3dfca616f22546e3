"""Backend: a stream on a device, which computes graphs."""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING

from ggmlb.core.enums import NO_OPS, Status
from ggmlb.core.errors import (
    AllocationError,
    BackendError,
    FreedError,
    GraphError,
    NotAllocatedError,
    UnsupportedOpError,
)
from ggmlb.core.graph import Graph
from ggmlb.core.tensor import Tensor
from ggmlb.interface.observe import QUIET, Action, observers
from ggmlb.interface.queue import Queue
from ggmlb.interface.turns import Turns

if TYPE_CHECKING:
    from ggmlb.interface.buffer import Buffer
    from ggmlb.interface.buffer_type import BufferType
    from ggmlb.interface.device import Device
    from ggmlb.interface.plan import GraphPlan

AbortCallback = Callable[[], bool]
"""Called between steps; `True` stops the computation with `Status.ABORTED`."""


class Backend(Queue):
    """A stream on a device (ggml_backend).

    It computes graphs; its transfers, events and times are those of a `Queue`. Threads that plan or compute
    on it take turns, as steps share its scratch memory; functions that it calls must not do so (`Turns`).

    Attributes:
        abort_callback: Called between the steps of a graph, if the backend supports it
            (`set_abort_callback` through `BackendReg.get_proc_address`).
    """

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        self.abort_callback: AbortCallback | None = None
        self._turns = Turns()
        self._plans: weakref.WeakKeyDictionary[Graph, GraphPlan] = weakref.WeakKeyDictionary()

    # -- facts ---------------------------------------------------------------------------------

    @property
    @abstractmethod
    def guid(self) -> str:
        """Identifier of the kind of backend (ggml_backend_guid)."""

    @property
    def streams(self) -> tuple[Backend, ...]:
        """The streams that do its work: itself, or one for each device of a meta device."""
        return (self,)

    @property
    def default_buffer_type(self) -> BufferType:
        """The memory it computes in (ggml_backend_get_default_buffer_type)."""
        return self.device.buffer_type

    @property
    def alignment(self) -> int:
        """Alignment of tensors in its memory [bytes] (ggml_backend_get_alignment)."""
        return self.default_buffer_type.alignment

    @property
    def max_size(self) -> int:
        """Largest buffer in its memory [bytes] (ggml_backend_get_max_size)."""
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
            BackendError: A tensor lies in memory that the device cannot use, or a result in read-only memory.
            FreedError: A tensor lies in a freed buffer.
            GraphError: Called from a function that this backend calls (a custom op or callback).
        """
        return self._turns.run(self, self._plan_part, graph)

    def graph_plan_update(self, plan: GraphPlan, graph: Graph) -> GraphPlan:
        """Return a plan for a graph: the old one if still valid for it, else a new one.

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
        return self._turns.run(self, self._compute_part, plan)

    def graph_plan_free(self, plan: GraphPlan) -> None:
        """Release what the plan holds (ggml_backend_graph_plan_free)."""
        self._turns.run(self, self._free_part, plan)

    def graph_compute_async(self, graph: Graph) -> Status:
        """Queue the computation of a graph; the first one plans it (ggml_backend_graph_compute_async).

        Returns:
            `Status.ABORTED` if the abort callback stopped it, else `Status.SUCCESS`.

        Raises:
            Error: As `graph_plan_create`.
        """
        self.check_alive("graph_compute_async")
        plan = self._plans.get(graph)
        if plan is None or not plan.is_valid_for(graph):
            plan = self._plans[graph] = self.graph_plan_create(graph)
        return self.graph_plan_compute(plan)

    def graph_compute(self, graph: Graph) -> Status:
        """Compute a graph and wait for it (ggml_backend_graph_compute)."""
        status = self.graph_compute_async(graph)
        self.synchronize()
        return status

    def graph_optimize(self, graph: Graph) -> None:
        """Reorder or mark the nodes of a split before it is allocated (graph_optimize of ggml_backend_i)."""

    # -- life ----------------------------------------------------------------------------------

    def free(self) -> None:
        """Finish the queued work and release the stream (ggml_backend_free).

        Raises:
            FreedError: It was freed before.
            GraphError: Called from a function that this backend calls (a custom op or callback).
        """
        self._turns.run(self, Backend._close, self)

    def __repr__(self) -> str:
        return f"<Backend {self.name}{' (freed)' if self.is_freed else ''}>"

    # -- checks --------------------------------------------------------------------------------

    def _check_plan(self, plan: GraphPlan, call: str) -> None:
        self.check_alive(call)
        if plan.backend is not self:
            raise GraphError(f"{call}: the plan belongs to another backend, of {plan.backend.name}")
        if plan.is_freed:
            raise FreedError(f"{call}: the plan was freed")

    def _check_graph(self, graph: Graph) -> None:
        buffers = {t.buffer for node in graph.nodes for t in (node, *node.src) if t is not None}
        if any(b is None or b.is_freed or b.is_read_only or not self.supports_buft(b.buft) for b in buffers):
            self._find_fault(graph)
        if not graph.owner_checks:  # else it was asked when the node was given to this backend
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
                        f"{self.name} cannot compute {node.describe()}: {tensor.describe()} lies in a freed "
                        "buffer; place it again"
                    )
                if not self.supports_buft(tensor.buffer.buft):
                    raise BackendError(
                        f"{self.name} cannot compute {node.describe()}: {tensor.describe()} lies in "
                        f"{tensor.buffer.name} memory, which it cannot use; let a Scheduler copy it"
                    )
                usable.add(tensor.buffer)
            if node.buffer is not None and node.buffer.is_read_only and node.op not in NO_OPS:
                node.buffer.check_writable("graph_compute", node)

    # -- turns ---------------------------------------------------------------------------------
    # Work that a thread does in its turn; a plan that has plans of its own stream inside it does it there.

    def _plan_part(self, graph: Graph) -> GraphPlan:
        self.check_alive("graph_plan_create")
        self._check_graph(graph)
        with Action("graph_plan_create", self) if observers else QUIET:
            try:
                return self._plan(graph)
            except MemoryError as error:
                raise self._no_scratch("graph_plan_create", error) from None
            except OSError as error:  # of a kernel's file or a library's
                raise BackendError(f"{self.name} cannot plan the graph: {error}") from error

    def _compute_part(self, plan: GraphPlan) -> Status:
        self._check_plan(plan, "graph_plan_compute")
        try:
            if not observers:
                return self._compute(self._current(plan))
            with Action(
                "graph_plan_compute", self, plan=plan
            ):  # observers first: a sanitizer has more to say
                return self._compute(self._current(plan))
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

    def _current(self, plan: GraphPlan) -> GraphPlan:
        """Return the current plan, lowered again if its tensors have changed."""
        current = plan.current
        if not current.is_up_to_date():
            graph = plan.graph()
            self._check_graph(graph)
            outdated, current = current, self._plan(graph)
            plan.replace(current)
            self._plan_free(outdated)
        return current

    def _free_part(self, plan: GraphPlan) -> None:
        self._check_plan(plan, "graph_plan_free")
        plan.is_freed = True
        self._plan_free(plan.current)

    def _close(self) -> None:
        self.check_alive("free")
        self.synchronize()
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
