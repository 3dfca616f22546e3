"""CuPy with no card: the installed one, but what it would ask of CUDA is answered by the played driver.

Its arrays, pointers, errors and constants are CuPy's own; arrays compute nothing. So what else runs on a card
only is run without: `CupyDriver`, `scripts/test_gpu.py`, `benchmarks/gpu.py`, each in a process that has
`played/` first on its path. docs/cuda.md says why CuPy does not run over a libcuda.so.1 of ours.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import cupy
import numpy as np
from cupy.cuda import driver as cu
from cupy.cuda import runtime as rt
from cupy.cuda.compiler import CompileException

from ggmlb.backends.cuda.driver import CopyKind, address_of
from ggmlb.core.dtypes import DType
from ggmlb.interface.data import Bytes
from tests.support.host_driver import HostDriver
from tests.support.host_libraries import HostCollective
from tests.support.host_streams import HostError, Op
from tests.support.ptx import BACKWARD, Compiler
from tests.support.ptx.program import Program, Span

HOST = HostDriver(n_devices=int(os.environ.get("PLAYED_CARDS", "1")), capacity=8 << 30)

NOT_READY, PEER_ALREADY_ENABLED, TOO_MANY_PEERS = 600, 704, 711
ATTRIBUTES: dict[tuple[str, int], int] = {}
"""What was set of kernels, by their names."""

_pinned: dict[int, Any] = {}
_programs: list[tuple[str, Program]] = []


def _raw(address: int, nbytes: int) -> Bytes:
    """View memory by its address."""
    memory: Any = (ctypes.c_ubyte * nbytes).from_address(address) if nbytes else b""
    return np.frombuffer(memory, np.uint8)


# -- the runtime -----------------------------------------------------------------------------------


def _properties(device: int) -> dict[str, Any]:
    facts = HOST.facts(device)
    major, minor = divmod(facts.capability, 10)
    domain, bus, slot = (int(part, 16) for part in facts.pci_bus_id.removesuffix(".0").split(":"))
    place = {"pciDomainID": domain, "pciBusID": bus, "pciDeviceID": slot}
    about = {
        "name": facts.name.encode(),
        "integrated": int(facts.is_integrated),
        "totalGlobalMem": facts.nbytes,
    }
    units = {"multiProcessorCount": facts.n_units, "sharedMemPerMultiprocessor": facts.shared}
    return {**about, **place, **units, "major": major, "minor": minor}


def _attributes(ptr: int) -> SimpleNamespace:
    try:
        return SimpleNamespace(type=2, device=HOST.device_of(ptr))
    except HostError:
        return SimpleNamespace(type=int(HOST._is_locked(ptr, 1)), device=-2)


def _pin(size: int) -> int:
    array = HOST.pinned(size)
    _pinned[address_of(array)] = array
    return address_of(array)


def _copy(dst: int, dpitch: int, src: int, spitch: int, width: int, n: int, kind: int, stream: int) -> None:
    """Queue a copy, which must go the way that it says."""
    from_device, to_device = (_attributes(address).type == 2 for address in (src, dst))
    if (from_device, to_device) != (kind != CopyKind.TO_DEVICE, kind != CopyKind.TO_HOST):
        raise HostError(f"an invalid direction of a copy: {kind}", 21)
    with HOST.on(HOST.current_device or 0):
        HOST.copy_2d(dst, dpitch, src, spitch, width, n, CopyKind(kind), stream)


def _enable_peer(peer: int) -> None:
    HOST._check("peer", TOO_MANY_PEERS)
    pair = HOST._device(), peer
    if pair in HOST.enabled:
        raise HostError("peer access is already enabled", PEER_ALREADY_ENABLED)
    HOST.enable_peer(*pair)


CALLS: dict[str, Callable[..., Any]] = {
    "driverGetVersion": lambda: 13000,
    "runtimeGetVersion": lambda: 13020,
    "getDeviceCount": HOST.device_count,
    "getDevice": lambda: HOST.current_device or 0,
    "setDevice": HOST.set_current,
    "getDeviceProperties": _properties,
    "deviceSynchronize": lambda: [*map(HOST.stream_synchronize, list(HOST.streams))],
    "deviceCanAccessPeer": lambda device, peerDevice: int(HOST.peers),
    "deviceEnablePeerAccess": _enable_peer,
    "deviceDisablePeerAccess": lambda peerDevice: HOST.disable_peer(HOST._device(), peerDevice),
    "memGetInfo": lambda: HOST.memory_info(HOST._device()),
    "malloc": HOST.malloc,
    "free": HOST.free,
    "pointerGetAttributes": _attributes,
    "hostAlloc": lambda size, flags: _pin(size),
    "freeHost": lambda ptr: _pinned.pop(ptr).fill(0xFF),
    "hostRegister": lambda ptr, size, flags: HOST.register(_raw(ptr, size)),
    "hostUnregister": lambda ptr: HOST.unregister(_raw(ptr, 1)),
    "streamCreateWithFlags": lambda flags: {rt.streamNonBlocking: HOST.stream_new}[flags](),
    "streamDestroy": HOST.stream_free,
    "streamSynchronize": HOST.stream_synchronize,
    "streamQuery": lambda stream: 0 if HOST.stream_done(stream) else NOT_READY,
    "streamWaitEvent": lambda stream, event, flags=0: HOST.stream_wait(stream, event),
    "streamBeginCapture": lambda stream, mode=rt.streamCaptureModeRelaxed: HOST.capture_begin(stream),
    "streamEndCapture": HOST.capture_end,
    "eventCreateWithFlags": lambda flags: HOST.event_new(flags == rt.eventDefault),
    "eventDestroy": HOST.event_free,
    "eventRecord": HOST.event_record,
    "eventQuery": lambda event: 0 if HOST.event_done(event) else NOT_READY,
    "eventSynchronize": HOST.event_synchronize,
    "eventElapsedTime": lambda start, end: HOST.event_elapsed(start, end) * 1e3,
    "memcpyAsync": lambda dst, src, size, kind, stream: _copy(dst, size, src, size, size, 1, kind, stream),
    "memcpy2DAsync": _copy,
    "memcpyPeerAsync": HOST.copy_peer,
    "memsetAsync": HOST.fill,
    "graphInstantiate": HOST.exec_new,
    "graphDestroy": HOST.graph_free,
    "graphLaunch": HOST.exec_launch,
    "graphExecDestroy": HOST.exec_free,
}
"""What answers functions of CuPy's runtime."""

NEEDS_NO_DEVICE = {
    "driverGetVersion", "runtimeGetVersion", "getDeviceCount", "getDevice", "setDevice",
    "getDeviceProperties", "deviceCanAccessPeer", "launchKernel",
}  # fmt: skip
"""What makes no context where none is current."""


def _answered(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        assert all(isinstance(arg, (int, np.integer)) for arg in args), f"{name} takes numbers, not {args}"
        try:
            if name in NEEDS_NO_DEVICE:
                return function(*args)
            with HOST.on(
                HOST.current_device or 0
            ):  # as the runtime does, with a context for the first device
                return function(*args)
        except HostError as error:
            raise rt.CUDARuntimeError(error.status) from error

    return call


# -- kernels ---------------------------------------------------------------------------------------


class RawModule:
    def __init__(self, *, code: str, options: tuple[str, ...] = (), backend: str = "nvrtc") -> None:
        self._code = code

    def get_function(self, name: str) -> Any:
        if "compile" in HOST.fail:
            log = f"{name}.cu(3): warning: no\n{name}.cu(7): error: identifier is undefined\n1 error detected"
            raise CompileException(log, self._code, name, ())
        capability = HOST.facts(HOST.current_device or 0).capability
        _programs.append((name, Program(Compiler(capability).ptx(self._code))))
        return SimpleNamespace(kernel=SimpleNamespace(ptr=len(_programs)))


class RawKernel:
    """The tests' only one: it spins for as many cycles as its argument says."""

    def __init__(self, code: str, name: str) -> None:
        assert name == "spin"

    def __call__(self, grid: Any, block: Any, args: Any) -> None:
        (cycles,) = args
        HOST.put(Stream.current[-1].ptr, Op("spin", lambda: time.sleep(cycles / 2e9)))


def _launch(f: int, *rest: Any) -> None:
    name, program = _programs[f - 1]
    grid, block, (shared, stream, params, extra) = rest[:3], rest[3:6], rest[6:]
    kinds = (ctypes.c_void_p * 5).from_address(extra)
    assert (params, kinds[0], kinds[2], kinds[4] or 0) == (0, 1, 2, 0)  # CU_LAUNCH_PARAM_*
    arguments = ctypes.string_at(kinds[1] or 0, ctypes.c_size_t.from_address(kinds[3] or 0).value)
    device = HOST.streams[stream].device

    def run() -> None:
        memory = [a for a in HOST._allocations.values() if a.device == device]
        spans = [Span(a.address, a.address + a.array.size) for a in memory]
        program.launch(grid, block, arguments, spans, BACKWARD, shared)

    HOST._check("launch")
    HOST._device()
    HOST.put(stream, Op(name, run))


# -- streams and memory ----------------------------------------------------------------------------


class Stream:
    """A stream that is current within a block."""

    current: ClassVar[list[Stream]] = []

    def __init__(self, ptr: int | None = None, non_blocking: bool = False) -> None:
        with HOST.on(HOST.current_device or 0):
            self.ptr = HOST.stream_new() if ptr is None else ptr

    @classmethod
    def from_external(cls, obj: Any) -> Stream:
        version, ptr = obj.__cuda_stream__()
        assert (version, type(ptr)) == (0, int)
        return cls(ptr)

    def __enter__(self) -> Stream:
        self.current.append(self)
        return self

    def __exit__(self, *args: object) -> None:
        self.current.pop()

    def synchronize(self) -> None:
        rt.streamSynchronize(self.ptr)


class Memory:
    """Memory of the current device, which is freed with this."""

    def __init__(self, size: int) -> None:
        with HOST.on(HOST.current_device or 0):
            self.ptr = HOST.malloc(size)

    def __del__(self) -> None:
        rt.free(self.ptr)


# -- NCCL and other libraries ------------------------------------------------------------------------


class _Nccl(types.ModuleType):
    """NCCL as CuPy binds it."""

    available = True
    NCCL_FLOAT16, NCCL_FLOAT32, NCCL_BFLOAT16, NCCL_SUM = 6, 7, 9, 0
    NcclError = type("NcclError", (RuntimeError,), {})
    group: list[tuple[int, int, int, int]] | None = None

    def groupStart(self) -> None:
        assert self.group is None
        self.group = []

    def groupEnd(self) -> None:
        """Queue the sums of all devices; the first one's tells how many of what."""
        assert self.group is not None
        calls, self.group = self.group, None
        if "sum" in HOST.fail:
            raise self.NcclError("a call of the group failed")
        dtype = {6: DType.F16, 7: DType.F32, 9: DType.BF16}[calls[0][2]]
        places = [(place, stream) for place, *_, stream in calls]
        HostCollective(HOST).all_reduce(places, calls[0][1], dtype)

    class NcclCommunicator:
        @staticmethod
        def initAll(devices: Any) -> list[Any]:
            return [NCCL.NcclCommunicator() for _ in devices]

        def allReduce(self, send: int, receive: int, count: int, datatype: int, op: int, stream: int) -> None:
            assert (send, op) == (receive, NCCL.NCCL_SUM)
            assert NCCL.group is not None, "one thread calls for all devices: in a group"
            if NCCL.group and "sum" in HOST.fail:
                raise NCCL.NcclError("unhandled system error")
            NCCL.group.append((send, count, datatype, stream))

        def destroy(self) -> None:
            pass


NCCL = _Nccl("cupy.cuda.nccl")
_load = ctypes.CDLL


def _device(handle: Any, device: int) -> int:
    handle._obj.value = device
    return 0


def _retain(context: Any, device: Any) -> int:
    """Make a device's context, whose handle is the device's number and 1."""
    if device.value in HOST.exclusive:
        return 46
    with HOST.on(device.value):
        context._obj.value = device.value + 1
    return 0


def _library(name: Any, *args: Any, **options: Any) -> Any:
    """Load a library, but for those of CUDA that the backend loads itself."""
    is_ours = sys._getframe(1).f_globals.get("__name__", "").startswith("ggmlb.")
    file = Path(name).name if is_ours and isinstance(name, str) else ""
    if file.startswith("libcuda.so"):
        if "libcuda" in HOST.fail:
            raise OSError(f"{file}: cannot open shared object file")
        return SimpleNamespace(
            cuGraphExecUpdate_v2=lambda old, graph, _: 0 if HOST.exec_update(old.value, graph.value) else 910,
            cuInit=lambda flags: 0,
            cuDeviceGet=_device,
            cuDevicePrimaryCtxRetain=_retain,
        )
    return HOST.blas() if file.startswith("libcublas.so") else _load(name, *args, **options)


def install() -> None:
    """Put all of it in CuPy's places, which must be there."""
    pool = SimpleNamespace(free_all_blocks=HOST.trim)
    places: dict[Any, dict[str, Any]] = {
        rt: {name: _answered(name, function) for name, function in CALLS.items()},
        cu: {
            "launchKernel": _answered("launchKernel", _launch),
            "funcGetAttribute": lambda attribute, f: (
                {cu.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES: _programs[f - 1][1].shared_nbytes}[attribute]
            ),
            "funcSetAttribute": lambda f, attribute, value: ATTRIBUTES.update(
                {(_programs[f - 1][0], attribute): value}
            ),
            "occupancyMaxActiveBlocksPerMultiprocessor": lambda func, blockSize, dynamicSMemSize: (
                HOST.resident(blockSize, _programs[func - 1][1].shared_nbytes + dynamicSMemSize)
            ),
            "ctxGetCurrent": lambda: 0 if HOST.current_device is None else HOST.current_device + 1,
            "ctxSetCurrent": lambda ctx: HOST.set_current(ctx - 1 if ctx else None),
        },
        ctypes: {"CDLL": _library},
        cupy.cuda: {
            "is_available": lambda: True, "Device": lambda device=0: HOST.on(device), "alloc": Memory,
            "alloc_pinned_memory": lambda size: np.zeros(size, np.uint8), "Stream": Stream, "nccl": NCCL,
        },
        cupy: {
            "RawModule": RawModule, "RawKernel": RawKernel, "get_default_memory_pool": lambda: pool,
            "get_default_pinned_memory_pool": lambda: pool,
        },
    }  # fmt: skip
    sys.modules["cupy.cuda.nccl"] = NCCL
    for place, names in places.items():
        for name, value in names.items():
            assert hasattr(place, name) or name == "nccl", f"{place} has no {name}"
            setattr(place, name, value)
