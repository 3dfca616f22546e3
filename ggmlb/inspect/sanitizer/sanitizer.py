"""Race detection by vector clocks, and the rules of memory accesses.

Every stream counts its actions and keeps a clock: for each stream, the number of actions known to be done
before its next action. The host is stream number 0. Clocks are joined where the interfaces guarantee an
order:

    queue work on a stream           the stream's clock joins the host's
    Backend.synchronize              the host's joins the stream's
    event_record, event_wait         the event keeps the stream's clock; the waiting stream joins it
    Event.synchronize                the host's joins the event's
    cpy_tensor_async                 both streams' clocks are joined, before and after
    a device that is not `async_`    the host's joins the stream's after each action

An access is a race if its stream's clock does not cover an earlier access to the same bytes and one of
the two is a write.
"""

from __future__ import annotations

import itertools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn

from ggmlb.core import arguments
from ggmlb.core.errors import SanitizerError
from ggmlb.inspect.sanitizer.ranges import Clock, Ranges, Stamp
from ggmlb.inspect.sanitizer.watches import Watches
from ggmlb.interface import Backend, Buffer, Event, observe
from ggmlb.interface.observe import Access, Action, Observer

if TYPE_CHECKING:
    from ggmlb.inspect.sanitizer.watches import Watch

HOST: Final = 0

_PACKAGE: Final = str(Path(__file__).parents[2])


class _Stream:
    """A queue of work: its number and its clock."""

    def __init__(self, number: int, name: str, waits: bool) -> None:
        self.number = number
        self.name = name
        self.waits = waits
        self.clock: Clock = {number: 0}


@arguments.checked_methods
class Sanitizer(Observer):
    """Observer of all backends that raises a `SanitizerError` before a racing access (no order) is queued.

    It trusts backends to keep the interfaces' guarantees, and checks their callers: schedulers,
    allocators, users. Threads count as one host, whose actions are ordered as observed.

    Args:
        unwritten: Also report reads of unwritten bytes, in buffers allocated since the start. Such reads
            can be valid, if the values are ignored (a partly filled cache).
    """

    def __init__(self, *, unwritten: bool = False) -> None:
        self._unwritten = unwritten
        self._lock = threading.RLock()
        self._host = _Stream(HOST, "the host", waits=True)
        self._streams: weakref.WeakKeyDictionary[Backend, _Stream] = weakref.WeakKeyDictionary()
        self._numbers = itertools.count(HOST + 1)
        self._events: weakref.WeakKeyDictionary[Event, Clock] = weakref.WeakKeyDictionary()
        self._watches = Watches()
        self._memory: weakref.WeakKeyDictionary[Buffer, Ranges] = weakref.WeakKeyDictionary()
        self._fresh: weakref.WeakSet[Buffer] = weakref.WeakSet()

    def start(self) -> None:
        """Start observing: check every call of every backend from now on."""
        observe.start(self)

    def stop(self) -> None:
        """Stop observing the backends."""
        observe.stop(self)

    # -- the two halves of an action -----------------------------------------------------------

    def begin(self, action: Action) -> None:
        """Check the reads, writes and waits of an observed call (action) before it is queued.

        Raises:
            SanitizerError: An access is unordered, or uses freed memory.
        """
        with self._lock:
            if action.name in ("event_wait", "event_synchronize"):
                self._check_recorded(action)
            if action.name == "free" and action.buffer is not None:
                whole = Access(action.buffer, 0, action.buffer.size, is_write=True, tensor=None)
                self._check(whole, self._host, self._host.clock, action)
                return
            stream = self._stream(action.stream)
            clock = self._clock_of(action, stream)
            for access in action.accesses():
                self._check(access, stream, clock, action)

    def end(self, action: Action) -> None:
        """Record an observed call's accesses, and which earlier work is now known to be done before which.

        Raises:
            SanitizerError: Host memory that queued work reads was changed before the work was done.
        """
        if action.failed or not action.done:
            return
        with self._lock:
            stream = self._stream(action.stream)
            clock = stream.clock = self._clock_of(action, stream)
            clock[stream.number] += 1
            if action.source is not None:
                _join(self._stream(action.source).clock, clock)
            self._record(action, stream)
            event = action.event
            if event is not None:
                if action.name == "event_record":
                    self._events[event] = dict(clock)
                else:
                    _join(clock, self._events.get(event, {}))
            if action.name == "synchronize" or stream.waits:
                _join(self._host.clock, clock)
                self._check_watches()
            if action.name == "alloc_buffer" and action.buffer is not None:
                self._fresh.add(action.buffer)

    def _stream(self, backend: Backend | None) -> _Stream:
        if backend is None:
            return self._host
        stream = self._streams.get(backend)
        if stream is None:
            name = backend.name
            same = sum(b.name == name and not b.is_freed for b in self._streams)
            stream = self._streams[backend] = _Stream(
                next(self._numbers),
                f"{name} (stream {same + 1})" if same else name,
                waits=not backend.device.caps.async_,
            )
        return stream

    def _clock_of(self, action: Action, stream: _Stream) -> Clock:
        """Return the clock of work known to be done before the action."""
        clock = dict(stream.clock)
        _join(clock, self._host.clock)
        if action.source is not None:
            _join(clock, self._stream(action.source).clock)
        return clock

    def _record(self, action: Action, stream: _Stream) -> None:
        number, where = stream.number, _caller()
        for access in action.accesses():
            buffer, start, stop, is_write, tensor = access
            ranges = self._memory.get(buffer)
            if ranges is None:
                ranges = self._memory[buffer] = Ranges()
            of = None if tensor is None else weakref.ref(tensor)
            stamp = Stamp(number, stream.clock[number], stream.name, action.name, of, where)
            (ranges.write if is_write else ranges.read)(start, stop, stamp)
            if is_write:
                self._watches.wrote(access)
            elif not stream.waits:
                changed = self._watches.read(access, stamp, ranges, self._host.clock)
                if changed is not None:
                    self._fail_changed(changed)
        if action.data is not None and action.name.startswith("set") and not stream.waits:
            of = next((weakref.ref(a.tensor) for a in action.transfers if a.tensor is not None), None)
            stamp = Stamp(number, stream.clock[number], stream.name, action.name, of, where)
            self._watches.data(action.data, stamp)

    # -- rules ---------------------------------------------------------------------------------

    def _check(self, access: Access, stream: _Stream, clock: Clock, action: Action) -> None:
        buffer, start, stop, is_write, _ = access
        if buffer.is_freed:
            raise SanitizerError(
                f"{_told(action, stream, access)}, which was freed; keep the buffer until the work that "
                "uses it is done",
                kind="freed",
            )
        ranges = self._memory.get(buffer)
        if ranges is None:
            if self._unwritten and not is_write and buffer in self._fresh:
                self._fail_unwritten(access, stream, action)
            return
        for cell in ranges.cells(start, stop):
            last = cell.write
            if last is not None and clock.get(last.stream, 0) < last.time:
                self._fail_race(access, stream, action, last, "write")
            if is_write:
                for last in cell.reads.values():
                    if clock.get(last.stream, 0) < last.time:
                        self._fail_race(access, stream, action, last, "read")
            elif last is None and self._unwritten and buffer in self._fresh:
                self._fail_unwritten(access, stream, action)

    def _fail_race(self, access: Access, stream: _Stream, action: Action, last: Stamp, did: str) -> NoReturn:
        what = _name_of(last)
        cure = f"synchronize {last.by} between them"
        if stream.number != HOST:
            cure += f", or record an event on {last.by} after the first and let {stream.name} wait for it"
        raise SanitizerError(
            f"{_told(action, stream, access)}, while {last.by}'s {last.action}, queued at {last.where}, may "
            f"still {did} {what}; the two are unordered; {cure}",
            kind="race",
        )

    def _fail_unwritten(self, access: Access, stream: _Stream, action: Action) -> NoReturn:
        raise SanitizerError(
            f"{_told(action, stream, access)}, some of which were never written; set the tensor, or clear "
            "the buffer, first",
            kind="unwritten",
        )

    def _check_recorded(self, action: Action) -> None:
        event = action.event
        assert event is not None
        if not event.is_recorded:
            waiter = self._stream(action.stream).name
            raise SanitizerError(
                f"{waiter} waits at {_caller()} for an event of {event.device.name} that was never recorded, "
                "so that nothing is waited for; record it first, on the stream to wait for",
                kind="unrecorded",
            )

    def _check_watches(self) -> None:
        """Check that the host memory read by finished work is unchanged since it was queued."""
        for watch in self._watches.done(self._host.clock):
            if watch.is_changed:
                self._fail_changed(watch)

    def _fail_changed(self, watch: Watch) -> NoReturn:
        stamp = watch.stamp
        what = f"the data for {_name_of(stamp)}" if watch.is_data else _name_of(stamp)
        raise SanitizerError(
            f"{what} was changed through a NumPy array while {stamp.by}'s {stamp.action}, queued at "
            f"{stamp.where}, could still read it; synchronize {stamp.by} first, or pass a copy",
            kind="changed",
        )


@arguments.checked
@contextmanager
def sanitize(*, unwritten: bool = False) -> Iterator[Sanitizer]:
    """Context manager that checks all transfers and computations; `unwritten` adds reads of unset bytes.

    Raises:
        SanitizerError: From the call that would race, which is not executed.
    """
    sanitizer = Sanitizer(unwritten=unwritten)
    sanitizer.start()
    try:
        yield sanitizer
    finally:
        sanitizer.stop()


def start_sanitizer(owner: object) -> Callable[[], object]:
    """Start a sanitizer that stops when `owner` is garbage-collected; return a function that stops it."""
    sanitizer = Sanitizer()
    sanitizer.start()
    return weakref.finalize(owner, sanitizer.stop)


def _join(clock: Clock, other: Clock) -> None:
    for number, time in other.items():
        if clock.get(number, -1) < time:
            clock[number] = time


def _name_of(stamp: Stamp) -> str:
    tensor = None if stamp.tensor is None else stamp.tensor()
    return "a tensor that is gone" if tensor is None else tensor.describe()


def _told(action: Action, stream: _Stream, access: Access) -> str:
    did = "frees" if action.name == "free" else "writes" if access.is_write else "reads"
    what = "" if access.tensor is None else f"{access.tensor.describe()}, "
    place = f"bytes {access.start} to {access.stop} of the {access.buffer.name} buffer"
    return f"{stream.name}'s {action.name} at {_caller()} {did} {what}{place}"


def _caller() -> str:
    """Return the file and line of the program that called into ggmlb."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    return f"{_as_read(frame.f_code.co_filename)}:{frame.f_lineno}"


def _as_read(file: str) -> str:
    """Return a file's name for messages; of a notebook's cell, `"In[7]"`."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    name_of = getattr(getattr(shell, "compile", None), "format_code_name", None)
    cell = name_of(file) if name_of is not None else None
    return cell[1] if cell else Path(file).name
