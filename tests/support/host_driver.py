"""CUDA's driver played by the host: the CUDA backend's plans, arguments and order of work, with no card.

Memory (`host_memory`) is poisoned when it is allocated and when it is freed. Streams are lists of work that
runs only when something waits for it, so that a wait that was forgotten shows as poison. Kernels are the
portable texts, run by PoCL from the very argument blocks that the backend packed for CUDA: what is computed
is computed. What only a card can tell (the CUDA compiler's code, real asynchrony, capture as CUDA does it) is
not played.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence, Sized
from typing import Any

import numpy as np

from ggmlb.backends.cuda.arguments import layout
from ggmlb.backends.cuda.driver import Call, Collective, CopyKind
from ggmlb.backends.gpu import Launch
from ggmlb.backends.gpu.source import PORTABLE
from ggmlb.core.errors import BackendUnavailable
from tests.support.host_kernels import PortableKernels, run_cuda
from tests.support.host_libraries import HostCollective, QueuedBlas
from tests.support.host_memory import HostMemory
from tests.support.host_streams import HostError, HostStream, Op, Point


class HostDriver(HostMemory):
    """`n_devices` cards with `capacity` bytes each.

    Attributes:
        log: The names of all that was queued, in order.
        counts: How often graphs were captured, updated and launched.
        peers: Whether devices reach each other's memory.
        eager: Devices whose work runs at once, not as late as it may.
    """

    errors = (HostError,)

    def __init__(self, n_devices: int = 1, capacity: int = 1 << 30, capability: int = 90) -> None:
        self._kernels = PortableKernels()
        super().__init__(n_devices, capacity, capability, self._kernels.buffer)
        self._blas = QueuedBlas(self)
        self._ids = itertools.count(1)
        self.streams: dict[int, HostStream] = {}
        self._events: dict[int, Point] = {}
        self._graphs: dict[int, list[Op]] = {}
        self._execs: dict[int, list[Op]] = {}
        self.log: list[str] = []
        self.counts = {"capture": 0, "instantiate": 0, "update": 0, "replay": 0, "trim": 0}
        self.peers = True
        self.eager: set[int] = set()

    def free(self, address: int) -> None:
        for stream in self.streams.values():
            for op in stream.queue:
                assert not any(self._find(a)[0] == address for a in op.addresses), (
                    f"memory freed while {op.name} is queued with it"
                )
        super().free(address)

    def trim(self) -> None:
        self.counts["trim"] += 1

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
        s.run_to(s.n_queued)

    def stream_wait(self, stream: int, event: int) -> None:
        point = self._events[event]
        other, n = point.stream, point.n  # as it stands now: to record the event again changes nothing
        if other is not None:
            self.put(stream, Op("wait", lambda: other.run_to(n)))

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
        self._events[event] = Point(s, s.n_queued, point.device)

    def event_done(self, event: int) -> bool:
        return self._events[event].is_reached()

    def event_synchronize(self, event: int) -> None:
        self._check("synchronize", 700)
        point = self._events[event]
        if point.stream is not None:
            point.stream.run_to(point.n)

    def event_elapsed(self, start: int, end: int) -> float:
        """As CUDA tells it: a float32 of milliseconds."""
        return float(np.float32((self._events[end].time() - self._events[start].time()) * 1e3)) * 1e-3

    def put(self, stream: int, op: Op) -> None:
        s = self.streams[stream]
        if s.captured is not None:
            s.captured.append(op)
            return
        self.log.append(op.name)
        s.queue.append(op)
        s.n_queued += 1
        if s.device in self.eager:
            s.run_to(s.n_queued)

    # -- copies --------------------------------------------------------------------------------

    def copy(self, dst: int, src: int, nbytes: int, kind: CopyKind, stream: int) -> None:
        self._device()
        on_device = {CopyKind.TO_DEVICE: (dst,), CopyKind.TO_HOST: (src,), CopyKind.ON_DEVICE: (dst, src)}[
            kind
        ]
        for address in on_device:
            self._find(address)
        self.put(stream, Op(f"copy {kind.name}", lambda: _move(dst, src, nbytes), on_device))

    def copy_2d(
        self,
        dst: int,
        dst_pitch: int,
        src: int,
        src_pitch: int,
        width: int,
        n: int,
        kind: CopyKind,
        stream: int,
    ) -> None:
        assert width <= min(dst_pitch, src_pitch)
        on_device = {CopyKind.TO_DEVICE: (dst,), CopyKind.TO_HOST: (src,), CopyKind.ON_DEVICE: (dst, src)}[
            kind
        ]

        def run() -> None:
            for i in range(n):
                _move(dst + i * dst_pitch, src + i * src_pitch, width)

        self.put(stream, Op("copy_2d", run, on_device))

    def copy_peer(
        self, dst: int, dst_device: int, src: int, src_device: int, nbytes: int, stream: int
    ) -> None:
        for address, device in ((dst, dst_device), (src, src_device)):
            assert self._allocations[self._find(address)[0]].device == device
        self.put(stream, Op("copy_peer", lambda: _move(dst, src, nbytes), (dst, src)))

    def enable_peer(self, device: int, peer: int) -> bool:
        return self.peers

    def fill(self, address: int, value: int, nbytes: int, stream: int) -> None:
        self.put(stream, Op("fill", lambda: _set(address, value, nbytes), (address,)))

    # -- work ----------------------------------------------------------------------------------

    def bind(self, launch: Launch, block: bytes, device: int) -> Call:
        assert len(launch.groups) == 3
        assert max(launch.groups[1:]) <= 65535
        values = layout(launch.kernel).unpack(block)
        pointers = self._pointers(launch)

        def call(stream: int) -> None:
            self._check("launch")
            assert self.streams[stream].device == device, "a kernel on a stream of another device"
            addresses = tuple(values[i] for i in pointers if values[i])
            self.put(stream, Op(launch.kernel.name, lambda: self._run(launch, block, device), addresses))

        return call

    @staticmethod
    def _pointers(launch: Launch) -> list[int]:
        found, i = [], 0
        for param in launch.kernel.params:
            if param.kind == "tensor":
                found.append(i)
            i += 10 if param.kind == "tensor" else 1
        return found

    def _run(self, launch: Launch, block: bytes, device: int) -> None:
        values = layout(launch.kernel).unpack(block)
        for i in self._pointers(launch):
            allocation = self._allocations[self._find(values[i])[0]]
            if allocation.device != device:
                raise HostError(f"{launch.kernel.name} touched memory of device {allocation.device}", 700)
        if launch.kernel.package == PORTABLE:
            self._kernels.run(launch, block, self._cl_buffer)
        else:
            run_cuda(launch, block, self._span)

    def _span(self, address: int) -> tuple[int, int]:
        base, _ = self._find(address)
        return base, base + self._allocations[base].array.size

    def _cl_buffer(self, address: int) -> tuple[Any, int]:
        base, delta = self._find(address)
        return self._allocations[base].cl_buffer, delta

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
        s = self.streams[stream]
        assert s.captured is not None
        handle = next(self._ids)
        self._graphs[handle], s.captured = s.captured, None
        self.counts["capture"] += 1
        return handle

    def graph_free(self, graph: int) -> None:
        del self._graphs[graph]

    def exec_new(self, graph: int) -> int:
        self._check("instantiate")
        handle = next(self._ids)
        self._execs[handle] = list(self._graphs[graph])
        self.counts["instantiate"] += 1
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
        made: dict[str, Sized] = {
            "streams": self.streams,
            "events": self._events,
            "graphs": self._graphs,
            "executables": self._execs,
        }
        found = {name: len(things) for name, things in made.items()}
        found["cuBLAS handles"] = self._blas.real.handles
        return {name: n for name, n in found.items() if n}


def _move(dst: int, src: int, nbytes: int) -> None:
    ctypes.memmove(dst, src, nbytes)


def _set(address: int, value: int, nbytes: int) -> None:
    ctypes.memset(address, value, nbytes)
