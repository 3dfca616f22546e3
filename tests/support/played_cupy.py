"""CuPy with no card: the installed one, but what it would ask of CUDA is answered by the played driver.

Its arrays, pointers, errors and constants are CuPy's own; arrays compute nothing. So what else runs on a card
only is run without: `CupyDriver`, `scripts/test_gpu.py`, `benchmarks/gpu.py`, each in a process that has
`played/` first on its path. docs/cuda.md says why NVIDIA's runtime does not run over a libcuda.so.1 of ours.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
import types
from collections.abc import Callable
from functools import cache
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
from tests.support.played_libcuda import answer
from tests.support.ptx import BACKWARD, Compiler
from tests.support.ptx.program import Program, Span

HOST = HostDriver(n_devices=int(os.environ.get("PLAYED_CARDS", "1")), capacity=8 << 30)

NOT_READY, UPDATE_FAILED, PEER_ALREADY_ENABLED, TOO_MANY_PEERS = 600, 910, 704, 711
ATTRIBUTES: dict[tuple[str, int], int] = {}
"""What was set of kernels, by their names."""

DEPENDENT: list[str] = []
"""Kernels that were launched before the ones before them ended."""

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
    "streamSynchronize": HOST.stream_synchronize,
    "memcpyAsync": lambda dst, src, size, kind, stream: _copy(dst, size, src, size, size, 1, kind, stream),
    "memcpy2DAsync": _copy,
    "memcpyPeerAsync": HOST.copy_peer,
    "memsetAsync": HOST.fill,
}
"""What answers functions of CuPy's runtime."""

NEEDS_NO_DEVICE = {
    "driverGetVersion", "runtimeGetVersion", "getDeviceCount", "getDevice", "setDevice",
    "getDeviceProperties", "deviceCanAccessPeer",
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


def _launch_dependent(config: int, f: int, params: int, extra: int) -> None:
    """Launch with one attribute, PROGRAMMATIC_STREAM_SERIALIZATION; in order, as the kernel waits."""
    sizes = (ctypes.c_uint * 7).from_address(config)
    stream, attribute, n = (ctypes.c_uint64 * 3).from_address(config + 32)
    assert (n & 0xFFFFFFFF, *(ctypes.c_int * 3).from_address(attribute)) == (1, 6, 0, 1)
    DEPENDENT.append(_programs[f - 1][0])
    _launch(f, *sizes, stream, params, extra)


# -- libcuda ---------------------------------------------------------------------------------------


def _write(kind: Any, address: int, value: Any) -> None:
    kind.from_address(address).value = value


def _made(name: str, make: Callable[..., int], *kinds: Any) -> None:
    """Answer a function that writes the handle it makes where its first argument says."""
    answer(name, lambda out, *args: _write(P, out, make(*args)), P, *kinds)


@cache
def _told(status: int) -> tuple[Any, Any]:
    name, _, why = str(rt.CUDARuntimeError(status)).partition(": ")
    return ctypes.create_string_buffer(name.encode()), ctypes.create_string_buffer(why.encode())


def _error(part: int) -> Callable[[int, int], None]:
    return lambda status, out: _write(P, out, ctypes.addressof(_told(status)[part]))


def _retain(out: int, device: int) -> None:
    """Make a device's context, whose handle is the device's number and 1."""
    with HOST.on(device):
        _write(P, out, device + 1)


def _shared(out: int, attribute: int, f: int) -> None:
    assert attribute == cu.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES
    _write(N, out, _programs[f - 1][1].shared_nbytes)


def _resident(out: int, f: int, wg: int, shared: int) -> None:
    _write(N, out, HOST.resident(wg, _programs[f - 1][1].shared_nbytes + shared))


P, N, U, L = ctypes.c_void_p, ctypes.c_int, ctypes.c_uint, ctypes.c_size_t


def _answer_all() -> None:
    answer("cuInit", lambda flags: 0, U)
    answer("cuGetErrorName", _error(0), N, P)
    answer("cuGetErrorString", _error(1), N, P)
    answer("cuDeviceGet", lambda out, device: _write(N, out, device), P, N)
    answer("cuDevicePrimaryCtxRetain", _retain, P, N)
    current = lambda: 0 if HOST.current_device is None else HOST.current_device + 1  # noqa: E731
    _made("cuCtxGetCurrent", current)
    answer("cuCtxSetCurrent", lambda context: HOST.set_current(context - 1 if context else None), P)
    _made("cuStreamCreate", lambda flags: {rt.streamNonBlocking: HOST.stream_new}[flags](), U)
    answer("cuStreamDestroy_v2", HOST.stream_free, P)
    answer("cuStreamSynchronize", HOST.stream_synchronize, P)
    answer("cuStreamQuery", lambda stream: 0 if HOST.stream_done(stream) else NOT_READY, P)
    answer("cuStreamWaitEvent", lambda stream, event, flags: HOST.stream_wait(stream, event), P, P, U)
    _made("cuEventCreate", lambda flags: HOST.event_new(flags == rt.eventDefault), U)
    answer("cuEventDestroy_v2", HOST.event_free, P)
    answer("cuEventRecord", HOST.event_record, P, P)
    answer("cuEventQuery", lambda event: 0 if HOST.event_done(event) else NOT_READY, P)
    answer("cuEventSynchronize", HOST.event_synchronize, P)
    elapsed = lambda out, a, b: _write(ctypes.c_float, out, HOST.event_elapsed(a, b) * 1e3)  # noqa: E731
    answer("cuEventElapsedTime", elapsed, P, P, P)
    answer("cuStreamBeginCapture_v2", lambda stream, mode: {2: HOST.capture_begin}[mode](stream), P, N)
    answer("cuStreamEndCapture", lambda stream, out: _write(P, out, HOST.capture_end(stream)), P, P)
    answer("cuGraphDestroy", HOST.graph_free, P)
    _made("cuGraphInstantiateWithFlags", lambda graph, flags: HOST.exec_new(graph), P, L)
    update = lambda old, graph, out: 0 if HOST.exec_update(old, graph) else UPDATE_FAILED  # noqa: E731
    answer("cuGraphExecUpdate_v2", update, P, P, P)
    answer("cuGraphLaunch", HOST.exec_launch, P, P)
    answer("cuGraphExecDestroy", HOST.exec_free, P)
    answer("cuLaunchKernel", _launch, P, U, U, U, U, U, U, U, P, P, P)
    answer("cuLaunchKernelEx", _launch_dependent, P, P, P, P)
    answer("cuFuncGetAttribute", _shared, P, N, P)
    setting = lambda f, attribute, value: ATTRIBUTES.update({(_programs[f - 1][0], attribute): value})  # noqa: E731
    answer("cuFuncSetAttribute", setting, P, N, N)
    answer("cuOccupancyMaxActiveBlocksPerMultiprocessor", _resident, P, P, N, L)


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


def _library(name: Any, *args: Any, **options: Any) -> Any:
    """Load a library, but for those of CUDA that the backend loads itself."""
    is_ours = sys._getframe(1).f_globals.get("__name__", "").startswith("ggmlb.")
    file = Path(name).name if is_ours and isinstance(name, str) else ""
    if file.startswith("libcuda.so") and "libcuda" in HOST.fail:
        raise OSError(f"{file}: cannot open shared object file")
    return HOST.blas() if file.startswith("libcublas.so") else _load(name, *args, **options)


def install() -> None:
    """Put all of it in CuPy's places, which must be there."""
    _answer_all()
    pool = SimpleNamespace(free_all_blocks=HOST.trim)
    places: dict[Any, dict[str, Any]] = {
        rt: {name: _answered(name, function) for name, function in CALLS.items()},
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
