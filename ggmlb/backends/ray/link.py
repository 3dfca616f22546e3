"""Link: the driver's end of a connection to a node.

Commands are batched into one actor call, sent when something waits for them or a graph is computed. Calls are
asynchronous; the node runs them in order. So a split costs one call with its inputs, its plan's handle, and
the reads that followed this plan the last time (read-ahead): those reads then need no further call.

    write, write, compute, (read)  ──── one call ────▶  Node.run
    read                           ◀─── its result ───

Data of `APART` bytes or more are separate objects in Ray's object store, so that the driver does not wait for
data that go from node to node. Smaller data are part of the message.
"""

from __future__ import annotations

import itertools
import pickle
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple

import ray
from ray import exceptions

from ggmlb.backends.ray.files import SharedFiles
from ggmlb.backends.ray.node import APART, Message
from ggmlb.backends.ray.wire import Bytes, Records, packed, unpacked
from ggmlb.core.errors import BackendError, DeviceLostError, Error, one_line, readable_size
from ggmlb.system.progress import Task

CHUNK: Final = 1 << 24
"""Size of a batch's data above which it is sent, and of the pieces of larger transfers [bytes]."""

MAX_CALLS: Final = 16
"""Largest number of calls in progress; the next waits for the oldest."""

MAX_NBYTES: Final = 4 * CHUNK
"""Largest size of data of calls in progress [bytes], to limit use of the object store."""

MAX_AHEAD: Final = 1 << 24
"""Largest read-ahead [bytes]."""

LOOK_S: Final = 2.0
"""Interval at which the node of an unfinished call is pinged [s]."""

ABORT_S: Final = 0.05
"""Interval at which an abort callback is asked during a computation [s]."""

ANSWER_S: Final = 6.0
"""Time limit for the answer to a ping [s]."""


_numbers: Final = itertools.count(1)


class MemoryRange(NamedTuple):
    """A range of memory on a node (machine).

    Attributes:
        place: A buffer's handle; or a tensor's record, if the buffer repacks tensors.
        offset: Offset in the buffer, or in the tensor [bytes].
        nbytes: Size of the range [bytes].
    """

    place: int | Records
    offset: int
    nbytes: int


class Planned:
    """A graph plan on a node, and the reads expected after its computation.

    Attributes:
        handle: The plan's handle.
        was_read: Ranges read directly after its last computation, and whether as separate objects.
    """

    def __init__(self, handle: int) -> None:
        self.handle = handle
        self.was_read: dict[tuple[MemoryRange, bool], None] = {}


class Call:
    """An actor call in progress.

    Attributes:
        refs: Ray objects: results with small data, then each separate array.
        reads: Its reads.
        sources: Links to the nodes whose data it waits for.
        nbytes: Size of the data sent and received [bytes].
        first: The commands' results and the small data; `None` until the call is known to be done.
    """

    def __init__(
        self, link: Link, refs: Sequence[Any], reads: Sequence[Read], sources: Sequence[Link], nbytes: int
    ) -> None:
        self.link = link
        self.refs = refs
        self.reads = reads
        self.sources = sources
        self.nbytes = nbytes
        self.first: tuple[list[Any], Bytes] | None = None

    def wait(self) -> None:
        """Wait for this call and all calls before it.

        Raises:
            BackendError: One of them failed.
        """
        self.link.settle(self)


class Read:
    """A read of remote memory that is part of a call.

    Attributes:
        call: The call; `None` until it is sent.
    """

    def __init__(self, nbytes: int, is_apart: bool, at: int) -> None:
        self.nbytes = nbytes
        self.is_apart = is_apart
        self.call: Call | None = None
        self._at = at
        self._outs: list[Bytes] = []

    @property
    def ref(self) -> Any:
        """Reference to the Ray object with the read's data; only if `is_apart` (a separate object)."""
        assert self.call is not None
        return self.call.refs[1 + self._at]

    def into(self, out: Bytes) -> None:
        """Register the array `out` to fill when the call is done; fill it now if the call is done."""
        self._outs.append(out)
        if self.call is not None and self.call.first is not None:
            self.deliver()

    def deliver(self) -> None:
        """Fill the registered arrays; the call must be done."""
        if not self._outs:
            return
        assert self.call is not None
        assert self.call.first is not None
        if self.is_apart:
            data = self.call.link.fetch(self.ref)
        else:
            data = self.call.first[1][self._at : self._at + self.nbytes]
        for out in self._outs:
            out[:] = data
        self._outs.clear()


class Link:
    """The driver's end of a connection to a node (machine).

    Attributes:
        title: Name of the node in messages.
        devices: Names of its devices.
        n_calls: Number of calls so far.
        n_sent: Bytes sent so far, without data from node to node.
        sizes: Size of each remote buffer, by handle [bytes].
        files: Files that the node reads itself.
    """

    _by_actor: Final[weakref.WeakValueDictionary[str, Link]] = weakref.WeakValueDictionary()

    def __init__(self, actor: Any, title: str, files: SharedFiles) -> None:
        self._actor = actor
        self.files = files
        self.title = title
        self.devices: tuple[str, ...] = ()
        self.n_calls = 0
        self.n_sent = 0
        self.sizes: dict[int, int] = {}
        self._lock = threading.RLock()
        self._lost: str | None = None
        self._failure: Error | None = None
        self._calls: deque[Call] = deque()
        self._in_flight = 0
        self._taking: Task | None = None
        self._garbage: deque[list[Any]] = deque()
        self._run = {1: actor.run}
        self._ahead: dict[tuple[MemoryRange, bool], Read] = {}
        self._computed: Planned | None = None
        self._begin()
        Link._by_actor[actor._actor_id.hex()] = self

    def _begin(self) -> None:
        """Start an empty batch."""
        self._commands: list[Sequence[Any]] = []
        self._small: list[Bytes] = []
        self._apart: list[Any] = []
        self._waits: list[Any] = []
        self._sources: list[Link] = []
        self._reads: list[Read] = []
        self._n_small_read = self._n_apart_read = 0
        self._nbytes = 0

    # -- collecting ----------------------------------------------------------------------------

    def queue(self, *command: Any) -> None:
        """Add a command (name and arguments) to the batch for the next actor call.

        Raises:
            DeviceLostError: The node is lost.
        """
        with self._lock:
            self._check()
            self._ahead.clear()
            self._computed = None
            self._commands.append(command)

    def release(self, *command: Any) -> None:
        """Add a command that frees a remote resource to the next batch; safe in any thread."""
        if self._lost is None:
            self._garbage.append(list(command))

    def write(self, span: MemoryRange, data: Bytes) -> None:
        """Add a write to the batch; `data` must not change until it is sent."""
        with self._lock:
            is_apart = data.nbytes >= APART
            self.queue("write", *span, is_apart)
            (self._apart if is_apart else self._small).append(data)
            self._nbytes += data.nbytes
            if self._nbytes >= CHUNK:
                self.flush()

    def write_from(self, span: MemoryRange, source: Read) -> None:
        """Add a write of data that another node reads (`source`); they go directly from node to node."""
        with self._lock:
            self.queue("write", *span, True)
            self._take(source)

    def add_from(self, span: MemoryRange, before: Sequence[Read], after: Sequence[Read]) -> None:
        """Add a command that sums reads `before`, the float32 range itself and reads `after` into the range.

        The reads are of other nodes, and summed in this order.
        """
        with self._lock:
            self.queue("add", *span, len(before), len(after))
            for source in (*before, *after):
                self._take(source)

    def _take(self, source: Read) -> None:
        assert source.call is not None
        self._apart.append(source.ref)
        self._sources.append(source.call.link)

    def after(self, call: Call) -> None:
        """Make the next batch wait until a call to another node is done."""
        with self._lock:
            self._check()
            self._waits.append(call.refs[0])
            self._sources.append(call.link)

    def read(self, span: MemoryRange, out: Bytes) -> None:
        """Fill `out` from remote memory: with data read ahead after a computation, else by a new read."""
        with self._lock:
            self._check()
            is_apart = span.nbytes >= APART
            (self._was_ahead(span, is_apart) or self._collect(span, is_apart)).into(out)

    def read_apart(self, span: MemoryRange) -> Read:
        """Read remote memory, or take data read ahead; they stay in Ray's object store, for another node."""
        with self._lock:
            self._check()
            read = self._was_ahead(span, True)
            if read is None:
                read = self._collect(span, True)
                self.flush()
            return read

    def _was_ahead(self, span: MemoryRange, is_apart: bool) -> Read | None:
        if self._computed is None:
            return None
        self._computed.was_read[span, is_apart] = None
        return self._ahead.get((span, is_apart))

    def _collect(self, span: MemoryRange, is_apart: bool) -> Read:
        read = Read(span.nbytes, is_apart, self._n_apart_read if is_apart else self._n_small_read)
        if is_apart:
            self._n_apart_read += 1
        else:
            self._n_small_read += span.nbytes
        self._commands.append(("read", *span, is_apart))
        self._reads.append(read)
        return read

    def show_progress(self, progress: str) -> None:
        """Show the progress of an upload, if it takes long."""
        with self._lock:
            if self._taking is None:
                self._taking = Task(f"{self.title}: taking weights", None)
            self._taking.step(progress)

    def end_progress(self) -> None:
        """End the upload's progress line with its duration; called when the node computes a graph."""
        with self._lock:
            if self._taking is not None:
                self._taking.end()
                self._taking = None

    # -- sending -------------------------------------------------------------------------------

    def compute(self, plan: Planned, number: int | None = None) -> Call:
        """Send the batch, a computation of the plan, and the reads that followed its previous computation.

        Args:
            plan: The plan.
            number: Number of the computation, for `abort`; `None` if nothing stops it.
        """
        with self._lock:
            self.end_progress()
            self.queue("compute", plan.handle, number)
            wanted, plan.was_read = plan.was_read, {}
            self._ahead = {
                (span, is_apart): self._collect(span, is_apart)
                for span, is_apart in wanted
                if span.place in self.sizes and span.nbytes <= MAX_AHEAD  # the buffer may have been freed
            }
            self._computed = plan
            call = self.flush()
            assert call is not None
            return call

    def compute_unless(self, is_aborted: Callable[[], bool], plan: Planned) -> bool:
        """Compute the plan and wait for it; ask `is_aborted` every `ABORT_S`, and stop it once that is true.

        Returns:
            Whether it was stopped.

        Raises:
            Error: It failed, or earlier work did; or the error of `is_aborted`, after the computation ended.
        """
        number = next(_numbers)
        call = self.compute(plan, number)
        try:
            while not ray.wait([call.refs[0]], timeout=ABORT_S)[0]:
                self._look_at(call)
                if is_aborted():
                    self._actor.abort.remote(number)
                    break
        except BaseException:
            self._actor.abort.remote(number)
            with suppress(Error):
                call.wait()
            raise
        call.wait()
        assert call.first is not None
        results, _ = call.first
        return bool(results)

    def ask(self, *command: Any) -> Any:
        """Run one command on the node synchronously; return its result.

        Raises:
            Error: It failed, or earlier work did.
        """
        with self._lock:
            self.settle()  # raises errors of earlier work before this command is sent
            self.queue(*command)
            call = self.flush()
            assert call is not None
            call.wait()
            assert call.first is not None
            results, _ = call.first
            return results[-1] if results else None

    def flush(self) -> Call | None:
        """Send the batch of commands; return the last actor call in progress, or `None`."""
        with self._lock:
            if self._lost is not None:
                self._begin()
                self._garbage.clear()
            while self._garbage:
                self._commands.append(self._garbage.popleft())
            if self._commands or self._waits:
                self._send(self._commands)
            return self._calls[-1] if self._calls else None

    def mark(self) -> Call | None:
        """Send the batch; return the call that completes all work so far, or `None` if all is done.

        Raises:
            DeviceLostError: The node is lost.
        """
        self._check()
        return self.flush()

    def _send(self, commands: Message) -> None:
        if not ray.is_initialized():
            raise self._lose("Ray was shut down")
        message = pickle.dumps(commands)
        n_returns = 1 + self._n_apart_read
        if n_returns not in self._run:
            self._run[n_returns] = self._actor.run.options(num_returns=n_returns)
        nbytes = self._nbytes + sum(read.nbytes for read in self._reads)
        while self._calls and (len(self._calls) >= MAX_CALLS or self._in_flight + nbytes > MAX_NBYTES):
            self.settle(self._calls[0])
        refs = self._run[n_returns].remote(packed(message, self._small), *self._apart, *self._waits)
        call = Call(self, [refs] if n_returns == 1 else refs, self._reads, self._sources, nbytes)
        self._in_flight += nbytes
        for read in self._reads:
            read.call = call
        self._calls.append(call)
        self.n_calls += 1
        self.n_sent += len(message) + self._nbytes
        self._begin()

    # -- waiting -------------------------------------------------------------------------------

    def settle(self, last: Call | None = None) -> None:
        """Send the batch and wait for all calls; with `last`, wait only for calls up to that one.

        Raises:
            DeviceLostError: The node is lost.
            Error: The first failure since the last `settle`.
        """
        with self._lock:
            if last is None:
                self.flush()
            while self._calls and (last is None or last.first is None):
                self._finish(self._calls.popleft())
            failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        if last is not None and last.first is None:
            self._check()
            raise BackendError(f"{self.title}: this work failed, as an earlier error said; run it again")

    def _finish(self, call: Call) -> None:
        """Wait for a call, and store its failure for `settle`."""
        self._in_flight -= call.nbytes
        try:
            call.first = unpacked(self._get(call))
            for read in call.reads:
                read.deliver()
        except Error as failure:
            self._failure = self._failure or failure
            self._ahead.clear()  # its read-ahead has no data
            for ref in call.refs[1:]:  # otherwise Ray logs unretrieved errors
                with suppress(exceptions.RayError, TimeoutError):
                    ray.get(ref, timeout=0)

    def fetch(self, ref: Any) -> Any:
        """Return the value of a Ray object that belongs to a call that is done.

        Raises:
            DeviceLostError: The node that holds it is lost.
        """
        try:
            return ray.get(ref, timeout=LOOK_S + ANSWER_S)
        except (exceptions.RayError, TimeoutError) as error:
            raise self._lose(one_line(error)) from None

    def _get(self, call: Call) -> Any:
        while self._lost is None:
            try:
                return ray.get(call.refs[0], timeout=LOOK_S)
            except exceptions.GetTimeoutError:
                self._look_at(call)
            except exceptions.RayTaskError as error:
                raise self._error_of(error.cause if isinstance(error.cause, Exception) else error) from None
            except exceptions.RayError as error:
                raise self._error_of(error) from None
        raise self._lost_error()

    def _look_at(self, call: Call) -> None:
        """Ping the nodes that an unfinished call waits for."""
        for link in {self, *call.sources}:
            link._look()

    def _look(self) -> None:
        """Ping the node.

        Raises:
            DeviceLostError: It does not answer in `ANSWER_S`.
        """
        answer = self._actor.ping.remote()
        try:
            ray.get(answer, timeout=ANSWER_S)
        except exceptions.GetTimeoutError:
            ray.kill(self._actor)
            raise self._lose(f"no answer for {ANSWER_S:.0f} s") from None
        except exceptions.RayError as error:
            raise self._lose(one_line(error)) from None

    # -- faults --------------------------------------------------------------------------------

    def _check(self) -> None:
        if self._lost is not None:
            raise self._lost_error()

    def _error_of(self, error: Exception) -> Error:
        """Convert an exception of Ray to ggmlb's."""
        if isinstance(error, Error):
            return error
        if isinstance(error, exceptions.RayActorError):
            link = Link._by_actor.get(getattr(error, "actor_id", None) or "", self)
            return link._lose(one_line(error))
        if isinstance(error, exceptions.RayTaskError) and isinstance(error.cause, Exception):
            return self._error_of(error.cause)
        if isinstance(error, (exceptions.ObjectLostError, exceptions.NodeDiedError)):
            return self._lose(one_line(error))
        return BackendError(f"{self.title} failed: {one_line(error)}")

    def _lose(self, why: str) -> DeviceLostError:
        """Mark the node as lost; return the error. Takes no lock, as another link's thread may call it."""
        if self._lost is None:
            self._lost = why
        return self._lost_error()

    def _lost_error(self) -> DeviceLostError:
        n, nbytes = len(self.sizes), sum(self.sizes.values())
        names = ", ".join(self.devices)
        return DeviceLostError(
            f"{self.title} is lost, with {names} and {n} buffers of {readable_size(nbytes)}: {self._lost}; "
            "go on by Scheduler.without(*error.devices), and place the weights that were there again",
            node=self.title,
            devices=self.devices,
            nbytes=nbytes,
        )
