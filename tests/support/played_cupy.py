"""CuPy with no card: the installed one, but what it would ask of CUDA is answered by the played driver.

Its arrays, pointers, errors and constants are CuPy's own. So what else runs on a card only is run without:
`CupyDriver`, `tests/gpu`, `scripts/test_gpu.py`, `benchmarks/gpu.py`, each in a process that has `played/`
first on its path. docs/cuda.md says why CuPy does not run over a libcuda.so.1 of ours.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
import threading
import time
import types
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cupy
import numpy as np
from cupy.cuda import driver as cu
from cupy.cuda import runtime as rt
from cupy.cuda.compiler import CompileException

from ggmlb.backends.cuda.driver import CopyKind, address_of
from ggmlb.core.dtypes import DType
from ggmlb.interface.data import Bytes
from tests.support.host_driver import HostDriver
from tests.support.host_streams import HostError, Op
from tests.support.ptx import BACKWARD, Compiler
from tests.support.ptx.program import Program, Span

HOST = HostDriver(n_devices=int(os.environ.get("PLAYED_CARDS", "1")), capacity=8 << 30)

NOT_READY, PEER_ALREADY_ENABLED, TOO_MANY_PEERS = 600, 704, 711
LEGACY = 1
"""The handle of the default stream, which has nothing to do here."""

_peers: set[tuple[int, int]] = set()
_pinned: dict[int, Any] = {}
_programs: list[tuple[str, Program]] = []
_local = threading.local()


def _raw(address: int, nbytes: int) -> Bytes:
    """View memory by its address."""
    memory: Any = (ctypes.c_ubyte * nbytes).from_address(address) if nbytes else b""
    return np.frombuffer(memory, np.uint8)


# -- the runtime -----------------------------------------------------------------------------------


def _set_device(device: int) -> None:
    HOST._local.device = None if device < 0 else device


def _properties(device: int) -> dict[str, Any]:
    facts = HOST.facts(device)
    major, minor = divmod(facts.capability, 10)
    domain, bus, slot = (int(part, 16) for part in facts.pci_bus_id.removesuffix(".0").split(":"))
    place = {"pciDomainID": domain, "pciBusID": bus, "pciDeviceID": slot}
    about = {"name": facts.name.encode(), "integrated": int(facts.is_integrated)}
    return {**about, **place, "major": major, "minor": minor, "multiProcessorCount": facts.n_units}


def _new_stream(flags: int) -> int:
    assert flags == rt.streamNonBlocking
    return HOST.stream_new()


def _synchronize(stream: int) -> None:
    if stream > LEGACY or stream in HOST.streams:
        HOST.stream_synchronize(stream)


def _attributes(ptr: int) -> SimpleNamespace:
    try:
        return SimpleNamespace(type=2, device=HOST.device_of(ptr))
    except HostError:
        return SimpleNamespace(type=0, device=-2)  # host memory that CUDA knows nothing of


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
    if pair in _peers:
        raise HostError("peer access is already enabled", PEER_ALREADY_ENABLED)
    _peers.add(pair)


CALLS: dict[str, Callable[..., Any]] = {
    "driverGetVersion": lambda: 13000,
    "runtimeGetVersion": lambda: 13020,
    "getDeviceCount": HOST.device_count,
    # -1 where none was set, so that it is set to none again, and its use is noticed
    "getDevice": lambda: -1 if HOST.current_device is None else HOST.current_device,
    "setDevice": _set_device,
    "getDeviceProperties": _properties,
    "deviceSynchronize": lambda: [*map(HOST.stream_synchronize, list(HOST.streams))],
    "deviceCanAccessPeer": lambda device, peerDevice: int(HOST.peers),
    "deviceEnablePeerAccess": _enable_peer,
    "memGetInfo": lambda: HOST.memory_info(HOST._device()),
    "malloc": HOST.malloc,
    "free": HOST.free,
    "pointerGetAttributes": _attributes,
    "hostAlloc": lambda size, flags: _pin(size),
    "freeHost": lambda ptr: _pinned.pop(ptr).fill(0xFF),
    "hostRegister": lambda ptr, size, flags: HOST.register(_raw(ptr, size)),
    "hostUnregister": lambda ptr: HOST.unregister(_raw(ptr, 1)),
    "streamCreateWithFlags": _new_stream,
    "streamDestroy": HOST.stream_free,
    "streamSynchronize": _synchronize,
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


def _answered(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any) -> Any:
        assert all(isinstance(arg, (int, np.integer)) for arg in args), f"{name} takes numbers, not {args}"
        try:
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
        HOST.put(_current_stream().ptr, Op("spin", lambda: time.sleep(cycles / 2e9)))


def _launch(
    f: int,
    gx: int,
    gy: int,
    gz: int,
    bx: int,
    by: int,
    bz: int,
    shared: int,
    stream: int,
    params: int,
    extra: int,
) -> None:
    name, program = _programs[f - 1]
    kinds = (ctypes.c_void_p * 5).from_address(extra)
    assert (params, kinds[0], kinds[2], kinds[4] or 0) == (0, 1, 2, 0)  # CU_LAUNCH_PARAM_*
    arguments = ctypes.string_at(kinds[1] or 0, ctypes.c_size_t.from_address(kinds[3] or 0).value)
    device = HOST.streams[stream].device

    def run() -> None:
        memory = [a for a in HOST._allocations.values() if a.device == device]
        spans = [Span(a.address, a.address + a.array.size) for a in memory]
        program.launch((gx, gy, gz), (bx, by, bz), arguments, spans, BACKWARD, shared)

    HOST._check("launch")
    HOST.put(stream, Op(name, run))


# -- streams and memory ----------------------------------------------------------------------------


class Stream:
    """A stream that is current within a block: what was queued on it runs before, as NumPy has no streams."""

    def __init__(self, null: bool = False, non_blocking: bool = False) -> None:
        with HOST.on(HOST.current_device or 0):
            self.ptr = 0 if null else HOST.stream_new()

    @classmethod
    def from_external(cls, obj: Any) -> Stream:
        stream = cls(null=True)
        version, stream.ptr = obj.__cuda_stream__()
        assert (version, type(stream.ptr)) == (0, int)
        return stream

    def __enter__(self) -> Stream:
        self.synchronize()
        self._before, _local.stream = _current_stream(), self
        return self

    def __exit__(self, *args: object) -> None:
        _local.stream = self._before

    def synchronize(self) -> None:
        rt.streamSynchronize(self.ptr)


def _current_stream() -> Stream:
    return getattr(_local, "stream", None) or Stream(null=True)


def _alloc(size: int) -> Any:
    """Return memory that is freed with its last array."""
    device = HOST.current_device or 0
    with HOST.on(device):
        address = HOST.malloc(max(size, 1))
    weakref.finalize(owner := set[None](), HOST.free, address)
    return cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(address, size, owner, device), 0)


# -- arrays: CuPy's, whose numbers NumPy reads and computes ------------------------------------------


def _numbers(array: Any) -> Any:
    """Return the memory of an array as NumPy sees it."""
    span = array.dtype.itemsize + sum(
        (n - 1) * step for n, step in zip(array.shape, array.strides, strict=True)
    )
    return np.ndarray(
        array.shape, array.dtype, _raw(array.data.ptr, span if array.size else 0), 0, array.strides
    )


def _arange(*args: Any, dtype: Any = None) -> Any:
    values = np.arange(*args, dtype=dtype)
    made = cupy.ndarray(values.shape, values.dtype, _alloc(values.nbytes))
    _numbers(made)[...] = values
    return made


def _asarray(a: Any) -> Any:
    """Of what has the interface, as CuPy reads it: memory, and the stream to wait for."""
    facts = a.__cuda_array_interface__
    address, read_only = facts["data"]
    assert not read_only
    if facts.get("stream") is not None:
        rt.streamSynchronize(facts["stream"])
    place = cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(address, 0, a, 0), 0)
    return cupy.ndarray(facts["shape"], np.dtype(facts["typestr"]), place, facts.get("strides"))


def _from_dlpack(array: Any) -> Any:
    assert array.__dlpack_device__()[0] == 2, "not on CUDA"
    return array.__dlpack__(stream=1, max_version=(1, 0), copy=None)


def _in_place(function: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    def compute(array: Any, other: Any) -> Any:
        function(values := _numbers(array), other, out=values)
        return array

    return compute


def _interface(array: Any) -> dict[str, Any]:
    strides = None if array.flags.c_contiguous else array.strides
    facts = {"shape": array.shape, "typestr": array.dtype.str, "descr": array.dtype.descr, "strides": strides}
    return {**facts, "data": (array.data.ptr if array.size else 0, False), "stream": LEGACY, "version": 3}


# -- NCCL and other libraries ------------------------------------------------------------------------


class NcclError(RuntimeError):
    pass


class _Nccl(types.ModuleType):
    """NCCL as CuPy binds it."""

    available = True
    NCCL_FLOAT16, NCCL_FLOAT32, NCCL_BFLOAT16, NCCL_SUM = 6, 7, 9, 0
    NcclError = NcclError
    group: list[tuple[int, int, int, int]] | None = None

    def groupStart(self) -> None:
        assert self.group is None
        self.group = []

    def groupEnd(self) -> None:
        """Queue the sums of all devices; the first one's tells how many of what."""
        assert self.group is not None
        calls, self.group = self.group, None
        if "sum" in HOST.fail:
            raise NcclError("a call of the group failed")
        types = {6: DType.F16, 7: DType.F32, 9: DType.BF16}
        collective: Any = HOST.collective([])
        collective.all_reduce(
            [(place, stream) for place, *_, stream in calls], calls[0][1], types[calls[0][2]]
        )

    class NcclCommunicator:
        @staticmethod
        def initAll(devices: Any) -> list[Any]:
            return [NCCL.NcclCommunicator() for _ in devices]

        def allReduce(self, send: int, receive: int, count: int, datatype: int, op: int, stream: int) -> None:
            assert (send, op) == (receive, NCCL.NCCL_SUM)
            assert NCCL.group is not None, "one thread calls for all devices: in a group"
            if NCCL.group and "sum" in HOST.fail:
                raise NcclError("unhandled system error")
            NCCL.group.append((send, count, datatype, stream))

        def destroy(self) -> None:
            pass


NCCL = _Nccl("cupy.cuda.nccl")
_load = ctypes.CDLL


def _exec_update(executable: Any, graph: Any, outcome: Any) -> int:
    return 0 if HOST.exec_update(executable.value, graph.value) else 910


def _library(name: Any, *args: Any, **options: Any) -> Any:
    """Load a library, but for those of CUDA that the backend loads itself."""
    is_ours = sys._getframe(1).f_globals.get("__name__", "").startswith("ggmlb.")
    file = Path(name).name if is_ours and isinstance(name, str) else ""
    if file.startswith("libcuda.so"):
        return SimpleNamespace(cuGraphExecUpdate_v2=_exec_update)
    return HOST.blas() if file.startswith("libcublas.so") else _load(name, *args, **options)


def install() -> None:
    """Put all of it in CuPy's places, which must be there."""
    pool = SimpleNamespace(free_all_blocks=HOST.trim)
    places: dict[Any, dict[str, Any]] = {
        rt: {name: _answered(name, function) for name, function in CALLS.items()},
        cu: {"launchKernel": _answered("launchKernel", _launch)},
        ctypes: {"CDLL": _library},
        cupy.cuda: {
            "is_available": lambda: True, "Device": HOST.on, "alloc": _alloc, "nccl": NCCL,
            "alloc_pinned_memory": lambda size: np.zeros(size, np.uint8),
            "Stream": Stream, "get_current_stream": _current_stream,
        },
        cupy: {
            "RawModule": RawModule, "RawKernel": RawKernel, "arange": _arange, "asarray": _asarray,
            "from_dlpack": _from_dlpack, "get_default_memory_pool": lambda: pool,
            "get_default_pinned_memory_pool": lambda: pool,
        },
        cupy.ndarray: {
            "get": lambda array: _numbers(array).copy(), "__iadd__": _in_place(np.add),
            "__imul__": _in_place(np.multiply), "__cuda_array_interface__": property(_interface),
            "__dlpack_device__": lambda array: (2, array.data.mem.device_id),
            "__dlpack__": lambda array, **options: array,
        },
    }  # fmt: skip
    sys.modules["cupy.cuda.nccl"] = NCCL
    for place, names in places.items():
        for name, value in names.items():
            assert hasattr(place, name) or name == "nccl", f"{place} has no {name}"
            setattr(place, name, value)
