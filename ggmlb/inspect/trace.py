"""Traces of computations, copies and host calls, for Perfetto or Chrome.

A trace has a process for the host, with a row for each Python thread, and one for each device, with two
rows for each stream: computations and copies. Arrows lead from the call that queued work to the work.
Device times are measured by the devices (`Backend.start_timing`).
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter_ns
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

from ggmlb.core.errors import ArgumentError
from ggmlb.inspect.html import escape
from ggmlb.inspect.timeline import timeline
from ggmlb.interface import Backend, Command, GraphPlan, observe
from ggmlb.interface.observe import Action, Observer

if TYPE_CHECKING:
    from typing_extensions import Self

HOST: Final = 0
COMPUTE, COPIES = 0, 1


class Trace(Observer):
    """Recorder of a trace; a context manager, which starts and stops it.

    Args:
        backends: The streams whose work is timed.
        path: File to write at the end; `None` keeps the trace in `events` only.
        name_plan: Returns the name of a computed plan; by default its number of nodes.

    Attributes:
        events: Events in the Trace Event Format; complete after the `with` block.
        untimed: Names of the devices without timing, which have no rows.
    """

    def __init__(
        self,
        backends: Sequence[Backend],
        path: str | Path | None = None,
        *,
        name_plan: Callable[[GraphPlan], str] | None = None,
    ) -> None:
        self._backends = tuple(dict.fromkeys(s for b in backends for s in b.streams))
        self._path = None if path is None else Path(path)
        self._name_plan = name_plan
        self._origin = 0
        self._open: dict[Action, tuple[int, int]] = {}
        self._threads: dict[int, str] = {}
        self._calls: list[tuple[str, int, int, int, dict[str, Any]]] = []
        self._links: list[tuple[int, int, Backend, int]] = []
        self._synchronous: dict[Backend, list[Command]] = {}
        self.events: list[dict[str, Any]] = []
        self.untimed: tuple[str, ...] = ()

    # -- observing -----------------------------------------------------------------------------

    def begin(self, action: Action) -> None:
        """Record a call's start and its stream's command count, from which `end` tells the added commands."""
        commands = None if action.stream is None else action.stream.commands
        self._open[action] = (0 if commands is None else len(commands), perf_counter_ns())

    def end(self, action: Action) -> None:
        """Record the end of the call, and the work it queued."""
        stop = perf_counter_ns()
        before, start = self._open.pop(action, (0, 0))
        if not start:
            return  # it began before the trace
        thread = threading.get_ident()
        self._threads.setdefault(thread, threading.current_thread().name)
        self._calls.append((self._name(action), thread, start, stop, _details(action)))
        stream = action.stream
        if stream is None:
            return
        if stream.commands is not None:
            if len(stream.commands) > before:
                self._links.append((thread, start, stream, before))
        elif stream in self._synchronous and not action.failed:
            self._note_synchronous(action, stream, start, stop)

    def _note_synchronous(self, action: Action, stream: Backend, start: int, stop: int) -> None:
        """Record the work of a synchronous stream by the times of the call, without a backend hook."""
        if action.plan is not None or (action.transfers and action.done):
            name = self._name(action)
            self._synchronous[stream].append(Command(name, action.plan is None, start, stop))

    def _name(self, action: Action) -> str:
        if action.plan is not None and self._name_plan is not None:
            return self._name_plan(action.plan)
        where = "" if action.stream is None else f" on {action.stream.name}"
        if action.plan is not None:
            return f"compute {len(action.plan.nodes)} nodes{where}"
        what = next((f" {a.tensor.name}" for a in action.transfers if a.tensor and a.tensor.name), "")
        return action.name + what + where

    # -- from start to end ---------------------------------------------------------------------

    def __enter__(self) -> Self:
        with ExitStack() as undo:
            untimed = []
            for backend in self._backends:
                if backend.start_timing():
                    undo.callback(backend.stop_timing)
                elif backend.device.caps.async_:
                    untimed.append(backend.name)
                else:
                    self._synchronous[backend] = []
            undo.pop_all()
        self.untimed = tuple(untimed)
        self._origin = perf_counter_ns()
        observe.start(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        observe.stop(self)
        done = dict(self._synchronous)

        def stop_timing(backend: Backend) -> None:
            done[backend] = backend.stop_timing()

        with ExitStack() as stack:  # all are stopped, even if one has failed
            for backend in self._backends:
                if backend.commands is not None and not backend.is_freed:
                    stack.callback(stop_timing, backend)
        self.events = self._as_events(done)
        if self._path is not None:
            try:
                self._path.write_text(json.dumps(self.to_dict()), encoding="utf-8")
            except OSError as error:
                raise ArgumentError(f"trace: cannot write {self._path}: {error}; give another path") from None

    def to_dict(self) -> dict[str, Any]:
        """Return the trace as a JSON object for viewers."""
        return {"traceEvents": self.events, "displayTimeUnit": "ns"}

    def to_svg(self) -> str:
        """Return a drawing of the trace: rows of threads and streams, with a box for each event."""
        return timeline(self.events).svg()

    def __repr__(self) -> str:
        return f"<Trace {sum(e['ph'] == 'X' for e in self.events)} events>"

    def _repr_html_(self) -> str:
        """The drawing, for a notebook."""
        return timeline(self.events).html(repr(self)) if self.events else escape(repr(self))

    # -- the format ----------------------------------------------------------------------------

    def _as_events(self, done: dict[Backend, list[Command]]) -> list[dict[str, Any]]:
        threads = {ident: i for i, ident in enumerate(self._threads)}
        events = [_meta("process_name", HOST, 0, "host"), _meta("process_sort_index", HOST, 0, HOST)]
        events += [_meta("thread_name", HOST, threads[i], name) for i, name in self._threads.items()]
        for name, thread, start, stop, details in self._calls:
            events.append(self._slice(name, HOST, threads[thread], start, stop, details))
        devices = list(dict.fromkeys(b.device for b in self._backends if b in done))
        rows: dict[Backend, tuple[int, int]] = {}
        for pid, device in enumerate(devices, HOST + 1):
            events.append(_meta("process_name", pid, 0, f"{device.name} ({device.description})"))
            events.append(_meta("process_sort_index", pid, 0, pid))
            streams = [b for b in self._backends if b.device is device and b in done]
            for i, backend in enumerate(streams):
                rows[backend] = (pid, 2 * i)
                number = f" of stream {i + 1}" if len(streams) > 1 else ""
                for row, what in ((COMPUTE, "computations"), (COPIES, "copies")):
                    if any(c.is_copy == (row == COPIES) for c in done[backend]):
                        events.append(_meta("thread_name", pid, 2 * i + row, what + number))
                for c in done[backend]:
                    row = COPIES if c.is_copy else COMPUTE
                    events.append(self._slice(c.name, pid, 2 * i + row, c.start, c.stop, {}))
        for link_id, (thread, queued, stream, index) in enumerate(self._links):
            if stream in rows:
                command = done[stream][index]
                pid, first = rows[stream]
                row = first + (COPIES if command.is_copy else COMPUTE)
                link = {"name": "queued", "cat": "order", "id": link_id}
                events.append({**link, "ph": "s", **self._at(HOST, threads[thread], queued)})
                events.append({**link, "ph": "f", "bp": "e", **self._at(pid, row, command.start)})
        return events

    def _slice(
        self, name: str, pid: int, tid: int, start: int, stop: int, details: dict[str, Any]
    ) -> dict[str, Any]:
        event = {"ph": "X", "name": name, **self._at(pid, tid, start), "dur": (stop - start) / 1000}
        return {**event, "args": details} if details else event

    def _at(self, pid: int, tid: int, time: int) -> dict[str, Any]:
        """Return a position in the trace; times are in microseconds there."""
        return {"pid": pid, "tid": tid, "ts": (time - self._origin) / 1000}


def _meta(what: str, pid: int, tid: int, value: str | int) -> dict[str, Any]:
    key = "name" if isinstance(value, str) else "sort_index"
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {key: value}}


def _details(action: Action) -> dict[str, Any]:
    details: dict[str, Any] = {}
    for access in action.transfers:
        key = "writes" if access.is_write else "reads"
        what = "" if access.tensor is None else f"{access.tensor.describe()}, "
        details[key] = f"{what}{access.stop - access.start:,} bytes in {access.buffer.name}"
    if action.plan is not None:
        details["nodes"] = len(action.plan.nodes)
    if action.buffer is not None:
        details["buffer"] = f"{action.buffer.size:,} bytes of {action.buffer.name}"
    if not action.done:
        details["declined"] = True
    return details
