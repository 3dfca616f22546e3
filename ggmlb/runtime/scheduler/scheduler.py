"""Scheduler: computes one graph on several backends (ggml_backend_sched)."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from ggmlb.core.arguments import named
from ggmlb.core.enums import Status
from ggmlb.core.errors import ArgumentError, DeviceLostError, Error, GraphError
from ggmlb.core.graph import Graph
from ggmlb.core.lifetime import Freeable
from ggmlb.core.tensor import Tensor
from ggmlb.interface import Backend, Buffer, BufferType
from ggmlb.interface.memory_table import MemoryReport
from ggmlb.interface.registry import cpu_buffer_type
from ggmlb.runtime.alloc import GraphAllocator
from ggmlb.runtime.compile.assign import AssignRules
from ggmlb.runtime.scheduler.cache import ExecutableCache
from ggmlb.runtime.scheduler.execute import CopyCallback, EvalCallback, Executor
from ggmlb.runtime.scheduler.report import NodePlacement, memory_report, placements, record_fallbacks, render
from ggmlb.system import log

if TYPE_CHECKING:
    from ggmlb.inspect.trace import Trace
    from ggmlb.runtime.compile.executable import Executable
    from ggmlb.runtime.compile.split import Split


class Views(Protocol):
    """Protocol of a scheduler's views, implemented by `ggmlb.inspect.notebook`."""

    def to_dot(self, scheduler: Scheduler, graph: Graph) -> str:
        """Return the split graph in Graphviz's DOT language, for `Scheduler.to_dot`."""

    def to_svg(self, scheduler: Scheduler, graph: Graph) -> str:
        """Return an SVG drawing of the split graph, for `Scheduler.to_svg`."""

    def trace(self, scheduler: Scheduler, path: str | Path | None) -> Trace:
        """Return a recorder of all devices, written to `path` if given, for `Scheduler.trace`."""

    def start_sanitizer(self, owner: object) -> Callable[[], object]:
        """Start a sanitizer for the lifetime of its owner; return a function that stops it."""


@named("a Scheduler, as Scheduler([backend]) makes one")
class Scheduler(Freeable):
    """Splits a graph over backends, allocates it, and computes it with copies between devices.

    A graph is assigned, split, allocated and planned once. Computing it again does none of that, nor does
    a new graph equal to it (`IndexedGraph.match`): same ops, shapes, parameters and weights, as each step
    of a decoding program builds one. The last eight topologies are kept, with their weights.

    A context manager, which frees its memory on exit. Only one thread at a time may use a scheduler.

    Args:
        backends: In order of priority, highest first. The last (usually the CPU) runs the remaining ops,
            and holds the graph's inputs: in host memory, even if it is a GPU, which copies them.
        bufts: The buffer type each computes in; by default each backend's default.
        graph_size: The number of nodes expected; kept for ggml's signature, graphs may be larger.
        parallel: Pipelining: tensors sent between devices cycle through `n_copies` copies, so that the
            sender can continue while the receiver still reads. Streams of one device get separate memory.
            Use `graph_compute_async`, and `get_tensor_async` for results.
        op_offload: Assign an op with weights in host memory to a device for which copying them is
            worthwhile (`Device.offload_op`).
        n_copies: Number of copies when `parallel`, 1 or more.
        strict: An op that cannot run on the device of its request (`set_tensor_backend`) or of its weights
            is an error instead of a warning.
        sanitize: Raise a `SanitizerError` on any unordered read or write during the scheduler's lifetime
            (`ggmlb.sanitize`).
        keep_graphs: Every graph stays allocated and planned as long as it exists; all share memory of the
            size that the largest needs. Only the data of the last one is valid: after another graph was
            computed, call `alloc_graph` (which is then cheap) and set all inputs. A kept graph must not be
            changed.

    Raises:
        ArgumentError: No backends, a memory its backend cannot use, or no copies.

    Source: ggml_backend_sched_new.
    """

    views: ClassVar[Views]

    def __init__(
        self,
        backends: Sequence[Backend],
        bufts: Sequence[BufferType] | None = None,
        graph_size: int = 2048,
        parallel: bool = False,
        op_offload: bool = True,
        *,
        n_copies: int = 4,
        strict: bool = False,
        sanitize: bool = False,
        keep_graphs: bool = False,
    ) -> None:
        if not backends:
            raise ArgumentError("a Scheduler needs at least one backend")
        if n_copies < 1:
            raise ArgumentError(f"n_copies is {n_copies}; give 1 or more")
        if bufts is not None and len(bufts) != len(backends):
            raise ArgumentError(f"{len(backends)} backends, but {len(bufts)} buffer types; give one for each")
        self._backends = tuple(backends)
        self._bufts = tuple(bufts) if bufts is not None else tuple(b.default_buffer_type for b in backends)
        for backend, buft in zip(self._backends, self._bufts, strict=True):
            if not backend.supports_buft(buft):
                raise ArgumentError(
                    f"{backend.name} cannot use {buft.name} memory; give it another buffer type"
                )
        self._user: weakref.WeakKeyDictionary[Tensor, int] = weakref.WeakKeyDictionary()
        self._callback: EvalCallback | None = None
        self._copy_callback: CopyCallback | None = None
        self._options: dict[str, Any] = {
            "parallel": parallel,
            "op_offload": op_offload,
            "n_copies": n_copies,
            "strict": strict,
            "sanitize": sanitize,
            "keep_graphs": keep_graphs,
        }
        self._n_copies = n_copies if parallel else 1
        separate = self._n_copies > 1
        self._executor = Executor(self._backends, self._n_copies)
        self._allocator = GraphAllocator(
            (*self._bufts, self._host_memory()),
            keep_inputs=True,
            separate=separate,
            before_free=self._executor.synchronize,
        )
        rules = AssignRules(self._backends, self._bufts, op_offload, strict, separate)
        pairs = itertools.combinations(range(self.n_backends), 2)
        # Streams order the work of different graphs, unless backends use each other's memory or write ahead.
        self._waits_between = self._n_copies > 1 or any(rules.shares(a, b) for a, b in pairs)
        self._cache = ExecutableCache(rules, self._n_copies, keep_graphs)
        self._graph: Graph | None = None
        self._executable: Executable | None = None
        self._in_memory: Executable | None = None  # the one whose data is in compute memory
        self._stop_sanitizer = self.views.start_sanitizer(self) if sanitize else None

    # -- facts ---------------------------------------------------------------------------------

    @property
    def backends(self) -> tuple[Backend, ...]:
        """The backends, highest priority first."""
        return self._backends

    @property
    def n_backends(self) -> int:
        """Number of backends (ggml_backend_sched_get_n_backends)."""
        return len(self._backends)

    def backend(self, i: int) -> Backend:
        """Return the i-th backend (ggml_backend_sched_get_backend).

        Raises:
            ArgumentError: The index is out of range.
        """
        if not 0 <= i < self.n_backends:
            raise ArgumentError(f"Scheduler.backend({i}): there are {self.n_backends} backends; count from 0")
        return self._backends[i]

    @property
    def n_copies(self) -> int:
        """Number of copies that each tensor sent between devices cycles through; 1 without option `parallel`.

        Source: ggml_backend_sched_get_n_copies.
        """
        return self._n_copies

    def buffer_type(self, backend: Backend) -> BufferType:
        """Return the buffer type that a backend computes in (ggml_backend_sched_get_buffer_type)."""
        return self._bufts[self._index(backend)]

    def buffer_size(self, backend: Backend) -> int:
        """Return the bytes reserved for a backend's tensors (ggml_backend_sched_get_buffer_size)."""
        return self._allocator.get_buffer_size(self._index(backend))

    @property
    def buffers(self) -> list[Buffer]:
        """The buffers reserved for all backends' tensors, and for inputs in host memory."""
        return self._allocator.buffers

    @property
    def graph(self) -> Graph | None:
        """The last graph that was split; `None` before the first, and after `reset`."""
        return self._graph if self._executable else None

    @property
    def splits(self) -> tuple[Split, ...]:
        """The splits of the last graph, in order of execution."""
        return tuple(self._executable.splits) if self._executable else ()

    @property
    def n_splits(self) -> int:
        """Number of splits of the last graph (ggml_backend_sched_get_n_splits)."""
        return len(self._executable.splits) if self._executable else 0

    @property
    def placement(self) -> list[NodePlacement]:
        """Device, cause, copied operands and other devices' refusals, for each node of the last graph."""
        if self._graph is None or self._executable is None:
            return []
        return placements(self._graph, self._executable)

    def memory_report(self) -> MemoryReport:
        """Return the memory of the last graph by device and contents, planned and allocated.

        Weights and other tensors that were placed before are counted by their whole buffers. The memory of
        results (`compute`) is as large as that of the largest graph that was allocated.

        Raises:
            GraphError: No graph was split.
        """
        self._need_graph("memory_report")
        return memory_report(self._need_executable(), self._allocator, self._backends)

    # -- drawings ------------------------------------------------------------------------------

    def trace(self, path: str | Path | None = None) -> Trace:
        """Context manager that traces all devices, and writes Perfetto or Chrome JSON to `path` if given.

        Example: `with sched.trace("run.json"): sched.graph_compute(graph)`

        Args:
            path: JSON file to write at the end; without it, use the trace's `events`.
        """
        return self.views.trace(self, path)

    def to_dot(self) -> str:
        """Return the split graph in Graphviz's DOT language: a colour for each device, a box for each split.

        Raises:
            GraphError: No graph was split yet.
        """
        return self.views.to_dot(self, self._need_graph("to_dot"))

    def to_svg(self) -> str:
        """Return an SVG drawing of the split graph, from top to bottom, without Graphviz.

        Each device has a lane and a colour, each split a box; curves between lanes are copies. Long splits
        are shortened. A node's cause and operands show when the pointer rests on it.

        Raises:
            GraphError: No graph was split yet.
        """
        return self.views.to_svg(self, self._need_graph("to_svg"))

    def __repr__(self) -> str:
        names = ", ".join(b.name for b in self._backends)
        return f"<Scheduler on {names}: {self.n_splits} splits>"

    def __str__(self) -> str:
        """The splits with inputs and sizes, and each node's cause of placement."""
        if self._graph is None or self._executable is None:
            return f"{self!r}, no graph yet"
        return render(self._graph, self._executable)

    # -- requests --------------------------------------------------------------------------------

    def set_tensor_backend(self, node: Tensor, backend: Backend | None) -> None:
        """Request a backend for a node; `None` withdraws the request.

        Requests stay valid for all later graphs with the node, also after `reset` and `reserve`. A request
        for a view has no effect: it is where its source is, so request the source's backend. A node that
        writes into another tensor runs where that tensor is; if that is not as requested, there is a warning.

        Raises:
            ArgumentError: The node is not a tensor, or the backend is not one of the scheduler's.

        Source: ggml_backend_sched_set_tensor_backend.
        """
        if backend is None:
            self._user.pop(node, None)
        else:
            self._user[node] = self._index(backend)
        self._graph = None if self._graph is not None and node in self._graph else self._graph
        self._cache.drop(node)

    def get_tensor_backend(self, node: Tensor) -> Backend | None:
        """Return the assigned backend of a tensor, else the requested one, else `None`.

        Source: ggml_backend_sched_get_tensor_backend.
        """
        found = None if self._executable is None else self._executable.backend_id(node)
        if found is None:
            found = self._user.get(node)
        return None if found is None else self._backends[found]

    def set_eval_callback(self, callback: EvalCallback | None) -> None:
        """Set a callback for nodes as they are computed; `None` removes it.

        For each node (views included), in order of execution, `callback(node, True)` returns whether it
        wants the data. If so, the graph is computed up to the node and `callback(node, False)` is called;
        `False` stops. It may read and write tensors, but neither compute nor allocate with this
        scheduler.

        Raises:
            ArgumentError: It is not callable.

        Source: ggml_backend_sched_set_eval_callback.
        """
        self._callback = callback

    def set_copy_callback(self, callback: CopyCallback | None) -> None:
        """Set a callback for copies of weights from host memory, which may copy less; `None` removes it.

        Before a split runs, after its other inputs were copied, `callback(backend, weight, copy, graph)` is
        called for each weight in host memory that it reads: `graph` is the split's, on `backend`, and reads
        `copy`. `True` means that the callback wrote all that the graph reads, by `backend`'s asynchronous
        transfers or after waiting for it; otherwise the scheduler copies the weight.

        Raises:
            ArgumentError: It is not callable.

        Source: ggml_backend_sched_set_copy_callback.
        """
        self._copy_callback = callback

    # -- planning ------------------------------------------------------------------------------

    def split_graph(self, graph: Graph) -> None:
        """Assign and split a graph without allocating it (ggml_backend_sched_split_graph).

        Raises:
            UnsupportedOpError: No backend runs a node; the message has each one's reason.
            FreedError: A tensor is in a freed buffer.
        """
        self._check_idle("split_graph")
        self._forget()
        executable = self._cache.find(graph, self._user)
        if executable is None:
            with log.timed("scheduler", log.DEBUG, "%d nodes split", len(graph.nodes)):
                executable, is_new = self._cache.compile(graph, self._user)
            if is_new:
                record_fallbacks(graph, executable, self._backends)
        self._executable, self._graph = executable, graph

    def reserve(self, measure_graph: Graph) -> None:
        """Allocate the memory for a graph in advance.

        Raises:
            AllocationError: A device lacks room.
            UnsupportedOpError: No backend runs a node.

        Source: ggml_backend_sched_reserve.
        """
        self.synchronize()
        self.split_graph(measure_graph)
        executable = self._need_executable()
        try:
            self._allocator.reserve_indexed(executable.copied, executable.memories)
        except BaseException:
            self._cache.clear()
            raise
        finally:
            self.reset()

    def reserve_size(self, measure_graph: Graph) -> list[int]:
        """Return the memory that a graph needs on each backend [bytes], without allocating.

        Raises:
            UnsupportedOpError: No backend runs a node.

        Source: ggml_backend_sched_reserve_size.
        """
        self.split_graph(measure_graph)
        executable = self._need_executable()
        try:
            sizes = self._allocator.indexed_size(executable.copied, executable.memories)
        finally:
            self.reset()
        return list(sizes[: self.n_backends])

    def alloc_graph(self, graph: Graph) -> None:
        """Split a graph and place its tensors; afterwards its inputs can be set, and it can be computed.

        Tensors of the graph allocated before lose their place, and their data; read results before, or
        queue the reading with `Backend.get_tensor_async`. It waits for queued work only where memory must
        grow, or several backends share memory.

        Raises:
            AllocationError: A device lacks room; nothing is placed, and the scheduler stays usable.
            UnsupportedOpError: No backend runs a node.
            FreedError: A tensor is in a freed buffer.

        Source: ggml_backend_sched_alloc_graph.
        """
        self._check_idle("alloc_graph")
        executable = self._cache.kept(graph)
        if executable is None:
            self.split_graph(graph)
            executable = self._need_executable()
        if executable is not self._in_memory or executable.stamp != self._allocator.n_reallocs:
            if self._waits_between or not self._allocator.keeps_places():
                self.synchronize()  # queued work may still use the memory
            self._in_memory = None
            try:
                executable.allocate(self._allocator)
            except BaseException:
                self._forget()
                self._cache.clear()
                raise
            self._in_memory = executable
        if not executable.is_placed:
            executable.place(self._allocator)
        self._executable, self._graph = executable, graph
        self._cache.keep(graph, executable)

    # -- computing -----------------------------------------------------------------------------

    def graph_compute(self, graph: Graph) -> Status:
        """Compute a graph, allocated first if needed, and wait for it (ggml_backend_sched_graph_compute).

        Returns:
            `Status.ABORTED` if an abort or eval callback stopped it, else `Status.SUCCESS`.

        Raises:
            Error: As `graph_compute_async`.
        """
        status = self.graph_compute_async(graph)
        self.synchronize()
        return status

    def graph_compute_async(self, graph: Graph) -> Status:
        """Queue a graph, allocated if needed; an earlier graph then loses its placement.

        Computing the same graph again does not plan again. Inputs may be overwritten when this returns.
        It waits for the device only if an input is in device memory because the user placed or requested
        it there, or because nodes write it.

        Raises:
            GraphError: The graph was allocated here, but its tensors were moved since; or a callback of this
                scheduler's computation asks for another.
            AllocationError, UnsupportedOpError: As `alloc_graph`.

        Source: ggml_backend_sched_graph_compute_async.
        """
        self._check_idle("graph_compute")
        executable = self._executable
        if (
            graph is not self._graph
            or executable is None
            or not executable.is_placed
            or executable is not self._in_memory
            or len(graph.nodes) != executable.n_nodes
        ):
            self.alloc_graph(graph)
            executable = self._need_executable()
        executable.check()
        return self._executor.compute(executable, self._callback, self._copy_callback)

    def synchronize(self) -> None:
        """Wait for the work queued on all backends (ggml_backend_sched_synchronize).

        Raises:
            BackendError: Queued work failed.
        """
        self._executor.synchronize()

    def reset(self) -> None:
        """Discard the graph, its assignment and its splits; reserved memory stays.

        Its tensors keep their data until the next `alloc_graph`. Requests of `set_tensor_backend` stay
        (unlike in ggml) until withdrawn by `None`. Source: ggml_backend_sched_reset.
        """
        self._graph = None
        self._executable = None

    def free(self) -> None:
        """Finish queued work and free the memory; the backends stay (ggml_backend_sched_free).

        Raises:
            FreedError: It was freed before.
            BackendError: Queued work failed; the memory is freed all the same.
        """
        self._check_idle("free")
        failure: Error | None = None
        for backend in self._backends:
            try:
                if not backend.is_freed:
                    backend.synchronize()
            except DeviceLostError:
                pass  # nothing is queued there any more
            except Error as error:
                failure = error
        self._forget()
        self._cache.clear()
        self._in_memory = None
        self.is_freed = True
        self._executor.free()
        self._allocator.free()
        if self._stop_sanitizer is not None:
            self._stop_sanitizer()
        if failure is not None:
            raise failure

    def without(self, *devices: str) -> Scheduler:
        """Free this scheduler; return one without the given `devices`, with the same options and requests.

        For devices that are lost. Free the buffers of the weights that were there, place the weights again
        (`alloc_ctx_tensors`), and set them; the same graphs are then computed as before.

        Args:
            *devices: Names, as in `DeviceLostError.devices`; the lost machine may have more devices than
                this scheduler.

        Raises:
            ArgumentError: None of them is a device of the scheduler, or no other is left.
            FreedError: It was freed before.
        """
        kept = [i for i, backend in enumerate(self._backends) if backend.name not in devices]
        if not 0 < len(kept) < self.n_backends:
            names = ", ".join(b.name for b in self._backends)
            raise ArgumentError(
                f"without({', '.join(map(repr, devices))}): the scheduler has {names}; "
                + ("name some of them" if kept else "none would be left")
            )
        self.free()
        bufts = [self._bufts[i] for i in kept]
        new = Scheduler([self._backends[i] for i in kept], bufts, **self._options)
        new._user.update((node, kept.index(i)) for node, i in self._user.items() if i in kept)
        new._callback, new._copy_callback = self._callback, self._copy_callback
        return new

    # -- inner ---------------------------------------------------------------------------------

    def _forget(self) -> None:
        """Remove the placement of the last graph's tensors, which would read reused memory."""
        last = self._in_memory
        if last is not None and not self._cache.keep_graphs:
            last.release()
        self._executable = None
        self._graph = None

    def _check_idle(self, call: str) -> None:
        """Raise if the scheduler is called from a callback, or another thread, while it computes."""
        if self._executor.is_busy:
            raise GraphError(
                f"{call}: this Scheduler is in the middle of a computation; use another Scheduler in "
                "callbacks and in other threads"
            )

    def _host_memory(self) -> BufferType:
        """Return the host memory of inputs for a last backend that is an asynchronous device."""
        last = self._bufts[-1]
        if last.is_host or not self._backends[-1].device.caps.async_:
            return last  # inputs can stay there
        return self._backends[-1].device.host_buffer_type or cpu_buffer_type()

    def _need_graph(self, call: str) -> Graph:
        if self.graph is None:
            raise GraphError(f"{call}: there is no graph yet; call split_graph or alloc_graph first")
        return self.graph

    def _need_executable(self) -> Executable:
        assert self._executable is not None
        return self._executable

    def _index(self, backend: Backend) -> int:
        for i, known in enumerate(self._backends):
            if known is backend:
                return i
        names = ", ".join(b.name for b in self._backends)
        raise ArgumentError(f"{backend!r} is not one of this scheduler's backends: {names}")
