"""CUDA's driver played by the host: the CUDA backend's plans, arguments and order of work, with no card.

Every address is looked up, and belongs to one device; memory is poisoned when it is allocated and when it is
freed. Streams are lists of work that runs only when something waits for it, so that a wait that was
forgotten shows as poison. Where CUDA's answer depends on time or on the machine, it is the worst one: an
event is never reached at once, copies of pageable memory wait for the stream, a device that is current has a
context, and what cards send each other directly is lost. No call may wait for the device under a stream's
lock.

Kernels are compiled by NVRTC, and their PTX is run (`tests.support.ptx`) with the very argument blocks that
the backend packed for CUDA: what is computed is computed. What only a card can tell (real asynchrony, capture
as CUDA does it) is not played.
"""

from __future__ import annotations

import bisect
import ctypes
import itertools
import threading
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from itertools import islice
from typing import Any

import numpy as np

from ggmlb.backends.cuda.driver import Call, Collective, CopyKind, Facts, address_of, grid
from ggmlb.backends.cuda.stream import Stream
from ggmlb.backends.gpu import Kernel, Launch, layout
from ggmlb.core.errors import BackendUnavailable
from ggmlb.interface.data import Bytes
from tests.support.gpus import DRIVER_CALLS
from tests.support.host_libraries import HostCollective, QueuedBlas
from tests.support.host_streams import RECORD, HostError, HostStream, Op, Point
from tests.support.ptx import BACKWARD, Compiler, build

POISON = 0xFF
ALIGNMENT = 256

SHARED_NBYTES = 228 << 10
"""Shared memory of a multiprocessor."""

STAGED_NBYTES = 64 << 10
"""Up to here, a copy from pageable memory returns at once; a larger one waits for the stream first."""

STREAMS: weakref.WeakSet[Stream] = weakref.WeakSet()
"""All streams of the backend, for their locks."""


def _remembered(init: Any) -> Any:
    @wraps(init)
    def remember(self: Stream, *args: Any) -> None:
        init(self, *args)
        STREAMS.add(self)

    return remember


Stream.__init__ = _remembered(Stream.__init__)  # type: ignore[method-assign]


@dataclass(frozen=True, slots=True)
class Allocation:
    """Memory of a device."""

    address: int
    array: Bytes
    device: int


class Owned(np.ndarray[Any, Any]):
    """An array that keeps the owner of its memory."""

    owner: object


def aligned(nbytes: int) -> Bytes:
    """Poisoned memory that begins at a multiple of `ALIGNMENT`."""
    whole = np.full(nbytes + ALIGNMENT, POISON, np.uint8)
    start = -address_of(whole) % ALIGNMENT
    return whole[start : start + nbytes]


def operands(kernel: Kernel, block: bytes) -> list[int]:
    """Return the addresses of the tensors in a kernel's argument block."""
    values = iter(layout(kernel, "cuda").unpack(block))
    rows = [list(islice(values, 10 if param.kind == "tensor" else 1)) for param in kernel.params]
    return [row[0] for row in rows if len(row) > 1]


class HostDriver:
    """`n_devices` cards with `capacity` bytes each.

    Attributes:
        counts: How often graphs were launched ("replay") and updated, and pools emptied ("trim").
        peers: Whether devices say that they reach each other's memory.
        loses: Whether what they send each other directly is lost, as where an IOMMU translates.
        contexts: Devices that have a context: those that were current.
        exclusive: Devices that another process has for itself.
        eager: Devices whose work runs at once, not as late as it may.
        registered: Where host memory begins, and ends, that the driver was told of.
        fail: Names of calls that fail from now on.
    """

    errors = (HostError,)

    def __init__(self, n_devices: int = 1, capacity: int = 1 << 30, capability: int = 90) -> None:
        self._n, self._capacity, self._capability = n_devices, capacity, capability
        self._blas = QueuedBlas(self)
        self._local = threading.local()
        self._ids = itertools.count(1)
        self._allocations: dict[int, Allocation] = {}
        self._graveyard: list[Allocation] = []
        self.streams: dict[int, HostStream] = {}
        self._events: dict[int, Point] = {}
        self._graphs: dict[int, list[Op]] = {}
        self._execs: dict[int, list[Op]] = {}
        self.counts: Counter[str] = Counter()
        self.peers = self.loses = True
        self.enabled: set[tuple[int, int]] = set()
        self.contexts: set[int] = set()
        self.exclusive: set[int] = set()
        self._locked: dict[int, int] = {}
        self.eager: set[int] = set()
        self.registered: dict[int, int] = {}
        self.fail: set[str] = set()

    def _check(self, call: str, status: int = 1) -> None:
        if call in self.fail:
            raise HostError(f"{call} fails, as the test asked", status)

    def _wait(self, call: str) -> None:
        """Called where CUDA waits for the device: other threads need the streams' locks meanwhile."""
        held = [stream for stream in STREAMS if stream.lock._is_owned()]  # type: ignore[attr-defined]
        assert not held, f"{call} waits for the device while a stream's lock is held"

    # -- devices -------------------------------------------------------------------------------

    def device_count(self) -> int:
        return self._n

    def facts(self, device: int) -> Facts:
        place = f"0000:0{device}:00.0"
        return Facts("Host", place, self._capability, 2, SHARED_NBYTES, self._capacity, False)

    def resident(self, wg: int, shared: int) -> int:
        """Return how many blocks a multiprocessor has room for, if they take few registers."""
        return min(2048 // wg, SHARED_NBYTES // (shared + 1024))

    @contextmanager
    def on(self, device: int | None) -> Iterator[None]:
        before = self.current_device
        self.set_current(device)
        try:
            yield
        finally:
            self._local.device = before

    def set_current(self, device: int | None) -> None:
        """Make a device this thread's current one, or none; a device gets a context by that."""
        if device is not None:
            if device in self.exclusive:
                raise HostError("CUDA-capable device(s) is/are busy or unavailable", 46)
            self.contexts.add(device)
        self._local.device = device

    @property
    def current_device(self) -> int | None:
        return getattr(self._local, "device", None)

    def _device(self) -> int:
        assert self.current_device is not None, "called outside on(device)"
        return self.current_device

    def memory_info(self, device: int) -> tuple[int, int]:
        with self.on(device):
            used = sum(a.array.size for a in self._allocations.values() if a.device == device)
        return self._capacity - used, self._capacity

    def is_out_of_memory(self, error: Exception) -> bool:
        return isinstance(error, HostError) and error.status == 2

    # -- memory --------------------------------------------------------------------------------

    def malloc(self, nbytes: int) -> int:
        device = self._device()
        assert nbytes > 0
        self._check("malloc", 2)
        if nbytes > self.memory_info(device)[0]:
            raise HostError("out of memory", 2)
        array = aligned(nbytes)
        address = address_of(array)
        self._allocations[address] = Allocation(address, array, device)
        return address

    def free(self, address: int) -> None:
        for op in (op for stream in self.streams.values() for op in stream.queue):
            there = (a for a in op.addresses if not self._mapped(a))
            is_used = any(self.find(a).address == address for a in there)
            assert not is_used, f"memory freed while {op.name} is queued with it"
        gone = self._allocations.pop(address)
        gone.array[...] = POISON
        self._graveyard = [*self._graveyard[-20:], gone]

    def trim(self) -> None:
        self.counts["trim"] += 1

    def find(self, address: int) -> Allocation:
        """Return the allocation that an address is in."""
        bases = sorted(self._allocations)
        if i := bisect.bisect_right(bases, address):
            found = self._allocations[bases[i - 1]]
            if address < found.address + found.array.size:
                return found
        raise HostError(f"an illegal memory access at {address:#x}", 700)

    def _own(self, name: str, address: int, device: int) -> tuple[int, int]:
        """The memory that a kernel accesses, where it begins and ends: it must be of the kernel's device."""
        found = self.find(address)
        if found.device != device:
            raise HostError(f"{name} touched memory of device {found.device}", 700)
        return found.address, found.address + found.array.size

    def _mapped(self, address: int) -> tuple[int, int] | None:
        """The page-locked host memory that an address is in, which all devices access in place."""
        return next(((a, b) for a, b in self._locked.items() if a <= address < b), None)

    def device_of(self, address: int) -> int:
        return self.find(address).device

    def array(self, address: int, nbytes: int, device: int, owner: object) -> Any:
        whole = self._allocations[address].array if nbytes else np.empty(0, np.uint8)
        array = whole.view(Owned)
        array.owner = owner
        return array

    def view(
        self, base: Any, shape: tuple[int, ...], dtype: Any, offset: int, strides: tuple[int, ...]
    ) -> Any:
        return Owned(shape, dtype, base, offset, strides)

    def pinned(self, nbytes: int) -> Bytes:
        self._check("pinned", 2)
        array = aligned(nbytes)
        start = address_of(array)
        self._locked[start] = start + nbytes
        weakref.finalize(array.base, self._locked.pop, start).atexit = False
        return array

    def is_pinned(self, array: Bytes) -> bool:
        return self._is_locked(address_of(array), array.size)

    def _is_locked(self, address: int, nbytes: int) -> bool:
        locked = (*self._locked.items(), *self.registered.items())
        return any(start <= address and address + nbytes <= stop for start, stop in locked)

    def register(self, array: Bytes) -> None:
        self._check("register")
        start, stop = address_of(array), address_of(array) + array.size
        if any(start < b and a < stop for a, b in self.registered.items()):
            raise HostError("part or all of the requested memory range is already mapped", 712)
        self.registered[start] = stop

    def unregister(self, array: Bytes) -> None:
        del self.registered[address_of(array)]

    # -- streams and events --------------------------------------------------------------------

    def stream_new(self) -> int:
        handle = next(self._ids)
        self.streams[handle] = HostStream(self._device())
        return handle

    def stream_free(self, stream: int) -> None:
        assert self.streams[stream].captured is None
        del self.streams[stream]

    def stream_synchronize(self, stream: int) -> None:
        self._check("synchronize", 700)
        s = self.streams[stream]
        if s.captured is not None:
            raise HostError("operation not permitted when stream is capturing", 900)
        self._wait("stream_synchronize")
        s.run_to(s.n_queued)

    def stream_done(self, stream: int) -> bool:
        s = self.streams[stream]
        if s.captured is not None:
            raise HostError("operation not permitted when stream is capturing", 900)
        return s.is_done(s.n_queued)

    def stream_wait(self, stream: int, event: int) -> None:
        point = self._events[event]  # as it stands now: to record the event again changes nothing
        if point.stream is not None:
            self.put(stream, Op("wait", point.run))

    def event_new(self, timed: bool = False) -> int:
        handle = next(self._ids)
        self._events[handle] = Point(device=self._device())
        return handle

    def event_free(self, event: int) -> None:
        del self._events[event]

    def event_record(self, event: int, stream: int) -> None:
        s, point = self.streams[stream], self._events[event]
        if s.device != point.device:
            raise HostError("invalid resource handle: event and stream are of two devices", 400)
        if s.captured is not None:
            raise HostError("an event was recorded in a capture", 900)
        self.put(stream, Op(RECORD, lambda: None))
        self._events[event] = Point(s, s.n_queued, point.device)

    def event_done(self, event: int) -> bool:
        return self._events[event].is_reached()

    def event_synchronize(self, event: int) -> None:
        self._check("synchronize", 700)
        self._wait("event_synchronize")
        self._events[event].run()

    def event_elapsed(self, start: int, end: int) -> float:
        """As CUDA tells it: a float32 of milliseconds."""
        return float(np.float32((self._events[end].time() - self._events[start].time()) * 1e3)) * 1e-3

    def put(self, stream: int, op: Op) -> None:
        s = self.streams[stream]
        if s.captured is not None:
            s.captured.append(op)
            return
        s.queue.append(op)
        s.n_queued += 1
        if s.device in self.eager:
            s.run_to(s.n_queued)

    # -- copies --------------------------------------------------------------------------------

    def copy(self, dst: int, src: int, nbytes: int, kind: CopyKind, stream: int) -> None:
        self.copy_2d(dst, nbytes, src, nbytes, nbytes, 1, kind, stream)

    def copy_2d(self, dst: int, dst_pitch: int, src: int, src_pitch: int, width: int, n: int,
                kind: CopyKind, stream: int) -> None:  # fmt: skip
        self._device()
        assert width <= min(dst_pitch, src_pitch)
        on_device = (dst,) * (kind != CopyKind.TO_HOST) + (src,) * (kind != CopyKind.TO_DEVICE)
        for address in on_device:
            self.find(address)

        def run() -> None:
            for i in range(n):
                ctypes.memmove(dst + i * dst_pitch, src + i * src_pitch, width)

        host, pitch = (dst, dst_pitch) if kind == CopyKind.TO_HOST else (src, src_pitch)
        is_pageable = kind != CopyKind.ON_DEVICE and not self._is_locked(host, (n - 1) * pitch + width)
        if is_pageable and (kind == CopyKind.TO_HOST or n * width > STAGED_NBYTES):
            self._wait(f"a copy of pageable memory, {kind.name},")
            self.put(stream, Op(f"copy {kind.name}", run, on_device))
            self.streams[stream].run_to(self.streams[stream].n_queued)
        else:
            self.put(stream, Op(f"copy {kind.name}", run, on_device))

    def copy_peer(
        self, dst: int, dst_device: int, src: int, src_device: int, nbytes: int, stream: int
    ) -> None:
        assert (self.device_of(dst), self.device_of(src)) == (dst_device, src_device)
        is_direct = {(dst_device, src_device), (src_device, dst_device)} & self.enabled
        copy = (lambda: None) if is_direct and self.loses else partial(ctypes.memmove, dst, src, nbytes)
        self.put(stream, Op("copy_peer", copy, (dst, src)))

    def enable_peer(self, device: int, peer: int) -> bool:
        if self.peers:
            self.enabled.add((device, peer))
        return self.peers

    def disable_peer(self, device: int, peer: int) -> None:
        self.enabled.remove((device, peer))

    def fill(self, address: int, value: int, nbytes: int, stream: int) -> None:
        self.put(stream, Op("fill", partial(ctypes.memset, address, value, nbytes), (address,)))

    # -- work ----------------------------------------------------------------------------------

    def prepare(self, launches: Sequence[Launch], device: int) -> None:
        pass

    def bind(self, launch: Launch, block: bytes, device: int) -> Call:
        assert len(launch.groups) == 3
        assert max(launch.groups[1:]) <= 65535
        name, pointers = launch.kernel.name, operands(launch.kernel, block)

        def run() -> None:
            memory = [self._mapped(address) or self._own(name, address, device) for address in pointers]
            built = build(launch.kernel, launch.defines, launch.wg, Compiler(self._capability))
            groups = grid(launch, lambda: 2 * self.resident(launch.wg, built.shared + launch.shared))
            built.run(block, groups, memory, BACKWARD, launch.shared)

        def call(stream: int) -> None:
            self._check("launch")
            assert self.streams[stream].device == device, "a kernel on a stream of another device"
            self.put(stream, Op(name, run, tuple(pointers)))

        return call

    def blas(self) -> Any:
        if "blas" in self.fail:
            raise BackendUnavailable("the test asked for no cuBLAS")
        return self._blas

    def collective(self, devices: Sequence[int]) -> Collective | None:
        return None if "nccl" in self.fail else HostCollective(self)

    # -- graphs --------------------------------------------------------------------------------

    def capture_begin(self, stream: int) -> None:
        self._check("capture")
        assert self.streams[stream].captured is None
        self.streams[stream].captured = []

    def capture_end(self, stream: int) -> int:
        s, handle = self.streams[stream], next(self._ids)
        assert s.captured is not None
        self._graphs[handle], s.captured = s.captured, None
        return handle

    def graph_free(self, graph: int) -> None:
        del self._graphs[graph]

    def exec_new(self, graph: int) -> int:
        self._check("instantiate")
        handle = next(self._ids)
        self._execs[handle] = list(self._graphs[graph])
        return handle

    def exec_update(self, executable: int, graph: int) -> bool:
        old, new = self._execs[executable], self._graphs[graph]
        if "update" in self.fail or [op.name for op in old] != [op.name for op in new]:
            return False
        self._execs[executable] = list(new)
        self.counts["update"] += 1
        return True

    def exec_launch(self, executable: int, stream: int) -> None:
        ops = self._execs[executable]

        def run() -> None:
            for op in ops:
                op.run()

        self.counts["replay"] += 1
        self.put(stream, Op("graph", run, tuple(a for op in ops for a in op.addresses)))

    def exec_free(self, executable: int) -> None:
        del self._execs[executable]

    def leftovers(self) -> dict[str, int]:
        """Return what was made and not released."""
        made: dict[str, Sized] = {"streams": self.streams, "events": self._events, "graphs": self._graphs}
        made |= {"executables": self._execs, "cuBLAS handles": range(self._blas.real.handles)}
        return {name: len(things) for name, things in made.items() if things}


ANYWHERE = {
    "device_count", "facts", "on", "memory_info", "is_out_of_memory", "array", "view", "pinned", "register",
    "unregister", "enable_peer", "disable_peer", "prepare", "bind", "blas",
}  # fmt: skip
"""Calls that need no current device. For others, CUDA would take the first, and make a context there."""


def _in_context(call: Any) -> Any:
    @wraps(call)
    def checked(self: HostDriver, *args: Any, **options: Any) -> Any:
        self._device()
        return call(self, *args, **options)

    return checked


for _name in DRIVER_CALLS - ANYWHERE:
    setattr(HostDriver, _name, _in_context(getattr(HostDriver, _name)))
