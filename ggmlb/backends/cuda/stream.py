"""CUDA streams, events and timing; and the memory allocator, which frees memory when streams are done."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy.typing as npt

from ggmlb.backends.cuda.driver import cuda_errors
from ggmlb.interface import Command, Event

if TYPE_CHECKING:
    from ggmlb.backends.cuda.buffer import CudaBuffer
    from ggmlb.backends.cuda.cublas import CuBlas
    from ggmlb.backends.cuda.cupy_driver import CupyDriver
    from ggmlb.backends.cuda.device import CudaDevice
    from ggmlb.backends.cuda.plan import IdleGraphs

Release: TypeAlias = Callable[[], object]
"""Releases a resource that no queued work uses."""

MAX_HELD = 64
"""Number of host arrays held for transfers at which those of finished transfers are dropped."""

N_LOOKS = 5
"""Number of clock comparisons, of which the fastest is used."""

SPAN_NS = 1_000_000_000
"""Longest measured interval [ns], in which a float32 of milliseconds resolves 60 ns."""


class Stream:
    """A CUDA stream.

    Attributes:
        handle: CUDA's handle; 0 once freed.
        lock: Held during capture, and for each call that queues work, records an event or adds a wait:
            during a capture, that would become part of the graph or break the capture. While it is held,
            no other stream's lock is taken (except by sums over cards, in order), and no thread waits for
            the device.
    """

    def __init__(self, driver: CupyDriver, device: int) -> None:
        self._driver = driver
        self.device = device
        self.lock = threading.RLock()
        self._marks: list[int] = []
        with driver.on(device):
            self.handle = driver.stream_new()

    def mark(self) -> int:
        """Record an event after the stream's queued work; return it. The caller gives it back by `unmark`."""
        try:
            event = self._marks.pop()
        except IndexError:
            with self._driver.on(self.device):
                event = self._driver.event_new()
        with self.lock:
            if self.handle:  # else its work is done, as is an event that was not recorded
                self._driver.event_record(event, self.handle)
        return event

    def unmark(self, event: int) -> None:
        """Take back an event from `mark` for reuse; it is reached, or streams already wait for it."""
        self._marks.append(event)

    def is_idle(self) -> bool:
        """Whether all of the stream's queued work is done; also once it is freed, by another thread."""
        with self.lock:
            return not self.handle or self._driver.stream_done(self.handle)

    def wait_for(self, others: Iterable[Stream]) -> None:
        """Queue a wait: later work of this stream starts after the work queued so far on the `others`."""
        for other in others:
            if other is not self and other.handle:
                event = other.mark()
                with self.lock:
                    self._driver.stream_wait(self.handle, event)
                other.unmark(event)  # recording it again does not change queued waits

    def synchronize(self) -> None:
        """Block until the stream's queued work is done; other threads may queue and capture meanwhile."""
        with self._driver.on(self.device):
            event = self.mark()
            self._driver.event_synchronize(event)
        self.unmark(event)

    def free(self) -> None:
        """Release the CUDA stream; its work must be done."""
        with self._driver.on(self.device), self.lock:  # other threads may ask whether it is idle
            handle, self.handle = self.handle, 0
            for event in self._marks:
                self._driver.event_free(event)
            self._marks.clear()
            self._driver.stream_free(handle)


class CudaEvent(Event):
    """A CUDA event that marks a point in a stream's work.

    Attributes:
        handle: CUDA's event.
    """

    device: CudaDevice

    def __init__(self, device: CudaDevice) -> None:
        super().__init__(device)
        with cuda_errors(device.driver, f"create an event on {device.name}"), device.on():
            self.handle = device.driver.event_new()
        release = partial(device.driver.event_free, self.handle)
        self._leave = weakref.finalize(self, device.memory_pool.give_back, release)
        self._leave.atexit = False

    def _synchronize(self) -> None:
        device = self.device
        with cuda_errors(device.driver, f"wait for an event of {device.name}"), device.on():
            device.driver.event_synchronize(self.handle)

    def _free(self) -> None:
        device = self.device
        self._leave.detach()
        with cuda_errors(device.driver, f"free an event of {device.name}"), device.on():
            device.driver.event_free(self.handle)


class HeldArrays:
    """Host arrays of a stream's queued transfers, kept until these are done.

    A wait for the stream ends the use of all earlier arrays. An event is recorded only once in `MAX_HELD`
    transfers, to drop arrays without a wait.
    """

    def __init__(self, driver: CupyDriver, stream: Stream) -> None:
        self._driver = driver
        self._stream = stream
        self._arrays: deque[npt.NDArray[Any]] = deque()
        self._events: deque[tuple[int, int]] = deque()  # each with the number of arrays held before it
        self.n_held = 0

    def __len__(self) -> int:
        return len(self._arrays)

    def add(self, array: npt.NDArray[Any]) -> None:
        """Keep the array of the transfer queued last; requires the stream's lock."""
        self._arrays.append(array)
        self.n_held += 1
        if self.n_held % MAX_HELD == 0:
            self._events.append((self._stream.mark(), self.n_held))
            while self._events and self._driver.event_done(self._events[0][0]):
                self.drop(self._events[0][1])

    def drop(self, until: int) -> None:
        """Drop the first `until` arrays ever held, whose transfers are done; requires the stream's lock."""
        while self.n_held - len(self._arrays) < until:
            self._arrays.popleft()
        while self._events and self._events[0][1] <= until:
            self._stream.unmark(self._events.popleft()[0])


class DeferredRelease:
    """Resources of a stream, released when its work is done.

    Attributes:
        held: Host arrays of transfers.
        blas: A cuBLAS handle, and its workspace.
    """

    def __init__(self, driver: CupyDriver, stream: Stream, idle_graphs: IdleGraphs) -> None:
        self._driver = driver
        self._stream = stream
        self._idle_graphs = idle_graphs
        self.held = HeldArrays(driver, stream)
        self.blas: tuple[CuBlas, CudaBuffer] | None = None

    def close(self) -> None:
        """Release all resources; the work must be done."""
        self.held.drop(self.held.n_held)
        self._idle_graphs.close()
        blas, self.blas = self.blas, None
        if blas is not None:
            with self._driver.on(self._stream.device):
                blas[0].close()
        self._stream.free()


class DeviceMemory:
    """Allocator of a device's memory, which frees memory when the work that uses it is done.

    Garbage collection may drop a buffer at any moment, even during a capture. So `give_back` only records
    it; the next call records events for work that may still use the memory, and checks them.

    Attributes:
        streams: The device's streams.
    """

    def __init__(self, driver: CupyDriver, device: int) -> None:
        self._driver = driver
        self._device = device
        self._lock = threading.Lock()
        self.streams: weakref.WeakSet[Stream] = weakref.WeakSet()
        self._dropped: deque[tuple[Release, tuple[Stream, ...]]] = deque()
        self._leaving: list[tuple[Release, list[tuple[Stream, int]]]] = []

    def allocate(self, nbytes: int) -> int:
        """Allocate `nbytes`; on failure, wait for pending releases and retry once.

        Raises:
            Exception: One of the driver's errors.
        """
        driver = self._driver
        with driver.on(self._device):
            self.sweep()
            try:
                return driver.malloc(nbytes)
            except driver.errors as error:
                if not driver.is_out_of_memory(error):
                    raise
            self.sweep(wait=True)
            driver.trim()
            return driver.malloc(nbytes)

    def give_back(self, release: Release, streams: Iterable[Stream] = ()) -> None:
        """Call `release` in a later `sweep`, once the work now queued on the streams is done."""
        self._dropped.append((release, tuple(streams)))

    def give_back_borrowed(self, owner: object, streams: Iterable[Stream]) -> None:
        """Keep `owner`, another library's object, alive until the work now queued on the streams is done."""
        users = tuple(streams)
        if users:
            self._dropped.append((partial(id, owner), users))  # the call does nothing: it keeps a reference

    def sweep_if_idle(self) -> None:
        """Release resources whose work is done, if all streams are idle: else cuMemFree would wait for it."""
        if not self._dropped and not self._leaving:
            return
        streams = [stream for stream in list(self.streams) if stream.handle]
        with self._driver.on(self._device):
            if all(stream.is_idle() for stream in streams):
                self.sweep()

    def sweep(self, wait: bool = False) -> None:
        """Release the resources given back whose work is done; with `wait`, wait for the others' work."""
        if not self._dropped and not self._leaving:
            return
        driver = self._driver
        done: list[Release] = []  # called without the lock, as an owner's destructor may do anything
        with driver.on(self._device):
            with self._lock:
                while self._dropped:
                    release, streams = self._dropped.popleft()
                    busy = [stream for stream in streams if stream.handle and not stream.is_idle()]
                    self._leaving.append((release, [(stream, stream.mark()) for stream in busy]))
                still = []
                for release, marks in self._leaving:
                    if wait:
                        for _, event in marks:
                            driver.event_synchronize(event)
                    elif not all(driver.event_done(event) for _, event in marks):
                        still.append((release, marks))
                        continue
                    done.append(release)
                    for stream, event in marks:
                        if stream.handle:
                            stream.unmark(event)
                        else:
                            driver.event_free(event)
                self._leaving = still
            for release in done:
                release()


class Clock:
    """Timing of a CUDA stream: records events around commands, and sets their times when it is idle.

    CUDA measures only intervals between events, as float32 milliseconds: an hour to 0.25 ms. So events
    are measured from an anchor event at most about `SPAN_NS` before them, and anchors from the previous
    anchor. The first anchor, and any after an idle pause, has the host's time. The stream's device must
    be the current one.
    """

    def __init__(self, driver: CupyDriver, stream: Stream, commands: list[Command]) -> None:
        self._driver = driver
        self._stream = stream
        self._commands = commands
        self._events: list[tuple[Command | None, int, int]] = []
        self._last = self._newest = 0
        self._add_anchor()

    @contextmanager
    def time(self, name: str, is_copy: bool = False) -> Iterator[None]:
        """Context manager that times the work queued in its block, as the command `name`."""
        if perf_counter_ns() - self._last > SPAN_NS and self._driver.event_done(self._newest):
            self._add_anchor()
        before = self._mark()
        yield
        command = Command(name, is_copy)
        self._commands.append(command)
        self._newest = self._mark()
        self._events.append((command, before, self._newest))
        self._last = perf_counter_ns()

    def settle(self) -> None:
        """Set the start and stop times of the recorded commands; their work must be done."""
        driver = self._driver
        anchor = at = 0
        for command, before, after in self._events:
            if command is None:
                anchor, at = before, after
                continue
            start = at + round(driver.event_elapsed(anchor, before) * 1e9)
            command.start, command.stop = start, start + round(driver.event_elapsed(before, after) * 1e9)
            if start - at > SPAN_NS:
                anchor, at = before, start
        for command, before, after in self._events:
            driver.event_free(before)
            if command is not None:
                driver.event_free(after)

    def _add_anchor(self) -> None:
        """Record an anchor with a known host time: no command, the event, and the time [ns]."""
        looks = [self._look() for _ in range(N_LOOKS)]
        best = min(looks)
        for look in looks:
            if look is not best:
                self._driver.event_free(look[2])
        self._newest = best[2]
        self._events.append((None, best[2], best[1]))
        self._last = perf_counter_ns()

    def _look(self) -> tuple[int, int, int]:
        """Record an event and wait for it; return the duration, the middle of the wait, and the event."""
        before = perf_counter_ns()
        event = self._mark()
        self._driver.event_synchronize(event)
        after = perf_counter_ns()
        return after - before, (before + after) // 2, event

    def _mark(self) -> int:
        event = self._driver.event_new(timed=True)
        with self._stream.lock:
            self._driver.event_record(event, self._stream.handle)
        return event
