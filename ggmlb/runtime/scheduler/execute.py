"""Execution of splits: input copies, then the plan, ordered so that no copy races.

Work on one backend runs in queue order. A split's inputs from other memory are copied

- from host memory: as bytes that do not change any more (a weight, or a snapshot), queued on the device
  that reads them, without a wait: small ones together, by one snapshot and one transfer; weights, where the
  device can, on a stream of their own, while the device computes the split before (`Uploads`);
- from a device, with several copies: queued on the source, which waits on the device until the reader has
  finished with the same copy; the reader waits for the copy;
- otherwise by `tensor_copy_async`, which is ordered after earlier and before later work on both sides.

A backend that works in another's memory waits for the earlier work of that backend.
"""

from __future__ import annotations

import ctypes
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from ggmlb.core.arguments import alias, answer
from ggmlb.core.enums import DeviceType, Status, TensorFlag
from ggmlb.core.errors import BackendError, Error
from ggmlb.core.graph import Graph
from ggmlb.core.tensor import Tensor
from ggmlb.interface import Backend, Event, tensor_copy_async
from ggmlb.interface.observe import observers

if TYPE_CHECKING:
    from ggmlb.interface import Buffer, BufferType
    from ggmlb.interface.data import Bytes
    from ggmlb.runtime.compile.executable import Executable
    from ggmlb.runtime.compile.read import IndexedGraph
    from ggmlb.runtime.compile.split import Split, SplitInput

EvalCallback = Callable[[Tensor, bool], bool]
"""`callback(node, ask)`: with `ask`, it returns whether it wants a node's data (views
included); without, the data is ready, and `False` stops the computation
(ggml_backend_sched_eval_callback)."""
alias("EvalCallback", "Callable")

CopyCallback = Callable[[Backend, Tensor, Tensor, Graph], bool]
"""`callback(backend, weight, copy, graph)` before a weight in host memory is copied for a split's `graph`:
`True` if it wrote what the graph reads of the copy itself (ggml_backend_sched_copy_callback)."""
alias("CopyCallback", "Callable")


class Executor:
    """Queues executables on a scheduler's backends.

    Attributes:
        n_copies: Number of copies of tensors sent between devices.
        copy: Index of the copy that the next computation uses.
        is_busy: Whether a computation is being queued; a callback must not start another.
    """

    def __init__(self, backends: Sequence[Backend], n_copies: int) -> None:
        self._backends = backends
        self.n_copies = n_copies
        self.copy = 0
        self.is_busy = False
        self._is_async = [b.device.caps.async_ for b in backends]
        # Events: the end of a backend's queue, for others to wait for; and, by copy, its last read of copies.
        self._marks: list[Event | None] = [
            b.device.event_new() if b.device.caps.events else None for b in backends
        ]
        self._has_read: list[list[Event | None]] = [
            [b.device.event_new() if b.device.caps.events and n_copies > 1 else None for _ in range(n_copies)]
            for b in backends
        ]
        self._index = {id(b): i for i, b in enumerate(backends)}
        self._staging = [Staging(b) for b in backends]
        self._uploads: dict[int, Uploads] = {}

    def compute(
        self, executable: Executable, callback: EvalCallback | None, copies: CopyCallback | None = None
    ) -> Status:
        """Queue all splits, waiting only where order needs it; `callback` may ask to see nodes.

        Args:
            executable: The splits.
            callback: Sees nodes that it asks for.
            copies: May copy weights from host memory itself.

        Returns:
            `Status.ABORTED` as soon as an abort callback or the eval callback asks for it.
        """
        status = None
        self.is_busy = True
        try:
            status = self._queue(executable, callback, copies)
        finally:
            self.is_busy = False
            if status is not Status.SUCCESS:  # no event follows the queued work, which may still run
                for backend in (*self._backends, *[uploads.stream for uploads in self._uploads.values()]):
                    with suppress(Error):
                        backend.synchronize()
        return status

    def _queue(
        self, executable: Executable, callback: EvalCallback | None, copies: CopyCallback | None
    ) -> Status:
        c = self.copy
        experts: ExpertCopies | None = None
        waits: dict[int, None] = {}
        last_sent: dict[int, None] = {}
        for index, split in enumerate(executable.splits):
            b = split.backend_id
            for other in split.after:
                self._order(other, b)
            if split.inputs:
                experts = experts or ExpertCopies(executable, c)
                own = None if copies is None else partial(_copied, copies, executable.graphs(c)[index], c)
                self._copy_in(split, c, experts, waits, last_sent, own)
            ahead = split.next_weights if copies is None else ()  # else the callback is asked before each
            if ahead:
                self._uploads_of(b).begin()
            if callback is None:
                status = split.backend.graph_plan_compute(executable.plan(index, c))
            else:
                status = _compute_watched(split, executable.graph, executable.graphs(c)[index], callback)
            if status is not Status.SUCCESS:
                return status
            if ahead:
                self._uploads[b].queue(ahead)
            if split.reads_user_input and self._is_async[b]:
                waits[b] = None
        for b in last_sent:
            event = self._has_read[b][c]
            if event is not None:
                self._backends[b].event_record(event)
        for b in waits:  # these may still read inputs, which the user may overwrite
            self._backends[b].synchronize()
        self.copy = (c + 1) % self.n_copies
        return Status.SUCCESS

    def synchronize(self) -> None:
        """Wait for all backends that queue work; the next computation uses copy 0 of the inputs."""
        for backend, is_async in zip(self._backends, self._is_async, strict=True):
            if is_async or observers:
                backend.synchronize()
        self.copy = 0

    def free(self) -> None:
        """Free the events that order the splits, and the streams of uploads."""
        for uploads in self._uploads.values():
            uploads.free()
        for event in (*self._marks, *(e for events in self._has_read for e in events)):
            if event is not None and not event.is_freed:
                event.free()

    # -- copies --------------------------------------------------------------------------------

    def _copy_in(
        self,
        split: Split,
        c: int,
        experts: ExpertCopies,
        waits: dict[int, None],
        last_sent: dict[int, None],
        own: Callable[[SplitInput, Split], bool] | None,
    ) -> None:
        b, backend = split.backend_id, split.backend
        senders: dict[int, None] = {}
        if own is None and any([item.is_prefetched for item in split.inputs]):
            self._uploads[b].wait()
        if split.block is not None:
            self._upload(split.joined, split.block, split)
        inputs = split.inputs if own is None else sorted(split.inputs, key=_is_host_weight)  # these last
        for item in inputs:
            if (item.is_prefetched and own is None) or item.copy.view_src is not None:
                continue
            owner, src = self._index[id(item.backend)], item.tensor
            buffer = src.buffer
            assert buffer is not None
            if own is not None and own(item, split):
                continue
            if experts.copy(item, split):
                continue
            if buffer.is_host and self._is_async[b]:
                self._upload([item], item.copy, split)
            elif len(item.copies) > 1:
                if self._send(item, b, owner, c, is_first=owner not in senders):
                    senders[owner] = None
                    last_sent[b] = None
                else:
                    tensor_copy_async(item.backend, backend, src, item.copies[c])
            else:
                tensor_copy_async(item.backend, backend, src, item.copy)
                if src.flags & TensorFlag.INPUT:
                    waits[b] = None
        for owner in senders:
            self._order(owner, b)

    def _uploads_of(self, b: int) -> Uploads:
        """Return the object that uploads weights to a backend; it opens a stream of its own at first use."""
        if b not in self._uploads:
            self._uploads[b] = Uploads(self._backends[b])
        return self._uploads[b]

    def _upload(self, items: Sequence[SplitInput], to: Tensor, split: Split) -> None:
        """Queue a copy of tensors in host memory (a constant, or snapshots) to the memory of their copies."""
        sources: list[tuple[Tensor, int]] = []
        for item in items:
            owner = self._index[id(item.backend)]
            if self._is_async[owner] and not item.is_staged:  # it may still compute the source
                item.backend.synchronize()
            sources.append((item.tensor, item.copy.view_offs))
        src = items[0].tensor
        if items[0].is_constant and src.buffer is not None:
            data = src.buffer.base[src.offset : src.offset + src.nbytes]
        else:
            data = self._staging[split.backend_id].snapshot(sources, to.nbytes)
        split.backend.set_tensor_async(to, data)

    def _send(self, item: SplitInput, b: int, owner: int, c: int, is_first: bool) -> bool:
        """Queue a copy on the device that has the tensor, after the reader's last use of the copy."""
        has_read = self._has_read[b][c]
        if has_read is None or self._marks[owner] is None:
            return False
        if is_first and has_read.is_recorded:
            item.backend.event_wait(has_read)
        return item.backend.copy_on_stream(item.tensor, item.copies[c])

    def _order(self, first: int, then: int) -> None:
        """Order later work of one backend after the earlier work of another."""
        mark = self._marks[first]
        if mark is not None and self._marks[then] is not None:
            self._backends[first].event_record(mark)
            self._backends[then].event_wait(mark)
        else:
            self._backends[first].synchronize()


def _is_host_weight(item: SplitInput) -> bool:
    buffer = item.tensor.buffer
    return item.is_constant and buffer is not None and buffer.is_host


def _copied(callback: CopyCallback, graph: Graph, c: int, item: SplitInput, split: Split) -> bool:
    """Whether the callback copied an input; it is asked for weights in host memory."""
    if not _is_host_weight(item):
        return False
    copy = item.copies[c % len(item.copies)]
    return answer("the copy callback", callback(split.backend, item.tensor, copy, graph))


def _compute_watched(split: Split, user: IndexedGraph, graph: Graph, callback: EvalCallback) -> Status:
    """Compute up to each node that the callback wants, and call it.

    Views of other devices' tensors come first: their data may be overwritten before the split ends.
    """
    backend = split.backend
    done = ready = 0
    for i in (*split.view_numbers, *split.ordered):
        ready += user.computes[i]
        shown = user.tensors[i]
        if not answer("the eval callback", callback(shown, True)):
            continue
        if done < ready:
            # The part ends with a computed node, so that fusion omits neither it nor results read later.
            status = backend.graph_compute(graph.view(done, ready))
            done = ready
            if status is not Status.SUCCESS:
                return status
        if not answer("the eval callback", callback(shown, False)):
            return Status.ABORTED
    return backend.graph_compute(graph.view(done, len(graph))) if done < len(graph) else Status.SUCCESS


class Uploads:
    """Weights of a device's next split, copied by a second stream while the device computes.

    Their memory is none that the running split uses, but splits before it may have used it: copies begin
    after these (`begin`), and the split that reads the weights begins after the copies (`wait`).

    Attributes:
        stream: The stream that copies.
    """

    def __init__(self, reader: Backend) -> None:
        self._reader = reader
        self.stream = reader.device.init_backend()
        self._may_begin, self._done = (reader.device.event_new() for _ in range(2))

    def begin(self) -> None:
        """Order later copies after the reader's work queued so far."""
        self._reader.event_record(self._may_begin)
        self.stream.event_wait(self._may_begin)

    def queue(self, weights: Sequence[SplitInput]) -> None:
        """Queue copies of weights from host memory."""
        for item in weights:
            src, buffer = item.tensor, item.tensor.buffer
            assert buffer is not None
            self.stream.set_tensor_async(item.copy, buffer.base[src.offset : src.offset + src.nbytes])
        self.stream.event_record(self._done)

    def wait(self) -> None:
        """Order later work of the reader after the copies."""
        self._reader.event_wait(self._done)

    def free(self) -> None:
        """Free the stream and its events."""
        for each in (self._may_begin, self._done, self.stream):
            if not each.is_freed:
                each.free()


MOST_LOCKED: Final = 256 << 20
"""Limit of page-locked memory for a stream [bytes]; further snapshots use pageable memory."""

LEAST_BLOCK: Final = 4096
"""Bytes of the smallest block."""


class Staging:
    """Snapshots of host memory for uploads, in pinned memory.

    The source of a queued upload must not change, but the backend that computed it may overwrite it at once.
    So the scheduler copies it first, to pinned memory, from which the transfer needs no further copy and no
    thread. A block is reused when no array refers to it. Devices that compute in host memory get NumPy
    arrays instead.
    """

    def __init__(self, backend: Backend) -> None:
        device = backend.device
        is_apart = device.type is DeviceType.GPU and device.caps.host_buffer
        self._memory: BufferType | None = device.host_buffer_type if is_apart else None
        self._free: defaultdict[int, deque[Buffer]] = defaultdict(deque)
        self._nbytes = 0

    def snapshot(self, sources: Sequence[tuple[Tensor, int]], nbytes: int) -> Bytes:
        """Copy tensors in host memory to a pinned block; its memory is reused once the result is deleted.

        Args:
            sources: The tensors, each with its start in the block [bytes].
            nbytes: Size of the block; bytes between the tensors are undefined.
        """
        array = self._block(nbytes)
        for src, start in sources:
            buffer, stop = src.buffer, start + src.nbytes
            assert buffer is not None
            if observers:
                buffer.get_tensor(src, out=array[start:stop])
            else:
                array[start:stop] = buffer.base[src.offset : src.offset + src.nbytes]
        return array

    def _block(self, nbytes: int) -> Bytes:
        size = max(LEAST_BLOCK, 1 << (nbytes - 1).bit_length())
        block = self._take(size)
        if block is None:
            return np.empty(nbytes, np.uint8)
        # A ctypes array as base: views of a NumPy array refer to its base, not to the array.
        memory: Any = (ctypes.c_ubyte * nbytes).from_address(block.base.ctypes.data)
        weakref.finalize(memory, self._free[size].append, block).atexit = False
        return np.frombuffer(memory, np.uint8)

    def _take(self, size: int) -> Buffer | None:
        if self._memory is None:
            return None
        try:
            return self._free[size].popleft()
        except IndexError:
            pass
        if self._nbytes + size > MOST_LOCKED:
            return None
        try:
            block = self._memory.alloc_buffer(size)
        except Error:
            return None
        self._nbytes += size
        return block


class ExpertCopies:
    """Copies only the experts of a weight that the current tokens select, for one computation.

    Ids shared by several weights are read once.

    Args:
        executable: The executable.
        c: Index of the copies of inputs that it reads.

    Source: the copies of ggml_backend_sched_compute_splits for GGML_OP_MUL_MAT_ID.
    """

    def __init__(self, executable: Executable, c: int) -> None:
        self._splits = executable.splits
        self._graph = executable.graph
        self._c = c
        self._used: dict[int, npt.NDArray[np.intp]] = {}

    def copy(self, item: SplitInput, split: Split) -> bool:
        """Queue copies of the experts of weight `item` that `split` selects; adjacent ones in one copy.

        The other experts of the copy are undefined, because no id refers to them.

        Returns:
            False if the weight has no experts, or one is not contiguous: nothing was queued.

        Raises:
            BackendError: An id is not that of an expert.
        """
        src = item.tensor
        n_experts, size = src.ne[2], src.nb[2]
        if not item.has_experts or src.ne[3] != 1 or size * n_experts != src.nbytes or src.buffer is None:
            return False
        (reader,) = item.readers
        ids = self._graph.reads(reader)[2]
        used = self._used.get(ids)
        if used is None:
            used = self._used[ids] = self._find_used(ids, n_experts, reader, split)
        data = src.buffer.base[src.offset : src.offset + src.nbytes]
        for first, last in _runs(used):
            start, end = first * size, (last + 1) * size
            split.backend.set_tensor_async(item.copy, data[start:end], start)
        return True

    def _find_used(self, ids: int, n_experts: int, reader: int, split: Split) -> npt.NDArray[np.intp]:
        """Return the numbers of the selected experts, in order; wait until the ids are computed."""
        tensors = self._graph.tensors
        where, backend, is_staged = tensors[ids], split.backend, False
        for other in self._splits:
            for item in other.inputs:
                if item.number != ids or other.backend is not split.backend:
                    continue
                if item.is_staged or other is split:  # it may not have been copied yet
                    backend, is_staged = item.backend, item.is_staged
                else:
                    where = item.copies[self._c if len(item.copies) > 1 else 0]
        if not is_staged:
            backend.synchronize()
        used: npt.NDArray[np.intp] = np.unique(where.to_numpy())
        if used.size and not 0 <= used[0] <= used[-1] < n_experts:
            bad = used[-1] if used[0] >= 0 else used[0]
            raise BackendError(
                f"{tensors[reader].describe()}: {tensors[ids].describe()} holds {bad}, but there are "
                f"{n_experts} experts; ids must be 0 to {n_experts - 1}"
            )
        return used


def _runs(numbers: npt.NDArray[np.intp]) -> Iterator[tuple[int, int]]:
    """Yield first and last of each run of consecutive numbers."""
    if numbers.size:
        breaks = np.flatnonzero(np.diff(numbers) > 1)
        firsts = (numbers[0], *numbers[breaks + 1])
        lasts = (*numbers[breaks], numbers[-1])
        for first, last in zip(firsts, lasts, strict=True):
            yield int(first), int(last)
