"""CupyDriver: CUDA as the backend uses it, with all other modules of this package above it.

All calls are NVIDIA's driver's (libcuda): launches and the current context, of which there are most, by
CuPy's bindings (0.1 us), all others by ctypes (0.2 to 0.5 us; NVIDIA's `cuda.bindings` would be a
dependency). CuPy compiles and caches kernels, has the arrays that go in and out, and names errors, whose
numbers are the same in the runtime. Contexts are the devices' primary ones, which CuPy's runtime uses too.

Streams, events, graphs and addresses are plain integers, as in CUDA, independent of garbage collection
and exit order. Each is released only by a call here.
"""

from __future__ import annotations

import ctypes
import warnings
import weakref
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, suppress
from functools import cached_property
from typing import Any

import cupy
import numpy as np
from cupy.cuda import driver as cu
from cupy.cuda import runtime as rt
from cupy.cuda.compiler import CompileException
from cupy.cuda.memory import OutOfMemoryError

from ggmlb.backends.cuda.cublas import library
from ggmlb.backends.cuda.driver import (
    ARGUMENTS,
    KINDS,
    OPTIONS,
    Call,
    CopyKind,
    Facts,
    address_of,
    grid,
    guard,
    text,
)
from ggmlb.backends.gpu import Launch
from ggmlb.core.dtypes import DType
from ggmlb.core.errors import BackendError
from ggmlb.interface.data import Bytes
from ggmlb.system import env, progress

INVALID_VALUE = 1
OUT_OF_MEMORY = 2
INSUFFICIENT_DRIVER = 35
NOT_READY = 600
PEER_ALREADY_ENABLED = 704
MUCH_SHARED = 16 << 10
"""Shared memory of a block above which the kernel prefers the largest carve-out [bytes].

Other kernels leave more of it to the L1 cache."""

PORTABLE, READ_ONLY = 1, 8  # CU_MEMHOSTALLOC_, CU_MEMHOSTREGISTER_
NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
TIMED, NOT_TIMED = 0, 2  # CU_EVENT_DEFAULT, CU_EVENT_DISABLE_TIMING
RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
HOST, DEVICE = 1, 2  # CU_MEMORYTYPE_
MEMORY_TYPE, ORDINAL = 2, 9  # CU_POINTER_ATTRIBUTE_
N_UNITS, INTEGRATED, MAJOR, MINOR, SHARED = 16, 18, 75, 76, 81  # CU_DEVICE_ATTRIBUTE_

PDL_CAPABILITY, PDL_DRIVER = 90, 12030
"""Least compute capability (times ten), and CUDA version of the driver, for dependent launches in graphs."""

PROGRAMMATIC_STREAM_SERIALIZATION = 6  # a CUlaunchAttributeID

OLDEST = 75
"""Oldest compute capability, times ten, that CUDA 13 compiles for."""

P, N, U, L = ctypes.c_void_p, ctypes.c_int, ctypes.c_uint, ctypes.c_size_t

ANSWERS = {"cuStreamQuery", "cuEventQuery", "cuPointerGetAttribute", "cuGraphExecUpdate_v2"}
"""Functions that return their status, some of which are answers; those of others are raised as errors."""


def _bound(name: str) -> Any:
    """Return a method that is a function of libcuda itself."""
    return cached_property(lambda driver: driver._function(name))


def _checked(status: int) -> None:
    if status:
        raise rt.CUDARuntimeError(status)


class CupyDriver:
    """The interface to CUDA.

    Calls must be made inside `on(device)`, except those on devices and on host memory: libcuda would
    refuse them. Failures raise one of `errors`.

    Args:
        load: Loads libcuda, when it is first called.
    """

    errors: tuple[type[Exception], ...] = (rt.CUDARuntimeError, cu.CUDADriverError, OutOfMemoryError)

    def __init__(self, load: Callable[[], Any] = lambda: ctypes.CDLL("libcuda.so.1")) -> None:
        self._load = load
        self._functions: dict[str, Any] = {}
        self._compiled: dict[Hashable, Any] = {}
        self._contexts: dict[int, int] = {}
        self._dependent: dict[int, bool] = {}

    @cached_property
    def _library(self) -> Any:
        """Libcuda, loaded and initialised.

        Raises:
            CUDARuntimeError: It is missing: cudaErrorInsufficientDriver, as from the runtime.
        """
        try:
            found = self._load()
        except OSError as error:
            raise rt.CUDARuntimeError(INSUFFICIENT_DRIVER) from error
        _checked(found["cuInit"](0))
        return found

    def _function(self, name: str) -> Any:
        """Return a function of libcuda, which raises the runtime's errors: their numbers are equal."""
        try:
            return self._functions[name]
        except KeyError:
            found = self._library[name]
            found.argtypes = [KINDS[kind] for kind in ARGUMENTS[name]]
            found.restype = N if name in ANSWERS else _checked
            return self._functions.setdefault(name, found)

    def _get(self, kind: Any, name: str, *args: Any) -> Any:
        """Return the value that a function writes where its first argument points."""
        value = kind()
        self._function(name)(ctypes.byref(value), *args)
        return value.value or 0

    # -- devices -------------------------------------------------------------------------------

    def device_count(self) -> int:
        """Return the number of devices visible by `CUDA_VISIBLE_DEVICES`.

        Raises:
            CUDARuntimeError: Among others cudaErrorInsufficientDriver: the driver is older than CuPy's CUDA.
        """
        if self._get(N, "cuDriverGetVersion") // 1000 < rt.runtimeGetVersion() // 1000:
            raise rt.CUDARuntimeError(INSUFFICIENT_DRIVER)
        return int(self._get(N, "cuDeviceGetCount"))

    def facts(self, device: int) -> Facts:
        """Return the properties of a device."""
        card = self._get(N, "cuDeviceGet", device)
        name, place = ctypes.create_string_buffer(256), ctypes.create_string_buffer(32)
        self._function("cuDeviceGetName")(name, len(name), card)
        self._function("cuDeviceGetPCIBusId")(place, len(place), card)
        asked = (MAJOR, MINOR, N_UNITS, SHARED, INTEGRATED)
        values = (self._get(N, "cuDeviceGetAttribute", what, card) for what in asked)
        major, minor, n_units, shared, is_integrated = values
        names = name.value.decode(), place.value.decode().lower()
        nbytes = self._get(L, "cuDeviceTotalMem_v2", card)
        return Facts(*names, 10 * major + minor, n_units, shared, nbytes, bool(is_integrated))

    def on(self, device: int) -> AbstractContextManager[None]:
        """Context manager that makes `device` this thread's current one; others get no CUDA context."""
        return _On(self._contexts.get(device) or self._context(device))

    def _context(self, device: int) -> int:
        """Return the device's primary context, retained at first use."""
        if device not in self._contexts:
            card = self._get(N, "cuDeviceGet", device)
            self._contexts[device] = self._get(P, "cuDevicePrimaryCtxRetain", card)
        return self._contexts[device]

    def _any(self) -> AbstractContextManager[None]:
        """Make a device that is in use the current one, for calls that concern all devices."""
        return self.on(min(self._contexts, default=0))

    def memory_info(self, device: int) -> tuple[int, int]:
        """Return free and total memory [bytes]."""
        total = L()
        with self.on(device):
            free = self._get(L, "cuMemGetInfo_v2", ctypes.byref(total))
        return free, total.value

    def is_out_of_memory(self, error: Exception) -> bool:
        """Whether an error reports a lack of memory; errors without a status (CuPy's memory pool's) do."""
        return getattr(error, "status", OUT_OF_MEMORY) == OUT_OF_MEMORY

    # -- memory --------------------------------------------------------------------------------

    def malloc(self, nbytes: int) -> int:
        """Return the address of new memory on the current device: one for each buffer needs no pool."""
        return int(self._get(P, "cuMemAlloc_v2", nbytes))

    free = _bound("cuMemFree_v2")  # (address): queued work must not use it

    def trim(self) -> None:
        """Free the memory that CuPy's pools cache on the current device, for arrays of the user."""
        cupy.get_default_memory_pool().free_all_blocks()
        cupy.get_default_pinned_memory_pool().free_all_blocks()

    def array(self, address: int, nbytes: int, device: int, owner: object) -> Any:
        """View device memory as a flat uint8 CuPy array; the array keeps the object `owner` alive."""
        memory = cupy.cuda.UnownedMemory(address, nbytes, owner, device)
        return cupy.ndarray((nbytes,), np.uint8, cupy.cuda.MemoryPointer(memory, 0))

    def view(
        self, base: Any, shape: tuple[int, ...], dtype: Any, offset: int, strides: tuple[int, ...]
    ) -> Any:
        """View `base`, an array from `array`, from byte `offset` on with another shape, type and strides."""
        return cupy.ndarray(shape, dtype, base.data + offset, strides)

    def device_of(self, address: int) -> int:
        """Return the device that an address is on."""
        device = N()
        _checked(self._about(ctypes.byref(device), ORDINAL, address))
        return device.value

    _about = _bound("cuPointerGetAttribute")

    def pinned(self, nbytes: int) -> Bytes:
        """Return page-locked host memory for all devices, freed with the last view of it."""
        with self._any():
            address = self._get(P, "cuMemHostAlloc", nbytes, PORTABLE)
        memory: Any = (ctypes.c_ubyte * nbytes).from_address(address)
        weakref.finalize(memory, self._free_pinned, address).atexit = False
        pinned: Bytes = np.frombuffer(memory, np.uint8)
        return pinned

    def _free_pinned(self, address: int) -> None:
        with suppress(BackendError):  # in a forked process, where libcuda would hang or crash
            guard.check("free page-locked memory")
            with self._any():
                self._function("cuMemFreeHost")(address)

    def is_pinned(self, array: Bytes) -> bool:
        """Whether an array's first and last byte are page-locked; copies of pageable memory may block."""
        first, kind = address_of(array), U()
        for address in (first, first + max(array.size, 1) - 1):
            status = self._about(ctypes.byref(kind), MEMORY_TYPE, address)
            if status == INVALID_VALUE:  # unknown to CUDA
                return False
            _checked(status)
            if kind.value != HOST:
                return False
        return True

    def register(self, array: Bytes) -> None:
        """Page-lock an array's memory in place."""
        flags = PORTABLE | (0 if array.flags.writeable else READ_ONLY)
        with self._any():
            self._function("cuMemHostRegister_v2")(address_of(array), array.size, flags)

    def unregister(self, array: Bytes) -> None:
        """Undo `register`: unlock the array's memory."""
        with self._any():
            self._function("cuMemHostUnregister")(address_of(array))

    # -- streams and events --------------------------------------------------------------------

    def stream_new(self) -> int:
        """Return a new stream of the current device, which does not wait for the default stream."""
        return int(self._get(P, "cuStreamCreate", NON_BLOCKING))

    stream_free = _bound("cuStreamDestroy_v2")  # (stream)
    stream_synchronize = _bound("cuStreamSynchronize")  # (stream), without the GIL

    def stream_done(self, stream: int) -> bool:
        """Whether the stream's queued work is done; the stream must not be capturing."""
        return _is_ready(self._function("cuStreamQuery")(stream))

    def stream_wait(self, stream: int, event: int) -> None:
        """Queue a wait: the stream's later work starts after an event of any device."""
        self._function("cuStreamWaitEvent")(stream, event, 0)

    def event_new(self, timed: bool = False) -> int:
        """Return a new event of the current device; events that are not `timed` are faster."""
        return int(self._get(P, "cuEventCreate", TIMED if timed else NOT_TIMED))

    event_free = _bound("cuEventDestroy_v2")  # (event)
    event_record = _bound("cuEventRecord")  # (event, stream): after the work queued so far
    event_synchronize = _bound("cuEventSynchronize")  # (event), without the GIL

    def event_done(self, event: int) -> bool:
        """Whether the work before the recorded event is done."""
        return _is_ready(self._function("cuEventQuery")(event))

    def event_elapsed(self, start: int, end: int) -> float:
        """Return the time between two recorded events that are reached, both created as `timed` [s]."""
        return float(self._get(ctypes.c_float, "cuEventElapsedTime", start, end)) * 1e-3

    # -- copies --------------------------------------------------------------------------------

    @cached_property
    def _copies(self) -> dict[CopyKind, Any]:
        names = {CopyKind.TO_DEVICE: "HtoD", CopyKind.TO_HOST: "DtoH", CopyKind.ON_DEVICE: "DtoD"}
        return {kind: self._function(f"cuMemcpy{name}Async_v2") for kind, name in names.items()}

    def copy(self, dst: int, src: int, nbytes: int, kind: CopyKind, stream: int) -> None:
        """Queue a copy of `nbytes` bytes from `src` to `dst`."""
        self._copies[kind](dst, src, nbytes, stream)

    def copy_2d(
        self, to: tuple[int, int], source: tuple[int, int], width: int, n: int, kind: CopyKind, stream: int
    ) -> None:
        """Queue a copy of `n` pieces of `width` bytes between two places, each with the pieces' distance."""
        is_write, is_read = kind is CopyKind.TO_DEVICE, kind is CopyKind.TO_HOST
        ends = [
            (0, 0, *((HOST, address, 0) if is_host else (DEVICE, 0, address)), 0, pitch)
            for is_host, (address, pitch) in ((is_write, source), (is_read, to))
        ]
        # CUDA_MEMCPY2D: of both ends the place in x and y, kind, host's and device's address, array, pitch
        about = (L * 16)(*ends[0], *ends[1], width, n)
        self._function("cuMemcpy2DAsync_v2")(about, stream)

    def copy_peer(
        self, dst: int, dst_device: int, src: int, src_device: int, nbytes: int, stream: int
    ) -> None:
        """Queue a copy between devices: directly if they are peers, else through the host."""
        ends = dst, self._context(dst_device), src, self._context(src_device)
        self._function("cuMemcpyPeerAsync")(*ends, nbytes, stream)

    def enable_peer(self, device: int, peer: int) -> bool:
        """Let a device access a peer's memory; return whether CUDA supports it."""
        cards = [self._get(N, "cuDeviceGet", index) for index in (device, peer)]
        if not self._get(N, "cuDeviceCanAccessPeer", *cards):
            return False
        with self.on(device):
            try:
                self._function("cuCtxEnablePeerAccess")(self._context(peer), 0)
            except rt.CUDARuntimeError as error:
                return bool(error.status == PEER_ALREADY_ENABLED)
        return True

    def disable_peer(self, device: int, peer: int) -> None:
        """Undo `enable_peer`: the device can no longer access the peer's memory."""
        with self.on(device):
            self._function("cuCtxDisablePeerAccess")(self._context(peer))

    def fill(self, address: int, value: int, nbytes: int, stream: int) -> None:
        """Queue setting every byte to a value."""
        self._function("cuMemsetD8Async")(address, value, nbytes, stream)

    # -- work ----------------------------------------------------------------------------------

    def bind(self, launch: Launch, block: bytes, device: int) -> Call:
        """Compile a launch's kernel by NVRTC, through CuPy's disk cache; return the call that runs it."""
        function = self._kernel(launch, device)
        packet = _Packet(block)
        wg, shared, extra, run = launch.wg, launch.shared, packet.address, self._launch
        x, y, z = grid(launch, lambda: self._resident(function, wg, shared, device))
        if self._is_dependent(device):
            sizes = (x, y, z, wg, 1, 1, shared)
            return _dependent_call(self._function("cuLaunchKernelEx"), function, sizes, packet)

        def call(stream: int, packet: _Packet = packet) -> None:
            run(function, x, y, z, wg, 1, 1, shared, stream, 0, extra)

        return call

    _launch = staticmethod(cu.launchKernel)

    def _is_dependent(self, device: int) -> bool:
        """Whether kernels are launched before the ones before them end, and wait (GGMLB_CUDA_PDL=1)."""
        if device not in self._dependent:
            wanted = env.flag("GGMLB_CUDA_PDL", default=False)
            can = wanted and self.facts(device).capability >= PDL_CAPABILITY
            self._dependent[device] = can and self._get(N, "cuDriverGetVersion") >= PDL_DRIVER
        return self._dependent[device]

    def _resident(self, function: int, wg: int, shared: int, device: int) -> int:
        """Return how many blocks are resident on the device at once, by CUDA's occupancy calculator."""
        with self.on(device):
            each = int(self._get(N, "cuOccupancyMaxActiveBlocksPerMultiprocessor", function, wg, shared))
        return each * self.facts(device).n_units

    def prepare(self, launches: Sequence[Launch], device: int) -> None:
        """Compile the launches' kernels, with a progress display; cached ones take milliseconds each."""
        missing = {_key(x, device): x for x in launches if _key(x, device) not in self._compiled}
        if missing:
            with progress.task(f"CUDA{device}: compiling kernels", len(missing)) as task:
                for launch in missing.values():
                    task.step(launch.kernel.name)
                    self._kernel(launch, device)

    def _kernel(self, launch: Launch, device: int) -> int:
        """Return the handle of a launch's kernel, compiled once."""
        key = _key(launch, device)
        if key not in self._compiled:
            with self.on(device):
                try:
                    kernel = self._compile(launch, device)
                except self.errors:
                    raise
                except Exception as error:  # of the compiler, or of the search for it and for CUDA's headers
                    raise BackendError(self._uncompiled(launch.kernel.name, device, error)) from error
                own = self._get(N, "cuFuncGetAttribute", cu.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, kernel.ptr)
                put = self._function("cuFuncSetAttribute")
                if own + launch.shared > MUCH_SHARED:
                    put(kernel.ptr, cu.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, 100)
                if launch.shared:
                    put(kernel.ptr, cu.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, launch.shared)
            self._compiled.setdefault(key, kernel)  # the first, if threads compile it: it is bound
        return int(self._compiled[key].ptr)

    def _compile(self, launch: Launch, device: int) -> Any:
        """Compile a launch's kernel for the current device; return CuPy's function."""
        code = text(launch.kernel, launch.defines, launch.wg, self._is_dependent(device))
        module = cupy.RawModule(code=code, options=OPTIONS, backend="nvrtc")
        return module.get_function(launch.kernel.name).kernel

    def _uncompiled(self, name: str, device: int, error: Exception) -> str:
        """Return the error for a kernel that could not be compiled, with advice."""
        capability = self.facts(device).capability
        lines = str(error).strip().splitlines()
        why = next((line.strip() for line in lines if "error" in line.lower()), lines[0] if lines else "")
        advice = "report it with CUPY_DUMP_CUDA_SOURCE_ON_ERROR=1"
        if capability < OLDEST:
            advice = f"CUDA 13 compiles from {OLDEST // 10}.{OLDEST % 10} on; use ggmlb[cuda12]"
        elif not isinstance(error, CompileException):
            advice = "pip install 'ggmlb[cuda]' (or [cuda12]) brings the compiler"
        return (
            f"kernel {name} cannot be compiled for CUDA{device}, of compute capability "
            f"{capability // 10}.{capability % 10}: {why or type(error).__name__}; {advice}"
        )

    def blas(self) -> Any:
        """Return the functions of cuBLAS (`cublas.library`).

        Raises:
            BackendUnavailable: It cannot be loaded.
        """
        return library()

    def collective(self, devices: Sequence[int]) -> Collective | None:
        """Connect distinct devices for all-reduce sums by NCCL; `None` if NCCL is missing."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # CuPy warns where there is no NCCL
            from cupy.cuda import nccl
        return Collective(nccl, devices) if nccl.available else None

    # -- graphs --------------------------------------------------------------------------------

    def capture_begin(self, stream: int) -> None:
        """Capture later calls on the stream into a graph, in relaxed mode: other threads may allocate."""
        self._function("cuStreamBeginCapture_v2")(stream, RELAXED)

    def capture_end(self, stream: int) -> int:
        """Return the graph captured since `capture_begin`."""
        graph = P()
        self._function("cuStreamEndCapture")(stream, ctypes.byref(graph))
        return graph.value or 0

    graph_free = _bound("cuGraphDestroy")  # (graph)

    def exec_new(self, graph: int) -> int:
        """Make a graph executable."""
        return int(self._get(P, "cuGraphInstantiateWithFlags", graph, 0))

    def exec_update(self, executable: int, graph: int) -> bool:
        """Update an executable graph to another graph of the same topology; return whether it succeeded."""
        outcome = (ctypes.c_uint64 * 3)()  # CUgraphExecUpdateResultInfo: a result and two nodes
        return bool(self._function("cuGraphExecUpdate_v2")(executable, graph, outcome) == 0)

    exec_launch = _bound("cuGraphLaunch")  # (executable, stream)
    exec_free = _bound("cuGraphExecDestroy")  # (executable): a queued run still finishes


def _is_ready(status: int) -> bool:
    """Whether a query's status is success; raise errors of earlier work."""
    if status != NOT_READY:
        _checked(status)
    return status == 0


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute: its number, and a union of 64 bytes, here of a flag."""

    _fields_ = (("id", L), ("value", N), ("rest", ctypes.c_char * 60))


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (("sizes", U * 7), ("stream", P), ("attributes", P), ("n_attributes", U))


def _dependent_call(run: Callable[..., Any], function: int, sizes: tuple[int, ...], packet: _Packet) -> Call:
    """Return the call that launches a kernel by programmatic dependent launch.

    Args:
        run: cuLaunchKernelEx.
        function: The kernel, which begins with the wait for the one before (`text`).
        sizes: Blocks and threads in three dimensions, and dynamic shared memory of a block [bytes].
        packet: Its arguments.
    """
    attribute = _Attribute(PROGRAMMATIC_STREAM_SERIALIZATION, 1)
    config = _Config((U * 7)(*sizes), None, ctypes.addressof(attribute), 1)
    where = ctypes.byref(config)

    def call(stream: int, kept: object = (packet, attribute)) -> None:
        config.stream = stream
        run(where, function, None, packet.address)

    return call


def _key(launch: Launch, device: int) -> Hashable:
    """Return the cache key of a compiled kernel."""
    return launch.kernel.name, launch.defines, launch.wg, device


class Collective:
    """A group of devices for all-reduce sums: NCCL's communicators of one process, one for each device."""

    def __init__(self, nccl: Any, devices: Sequence[int]) -> None:
        self._nccl = nccl
        self._types = {
            DType.F32: nccl.NCCL_FLOAT32,
            DType.F16: nccl.NCCL_FLOAT16,
            DType.BF16: nccl.NCCL_BFLOAT16,
        }
        try:
            self._communicators = nccl.NcclCommunicator.initAll(list(devices))
        except nccl.NcclError as error:
            raise BackendError(f"NCCL cannot connect devices {list(devices)}: {error}") from None

    def all_reduce(self, places: Sequence[tuple[int, int]], n: int, dtype: DType) -> None:
        """Queue an in-place all-reduce sum of `n` elements; `places`: each device's address and stream.

        In an NCCL group, because one thread calls for all devices.
        """
        nccl, kind = self._nccl, self._types[dtype]
        try:
            nccl.groupStart()
            try:
                for communicator, (address, stream) in zip(self._communicators, places, strict=True):
                    communicator.allReduce(address, address, n, kind, nccl.NCCL_SUM, stream)
            except BaseException:
                # A group left open would delay all later NCCL calls of the thread.
                with suppress(nccl.NcclError):
                    nccl.groupEnd()
                raise
            nccl.groupEnd()
        except nccl.NcclError as error:
            raise BackendError(
                f"NCCL's all-reduce of {n:,} {dtype.name.lower()} elements failed: {error}"
            ) from None

    def free(self) -> None:
        """Destroy the communicators."""
        for communicator in self._communicators:
            communicator.destroy()
        self._communicators = []


class _On:
    """Context manager that sets the thread's current context, and restores the previous one, or none."""

    __slots__ = ("_before", "_context")

    def __init__(self, context: int) -> None:
        self._context = context

    def __enter__(self) -> None:
        self._before = cu.ctxGetCurrent()
        cu.ctxSetCurrent(self._context)

    def __exit__(self, *error: object) -> None:
        cu.ctxSetCurrent(self._before)


class _Packet:
    """An argument block in the form of cuLaunchKernel's `extra`, copied at each launch."""

    def __init__(self, block: bytes) -> None:
        self._block = ctypes.create_string_buffer(block, len(block))
        self._size = ctypes.c_size_t(len(block))
        pointer, size = ctypes.addressof(self._block), ctypes.addressof(self._size)
        # CU_LAUNCH_PARAM_BUFFER_POINTER, _BUFFER_SIZE, _END
        self._extra = (ctypes.c_void_p * 5)(1, pointer, 2, size, 0)
        self.address = ctypes.addressof(self._extra)
