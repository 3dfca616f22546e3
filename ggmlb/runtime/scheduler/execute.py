"""Computing the splits: copies in, then the plan, in an order that no copy can race.

Work on one backend runs in the order in which it was queued. What a split reads from elsewhere comes to it

- from host memory, where inputs lie: as bytes that nobody changes any more (a weight, or a snapshot), queued
  on the device that reads them, so that nobody waits;
- from a device, with several copies: queued on the source, which waits (on the device, not here) until the
  reader has done with what it read from the same copy; the reader waits for the copy;
- else by `tensor_copy_async`, which is ordered after what was queued before on both sides, and before what
  is queued later.

A backend that works in another's memory waits for what that one was given before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from ggmlb.core.enums import Status, TensorFlag
from ggmlb.core.errors import Error
from ggmlb.core.graph import Graph
from ggmlb.core.tensor import Tensor
from ggmlb.interface import Backend, Event, tensor_copy_async
from ggmlb.runtime.scheduler.experts import ExpertCopies
from ggmlb.runtime.scheduler.staging import Staging

if TYPE_CHECKING:
    from ggmlb.runtime.indexed_graph import IndexedGraph
    from ggmlb.runtime.scheduler.program import Program
    from ggmlb.runtime.scheduler.split import Split, SplitInput

EvalCallback = Callable[[Tensor, bool], bool]
"""`callback(node, ask)`: with `ask` it says whether it wants the data of a node, views included; without,
the data is there, and `False` stops the computation (ggml_backend_sched_eval_callback)."""


class Executor:
    """Queues programs on a scheduler's backends.

    Attributes:
        n_copies: How many copies there are of what devices send each other.
        copy: Which of them the next computation uses.
        is_busy: Whether a computation is being queued: a callback must not begin another.
    """

    def __init__(self, backends: Sequence[Backend], n_copies: int) -> None:
        self._backends = backends
        self.n_copies = n_copies
        self.copy = 0
        self.is_busy = False
        self._is_async = [b.device.caps.async_ for b in backends]
        # Where a backend's queue stands: for others to wait for, and (by copy) when it has read the copies.
        self._marks: list[Event | None] = [
            b.device.event_new() if b.device.caps.events else None for b in backends
        ]
        self._has_read: list[list[Event | None]] = [
            [b.device.event_new() if b.device.caps.events and n_copies > 1 else None for _ in range(n_copies)]
            for b in backends
        ]
        self._index = {id(b): i for i, b in enumerate(backends)}
        self._staging = [Staging(b) for b in backends]

    def compute(self, program: Program, callback: EvalCallback | None) -> Status:
        """Queue all splits; what they need to be right is ordered, nothing more is waited for.

        Returns:
            `Status.ABORTED` as soon as an abort callback or the eval callback asks for it.
        """
        status = None
        self.is_busy = True
        try:
            status = self._queue(program, callback)
        finally:
            self.is_busy = False
            if status is not Status.SUCCESS:  # what was queued has no marks behind it, and may still run
                for backend in self._backends:
                    with suppress(Error):
                        backend.synchronize()
        return status

    def _queue(self, program: Program, callback: EvalCallback | None) -> Status:
        c = self.copy
        experts = ExpertCopies(program.splits, c)
        waits: dict[int, None] = {}
        last_sent: dict[int, None] = {}
        for index, split in enumerate(program.splits):
            b = split.backend_id
            for other in split.after:
                self._order(other, b)
            if split.inputs:
                self._copy_in(split, c, experts, waits, last_sent)
            if callback is None:
                status = split.backend.graph_plan_compute(program.plan(index, c))
            else:
                status = _compute_watched(split, program.signature, program.variant(c)[index], callback)
            if status is not Status.SUCCESS:
                return status
            if split.reads_user_input and self._is_async[b]:
                waits[b] = None
        for b in last_sent:
            event = self._has_read[b][c]
            if event is not None:
                self._backends[b].event_record(event)
        for b in waits:  # the user may overwrite what these still read
            self._backends[b].synchronize()
        self.copy = (c + 1) % self.n_copies
        return Status.SUCCESS

    def synchronize(self) -> None:
        """Wait for all backends; the first copies are used next, so that one at a time needs no others."""
        for backend in self._backends:
            backend.synchronize()
        self.copy = 0

    def free(self) -> None:
        """Release the events."""
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
    ) -> None:
        b, backend = split.backend_id, split.backend
        senders: dict[int, None] = {}
        for item in split.inputs:
            owner = self._index[id(item.backend)]
            buffer = item.src.buffer
            assert buffer is not None
            if item.experts is not None and experts.copy(item, split):
                continue
            if buffer.is_host and self._is_async[b]:
                self._upload(item, split, owner)
            elif len(item.copies) > 1:
                if self._send(item, b, owner, c, is_first=owner not in senders):
                    senders[owner] = None
                    last_sent[b] = None
                else:
                    tensor_copy_async(item.backend, backend, item.src, item.copies[c])
            else:
                tensor_copy_async(item.backend, backend, item.src, item.copy)
                if item.tensor.flags & TensorFlag.INPUT:
                    waits[b] = None
        for owner in senders:
            self._order(owner, b)

    def _upload(self, item: SplitInput, split: Split, owner: int) -> None:
        """Queue a copy out of host memory, of bytes that stay as they are."""
        src, buffer = item.src, item.src.buffer
        assert buffer is not None
        if self._is_async[owner] and not item.is_staged:  # it may compute what is read here
            item.backend.synchronize()
        if item.is_constant:
            data = buffer.base[src.offset : src.offset + src.nbytes]
        else:
            data = self._staging[split.backend_id].snapshot(src)
        split.backend.set_tensor_async(item.copy, data)

    def _send(self, item: SplitInput, b: int, owner: int, c: int, is_first: bool) -> bool:
        """Queue a copy on the device that has the tensor, after the reader's last use of the copy."""
        has_read = self._has_read[b][c]
        if has_read is None or self._marks[owner] is None:
            return False
        if is_first and has_read.is_recorded:
            item.backend.event_wait(has_read)
        return item.backend.copy_on_stream(item.src, item.copies[c])

    def _order(self, first: int, then: int) -> None:
        """Let later work of one backend wait for the earlier work of another."""
        mark = self._marks[first]
        if mark is not None and self._marks[then] is not None:
            self._backends[first].event_record(mark)
            self._backends[then].event_wait(mark)
        else:
            self._backends[first].synchronize()


def _compute_watched(split: Split, user: IndexedGraph, graph: Graph, callback: EvalCallback) -> Status:
    """Compute up to each node that the callback wants, and show it.

    Views of other devices' tensors come first: what they show is there, and may be gone when the split ends.
    """
    backend = split.backend
    done = ready = 0
    for i in (*split.view_numbers, *split.ordered):
        ready += user.computes[i]
        shown = user.tensors[i]
        if not callback(shown, True):
            continue
        if done < ready:
            # A computed node is the part's last: no fused kernel leaves it out, nor what later parts read.
            status = backend.graph_compute(graph.view(done, ready))
            done = ready
            if status is not Status.SUCCESS:
                return status
        if not callback(shown, False):
            return Status.ABORTED
    return backend.graph_compute(graph.view(done, len(graph))) if done < len(graph) else Status.SUCCESS
