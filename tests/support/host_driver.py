"""Simulated cards: the CUDA backend's plans, arguments and order of work, with no card.

`CupyDriver` is the one that drives cards; the libcuda below it is ours, and answers here (`HostCards`). Every
address is looked up, and belongs to one device; memory is poisoned when it is allocated and when it is
freed. Streams are lists of work that runs only when something waits for it, so that a wait that was
forgotten shows as poison. Where CUDA's answer depends on time or on the machine, it is the worst one: an
event is never reached at once, copies of pageable memory wait for the stream, a device that is current has a
context, and what cards send each other directly is lost. No call may wait for the device under a stream's
lock.

Kernels are compiled by NVRTC, and their PTX is run (`tests.support.ptx`) with the very argument blocks that
the backend packed for CUDA: what is computed is computed. What only a card can tell (real asynchrony, capture
as CUDA does it) is not simulated.
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
from types import SimpleNamespace
from typing import Any

import numpy as np
from cupy.cuda import driver as cu

from ggmlb.backends.cuda.cupy_driver import Collective, CupyDriver, _bound
from ggmlb.backends.cuda.driver import ARGUMENTS, address_of
from ggmlb.backends.cuda.stream import Stream
from ggmlb.backends.gpu import Kernel, Launch, layout
from ggmlb.core.errors import BackendUnavailable
from ggmlb.interface.data import Bytes
from tests.support.host_libraries import HostNccl, QueuedBlas
from tests.support.host_streams import RECORD, HostError, HostStream, Op, Point
from tests.support.played_libcuda import SYMBOLS, answer, load
from tests.support.ptx import BACKWARD, Compiler, build

INVALID, OUT_OF_MEMORY, NO_CONTEXT, INVALID_HANDLE, ILLEGAL_ADDRESS = 1, 2, 201, 400, 700
NOT_READY, UPDATE_FAILED = 600, 910

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


class HostCards:
    """`n` cards with `capacity` bytes each: the functions of libcuda.

    Attributes:
        counts: How often graphs were launched ("replay") and updated, and pools emptied ("trim").
        peers: Whether devices say that they reach each other's memory.
        loses: Whether what they send each other directly is lost, as where an IOMMU translates.
        contexts: Devices that have a context: those that were current.
        exclusive: Devices that another process has for itself.
        eager: Devices whose work runs at once, not as late as it may.
        registered: Where host memory begins, and ends, that the driver was told of.
        attributes: What was set of kernels, by their names.
        dependent: Kernels that were launched before the ones before them ended.
        fail: Names of calls that fail from now on.
        lost: Whether all fail, as after a kernel that read beyond all memory.
        version: Of CUDA, that the driver is made for.
    """

    def __init__(self, n: int, capacity: int, capability: int) -> None:
        self._n, self._capacity, self._capability = n, capacity, capability
        self.blas = QueuedBlas(self)
        self._local = threading.local()
        self._ids = itertools.count(1)
        self._allocations: dict[int, Allocation] = {}
        self._graveyard: list[Allocation] = []
        self.streams: dict[int, HostStream] = {}
        self._events: dict[int, Point] = {}
        self._graphs: dict[int, list[Op]] = {}
        self.execs: dict[int, list[Op]] = {}
        self._kernels: dict[int, tuple[Launch, Any]] = {}
        self.attributes: dict[tuple[str, int], int] = {}
        self.dependent: list[str] = []
        self.counts: Counter[str] = Counter()
        self.peers = self.loses = True
        self.enabled: set[tuple[int, int]] = set()
        self.contexts: set[int] = set()
        self.exclusive: set[int] = set()
        self._pinned: dict[int, Bytes] = {}
        self.eager: set[int] = set()
        self.registered: dict[int, int] = {}
        self.fail: set[str] = set()
        self.lost = False
        self.version = 13000

    def check(self, call: str, status: int = INVALID) -> None:
        """Fail if the test asked for it."""
        if self.lost:
            raise HostError("the card is lost", ILLEGAL_ADDRESS)
        if call in self.fail:
            raise HostError(f"{call} fails, as the test asked", status)

    def _wait(self, call: str) -> None:
        """Called where CUDA waits for the device: other threads need the streams' locks meanwhile."""
        held = [stream for stream in STREAMS if stream.lock._is_owned()]  # type: ignore[attr-defined]
        assert not held, f"{call} waits for the device while a stream's lock is held"

    # -- devices: their handles are their numbers, their contexts' one more ----------------------

    def cuInit(self, flags: int) -> None:
        pass

    def cuGetErrorName(self, status: int, out: int) -> None:
        _write(P, out, ctypes.addressof(_ERROR))

    cuGetErrorString = cuGetErrorName

    def cuDriverGetVersion(self, out: int) -> None:
        _write(N, out, self.version)

    def cuDeviceGetCount(self, out: int) -> None:
        _write(N, out, self._n)

    def cuDeviceGet(self, out: int, device: int) -> None:
        _write(N, out, device)

    def cuDeviceGetName(self, out: int, length: int, device: int) -> None:
        ctypes.memmove(out, b"Host", 5)

    def cuDeviceGetPCIBusId(self, out: int, length: int, device: int) -> None:
        ctypes.memmove(out, b"0000:%02X:00.0" % device, 13)

    def cuDeviceTotalMem_v2(self, out: int, device: int) -> None:
        _write(L, out, self._capacity)

    def cuDeviceGetAttribute(self, out: int, attribute: int, device: int) -> None:
        major, minor = divmod(self._capability, 10)
        _write(N, out, {75: major, 76: minor, 16: 2, 81: SHARED_NBYTES, 18: 0}[attribute])

    def cuDevicePrimaryCtxRetain(self, out: int, device: int) -> None:
        if device in self.exclusive:
            raise HostError("CUDA-capable device(s) is/are busy or unavailable", 46)
        self.contexts.add(device)
        _write(P, out, device + 1)

    @property
    def current_device(self) -> int | None:
        """The thread's."""
        return getattr(self._local, "device", None)

    def _device(self) -> int:
        if self.current_device is None:
            raise HostError("called outside on(device)", NO_CONTEXT)
        return self.current_device

    def cuCtxGetCurrent(self, out: int) -> None:
        _write(P, out, 0 if self.current_device is None else self.current_device + 1)

    def cuCtxSetCurrent(self, context: int) -> None:
        assert not context or context - 1 in self.contexts
        self._local.device = context - 1 if context else None

    def _free_nbytes(self) -> int:
        device = self._device()
        return self._capacity - sum(a.array.size for a in self._allocations.values() if a.device == device)

    def cuMemGetInfo_v2(self, free: int, total: int) -> None:
        _write(L, free, self._free_nbytes())
        _write(L, total, self._capacity)

    # -- memory --------------------------------------------------------------------------------

    def cuMemAlloc_v2(self, out: int, nbytes: int) -> None:
        self.check("malloc", OUT_OF_MEMORY)
        if not 0 < nbytes <= self._free_nbytes():
            raise HostError("out of memory", OUT_OF_MEMORY if nbytes else INVALID)
        array = aligned(nbytes)
        address = address_of(array)
        self._allocations[address] = Allocation(address, array, self._device())
        _write(P, out, address)

    def cuMemFree_v2(self, address: int) -> None:
        self._device()
        for op in (op for stream in self.streams.values() for op in stream.queue):
            there = (a for a in op.addresses if not self._mapped(a))
            is_used = any(self.find(a).address == address for a in there)
            assert not is_used, f"memory freed while {op.name} is queued with it"
        gone = self._allocations.pop(address)
        gone.array[...] = POISON
        self._graveyard = [*self._graveyard[-20:], gone]

    def find(self, address: int) -> Allocation:
        """Return the allocation that an address is in."""
        bases = sorted(self._allocations)
        if i := bisect.bisect_right(bases, address):
            found = self._allocations[bases[i - 1]]
            if address < found.address + found.array.size:
                return found
        raise HostError(f"an illegal memory access at {address:#x}", ILLEGAL_ADDRESS)

    def _own(self, name: str, address: int, device: int) -> tuple[int, int]:
        """The memory that a kernel accesses, where it begins and ends: it must be of the kernel's device."""
        found = self.find(address)
        if found.device != device:
            raise HostError(f"{name} touched memory of device {found.device}", ILLEGAL_ADDRESS)
        return found.address, found.address + found.array.size

    def _mapped(self, address: int) -> tuple[int, int] | None:
        """The page-locked host memory that an address is in, which all devices access in place."""
        locked = ((a, a + array.size) for a, array in self._pinned.items())
        return next(((a, b) for a, b in locked if a <= address < b), None)

    def cuMemHostAlloc(self, out: int, nbytes: int, flags: int) -> None:
        self._device()
        self.check("pinned", OUT_OF_MEMORY)
        assert flags == 1  # CU_MEMHOSTALLOC_PORTABLE
        array = aligned(nbytes)
        self._pinned[address_of(array)] = array
        _write(P, out, address_of(array))

    def cuMemFreeHost(self, address: int) -> None:
        self._device()
        self._pinned.pop(address).fill(POISON)

    def _is_locked(self, address: int, nbytes: int) -> bool:
        pinned = ((a, a + array.size) for a, array in self._pinned.items())
        locked = (*pinned, *self.registered.items())
        return any(start <= address and address + nbytes <= stop for start, stop in locked)

    def cuPointerGetAttribute(self, out: int, attribute: int, address: int) -> None:
        self._device()
        try:
            kind, device = 2, self.find(address).device
        except HostError:
            if not self._is_locked(address, 1):
                raise HostError("memory that CUDA does not know", INVALID) from None
            kind, device = 1, self._device()
        _write(N, out, {2: kind, 9: device}[attribute])

    def cuMemHostRegister_v2(self, start: int, nbytes: int, flags: int) -> None:
        self._device()
        self.check("register")
        stop = start + nbytes
        if any(start < b and a < stop for a, b in self.registered.items()):
            raise HostError("part or all of the requested memory range is already mapped", 712)
        self.registered[start] = stop

    def cuMemHostUnregister(self, start: int) -> None:
        self._device()
        del self.registered[start]

    # -- streams and events --------------------------------------------------------------------

    def cuStreamCreate(self, out: int, flags: int) -> None:
        assert flags == 1  # CU_STREAM_NON_BLOCKING
        handle = next(self._ids)
        self.streams[handle] = HostStream(self._device())
        _write(P, out, handle)

    def cuStreamDestroy_v2(self, stream: int) -> None:
        self._device()
        assert self.streams[stream].captured is None
        del self.streams[stream]

    def _not_capturing(self, stream: int) -> HostStream:
        self._device()
        if self.streams[stream].captured is not None:
            raise HostError("operation not permitted when stream is capturing", 900)
        return self.streams[stream]

    def cuStreamSynchronize(self, stream: int) -> None:
        self.check("synchronize", ILLEGAL_ADDRESS)
        s = self._not_capturing(stream)
        self._wait("cuStreamSynchronize")
        s.run_to(s.n_queued)

    def cuStreamQuery(self, stream: int) -> int:
        s = self._not_capturing(stream)
        return 0 if s.is_done(s.n_queued) else NOT_READY

    def cuStreamWaitEvent(self, stream: int, event: int, flags: int) -> None:
        point = self._events[event]  # as it stands now: to record the event again changes nothing
        if point.stream is not None:
            self.put(stream, Op("wait", point.run))

    def cuEventCreate(self, out: int, flags: int) -> None:
        handle = next(self._ids)
        self._events[handle] = Point(device=self._device())
        _write(P, out, handle)

    def cuEventDestroy_v2(self, event: int) -> None:
        self._device()
        del self._events[event]

    def cuEventRecord(self, event: int, stream: int) -> None:
        s, point = self.streams[stream], self._events[event]
        if s.device != point.device:
            raise HostError("invalid resource handle: event and stream are of two devices", INVALID_HANDLE)
        if s.captured is not None:
            raise HostError("an event was recorded in a capture", 900)
        self.put(stream, Op(RECORD, lambda: None))
        self._events[event] = Point(s, s.n_queued, point.device)

    def cuEventQuery(self, event: int) -> int:
        self._device()
        return 0 if self._events[event].is_reached() else NOT_READY

    def cuEventSynchronize(self, event: int) -> None:
        self._device()
        self.check("synchronize", ILLEGAL_ADDRESS)
        self._wait("cuEventSynchronize")
        self._events[event].run()

    def cuEventElapsedTime(self, out: int, start: int, end: int) -> None:
        _write(ctypes.c_float, out, (self._events[end].time() - self._events[start].time()) * 1e3)

    def put(self, stream: int, op: Op) -> None:
        """Queue work, or capture it."""
        self._device()
        s = self.streams[stream]
        if s.captured is not None:
            s.captured.append(op)
            return
        s.queue.append(op)
        s.n_queued += 1
        if s.device in self.eager:
            s.run_to(s.n_queued)

    # -- copies --------------------------------------------------------------------------------

    def cuMemcpyHtoDAsync_v2(self, dst: int, src: int, nbytes: int, stream: int) -> None:
        self._copy("TO_DEVICE", (dst, nbytes), (src, nbytes), nbytes, 1, stream, src)

    def cuMemcpyDtoHAsync_v2(self, dst: int, src: int, nbytes: int, stream: int) -> None:
        self._copy("TO_HOST", (dst, nbytes), (src, nbytes), nbytes, 1, stream, dst)

    def cuMemcpyDtoDAsync_v2(self, dst: int, src: int, nbytes: int, stream: int) -> None:
        self._copy("ON_DEVICE", (dst, nbytes), (src, nbytes), nbytes, 1, stream)

    def cuMemcpy2DAsync_v2(self, about: int, stream: int) -> None:
        words = (ctypes.c_uint64 * 16).from_address(about)  # CUDA_MEMCPY2D
        (source, src_host, src, _, spitch), (target, dst_host, dst, _, dpitch) = words[2:7], words[9:14]
        name, host = {(1, 2): ("TO_DEVICE", src_host), (2, 1): ("TO_HOST", dst_host)}[source, target]
        to, here = (dst_host or dst, dpitch), (src_host or src, spitch)
        self._copy(name, to, here, words[14], words[15], stream, host)

    def _copy(
        self,
        name: str,
        to: tuple[int, int],
        source: tuple[int, int],
        width: int,
        n: int,
        stream: int,
        host: int = 0,
    ) -> None:
        """Queue a copy of pieces between places with pitches; one of pageable memory, at `host`, may wait."""
        (dst, dst_pitch), (src, src_pitch) = to, source
        assert width <= min(dst_pitch, src_pitch)
        on_device = tuple(address for address in (dst, src) if address != host)
        for address in on_device:
            self.find(address)
        assert not any(a.address <= host < a.address + a.array.size for a in self._allocations.values()), name

        def run() -> None:
            for i in range(n):
                ctypes.memmove(dst + i * dst_pitch, src + i * src_pitch, width)

        pitch = dst_pitch if host == dst else src_pitch
        self.put(stream, Op(f"copy {name}", run, on_device))
        is_pageable = bool(host) and not self._is_locked(host, (n - 1) * pitch + width)
        if is_pageable and (name == "TO_HOST" or n * width > STAGED_NBYTES):
            self._wait(f"a copy of pageable memory, {name},")
            self.streams[stream].run_to(self.streams[stream].n_queued)

    def cuMemcpyPeerAsync(
        self, dst: int, dst_context: int, src: int, src_context: int, nbytes: int, stream: int
    ) -> None:
        devices = dst_context - 1, src_context - 1
        assert (self.find(dst).device, self.find(src).device) == devices
        is_direct = {devices, devices[::-1]} & self.enabled
        copy = (lambda: None) if is_direct and self.loses else partial(ctypes.memmove, dst, src, nbytes)
        self.put(stream, Op("copy_peer", copy, (dst, src)))

    def cuDeviceCanAccessPeer(self, out: int, device: int, peer: int) -> None:
        _write(N, out, int(self.peers))

    def cuCtxEnablePeerAccess(self, context: int, flags: int) -> None:
        self.check("peer", 711)  # too many peers
        pair = self._device(), context - 1
        if pair in self.enabled:
            raise HostError("peer access is already enabled", 704)
        self.enabled.add(pair)

    def cuCtxDisablePeerAccess(self, context: int) -> None:
        self.enabled.remove((self._device(), context - 1))

    def cuMemsetD8Async(self, address: int, value: int, nbytes: int, stream: int) -> None:
        self.put(stream, Op("fill", partial(ctypes.memset, address, value, nbytes), (address,)))

    # -- work ----------------------------------------------------------------------------------

    def compiled(self, launch: Launch, dependent: bool) -> int:
        """Compile a launch's kernel; return its handle."""
        built = build(launch.kernel, launch.defines, launch.wg, Compiler(self._capability), dependent)
        handle = next(self._ids)
        self._kernels[handle] = launch, built
        return handle

    def cuFuncGetAttribute(self, out: int, attribute: int, function: int) -> None:
        assert attribute == cu.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES
        _write(N, out, self._kernels[function][1].shared)

    def cuFuncSetAttribute(self, function: int, attribute: int, value: int) -> None:
        self.attributes[self._kernels[function][0].kernel.name, attribute] = value

    def cuOccupancyMaxActiveBlocksPerMultiprocessor(
        self, out: int, function: int, wg: int, shared: int
    ) -> None:
        """As many blocks as there is room for, if they take few registers."""
        _, built = self._kernels[function]
        _write(N, out, min(2048 // wg, SHARED_NBYTES // (built.shared + shared + 1024)))

    def cuLaunchKernel(self, function: int, *rest: int) -> None:
        self.check("launch")
        (x, y, z, wg, *others), (shared, stream, params, extra) = rest[:6], rest[6:]
        launch, built = self._kernels[function]
        kinds = (ctypes.c_void_p * 5).from_address(extra)
        assert (params, kinds[0], kinds[2], kinds[4] or 0) == (0, 1, 2, 0)  # CU_LAUNCH_PARAM_*
        block = ctypes.string_at(kinds[1] or 0, ctypes.c_size_t.from_address(kinds[3] or 0).value)
        assert (wg, *others) == (launch.wg, 1, 1)
        assert max(y, z) <= 65535
        name, pointers, device = launch.kernel.name, operands(launch.kernel, block), self._device()
        if self.streams[stream].device != device:
            raise HostError("a kernel on a stream of another device", INVALID_HANDLE)

        def run() -> None:
            memory = [self._mapped(address) or self._own(name, address, device) for address in pointers]
            built.run(block, (x, y, z), memory, BACKWARD, shared)

        self.put(stream, Op(name, run, tuple(pointers)))

    def cuLaunchKernelEx(self, config: int, function: int, params: int, extra: int) -> None:
        """Launch with one attribute, PROGRAMMATIC_STREAM_SERIALIZATION; in order, as the kernel waits."""
        sizes = (ctypes.c_uint * 7).from_address(config)
        stream, attribute, n = (ctypes.c_uint64 * 3).from_address(config + 32)
        assert (n & 0xFFFFFFFF, *(ctypes.c_int * 3).from_address(attribute)) == (1, 6, 0, 1)
        launch, built = self._kernels[function]
        assert built.dependent, f"{launch.kernel.name} does not wait for the kernel before"
        self.dependent.append(launch.kernel.name)
        self.cuLaunchKernel(function, *sizes, stream, params, extra)

    # -- graphs --------------------------------------------------------------------------------

    def cuStreamBeginCapture_v2(self, stream: int, mode: int) -> None:
        self.check("capture")
        assert mode == 2  # CU_STREAM_CAPTURE_MODE_RELAXED
        self._not_capturing(stream).captured = []

    def cuStreamEndCapture(self, stream: int, out: int) -> None:
        s, handle = self.streams[stream], next(self._ids)
        assert s.captured is not None
        self._graphs[handle], s.captured = s.captured, None
        _write(P, out, handle)

    def cuGraphDestroy(self, graph: int) -> None:
        del self._graphs[graph]

    def cuGraphInstantiateWithFlags(self, out: int, graph: int, flags: int) -> None:
        self.check("instantiate")
        handle = next(self._ids)
        self.execs[handle] = list(self._graphs[graph])
        _write(P, out, handle)

    def cuGraphExecUpdate_v2(self, executable: int, graph: int, outcome: int) -> int:
        old, new = self.execs[executable], self._graphs[graph]
        if "update" in self.fail or [op.name for op in old] != [op.name for op in new]:
            return UPDATE_FAILED
        self.execs[executable] = list(new)
        self.counts["update"] += 1
        return 0

    def cuGraphLaunch(self, executable: int, stream: int) -> None:
        ops = self.execs[executable]

        def run() -> None:
            for op in ops:
                op.run()

        self.counts["replay"] += 1
        self.put(stream, Op("graph", run, tuple(a for op in ops for a in op.addresses)))

    def cuGraphExecDestroy(self, executable: int) -> None:
        del self.execs[executable]

    def leftovers(self) -> dict[str, int]:
        """Return what was made and not released."""
        made: dict[str, Sized] = {"streams": self.streams, "events": self._events, "graphs": self._graphs}
        made |= {"executables": self.execs, "cuBLAS handles": range(self.blas.real.handles)}
        return {name: len(things) for name, things in made.items() if things}


P, N, L = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t


_ERROR = ctypes.create_string_buffer(b"an error of the simulated cards")


def _write(kind: Any, address: int, value: Any) -> None:
    kind.from_address(address).value = value


ARGUMENTS.update(SYMBOLS)


class HostDriver(CupyDriver):
    """The driver of simulated cards, whose arrays, compiler, cuBLAS and NCCL are the host's too.

    Each has a libcuda of its own, where CuPy's bindings have that of the process (`played_cupy`).
    """

    def __init__(self, n_devices: int = 1, capacity: int = 1 << 30, capability: int = 90) -> None:
        self.cards = HostCards(n_devices, capacity, capability)
        super().__init__(lambda: answer(load(), self.cards))

    @contextmanager
    def on(self, device: int) -> Iterator[None]:
        context, before = self._context(device), self._get(P, "cuCtxGetCurrent")
        self._function("cuCtxSetCurrent")(context)
        try:
            yield
        finally:
            self._function("cuCtxSetCurrent")(before)

    _launch = _bound("cuLaunchKernel")

    def trim(self) -> None:
        self.cards.counts["trim"] += 1

    def array(self, address: int, nbytes: int, device: int, owner: object) -> Any:
        array = (self.cards.find(address).array if nbytes else np.empty(0, np.uint8)).view(Owned)
        array.owner = owner
        return array

    def view(
        self, base: Any, shape: tuple[int, ...], dtype: Any, offset: int, strides: tuple[int, ...]
    ) -> Any:
        return Owned(shape, dtype, base, offset, strides)

    def _compile(self, launch: Launch, device: int) -> Any:
        return SimpleNamespace(ptr=self.cards.compiled(launch, self._is_dependent(device)))

    def blas(self) -> Any:
        if "blas" in self.cards.fail:
            raise BackendUnavailable("the test asked for no cuBLAS")
        return self.cards.blas

    def collective(self, devices: Sequence[int]) -> Collective | None:
        return None if "nccl" in self.cards.fail else Collective(HostNccl(self.cards), devices)
