"""CupyDriver: the driver interface over NVIDIA's driver (libcuda) and runtime.

Contexts, kernels, streams, events and graphs are calls of libcuda, which tests replace by a library of
theirs (docs/cuda.md): by `cupy.cuda.driver` where it has them, else by ctypes, 0.2 us a call, as by NVIDIA's
`cuda.bindings`, which would be a dependency. Memory, copies, peers and properties are calls of the runtime
(`cupy.cuda.runtime`). Handles and error numbers are the same in both.
"""

from __future__ import annotations

import ctypes
import warnings
import weakref
from collections.abc import Hashable, Sequence
from contextlib import suppress
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

import cupy
import numpy as np
from cupy.cuda import driver as cu
from cupy.cuda import runtime as rt
from cupy.cuda.compiler import CompileException
from cupy.cuda.memory import OutOfMemoryError

from ggmlb.backends.cuda.cublas import library
from ggmlb.backends.cuda.driver import OPTIONS, Call, Facts, address_of, grid, text
from ggmlb.backends.gpu import Launch
from ggmlb.core.dtypes import DType
from ggmlb.core.errors import BackendError
from ggmlb.interface.data import Bytes
from ggmlb.system import env, progress

if TYPE_CHECKING:
    from ggmlb.backends.cuda.driver import Collective

INSUFFICIENT_DRIVER = 35
OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation and CUDA_ERROR_OUT_OF_MEMORY
NOT_READY = 600
HOST_MEMORY = 1  # cudaMemoryTypeHost: page-locked
PEER_ALREADY_ENABLED = 704
MUCH_SHARED = 16 << 10
"""Shared memory of a block above which the kernel prefers the largest carve-out [bytes].

Other kernels leave more of it to the L1 cache."""

REGISTER_PORTABLE, REGISTER_READ_ONLY = 1, 8
NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
TIMED, NOT_TIMED = 0, 2  # CU_EVENT_DEFAULT, CU_EVENT_DISABLE_TIMING
RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
HANDLE, NUMBER = ctypes.c_void_p, ctypes.c_uint

PDL_CAPABILITY, PDL_DRIVER = 90, 12030
"""First compute capability with programmatic dependent launches; first driver that captures them."""

PROGRAMMATIC_STREAM_SERIALIZATION = 6  # a CUlaunchAttributeID

OLDEST = 75
"""Oldest compute capability, times ten, that CUDA 13 compiles for."""


def _bound(name: str, *kinds: Any) -> cached_property[Any]:
    """Return a method that is a function of libcuda itself, loaded when it is first called."""
    return cached_property(lambda _: libcuda(name, *kinds))


class CupyDriver:
    """Implementation of `Driver` by CuPy and libcuda."""

    errors = (rt.CUDARuntimeError, cu.CUDADriverError, OutOfMemoryError)

    device_count = staticmethod(rt.getDeviceCount)
    malloc = staticmethod(rt.malloc)  # cudaMalloc: one allocation for each buffer needs no pool
    free = staticmethod(rt.free)
    copy = staticmethod(rt.memcpyAsync)
    copy_2d = staticmethod(rt.memcpy2DAsync)
    copy_peer = staticmethod(rt.memcpyPeerAsync)  # through the host if needed
    fill = staticmethod(rt.memsetAsync)

    stream_free = _bound("cuStreamDestroy_v2", HANDLE)
    stream_synchronize = _bound("cuStreamSynchronize", HANDLE)  # without the GIL
    event_free = _bound("cuEventDestroy_v2", HANDLE)
    event_record = _bound("cuEventRecord", HANDLE, HANDLE)
    event_synchronize = _bound("cuEventSynchronize", HANDLE)
    graph_free = _bound("cuGraphDestroy", HANDLE)
    exec_launch = _bound("cuGraphLaunch", HANDLE, HANDLE)
    exec_free = _bound("cuGraphExecDestroy", HANDLE)

    def __init__(self) -> None:
        self._functions: dict[Hashable, Any] = {}
        self._contexts: dict[int, int] = {}
        self._n_units: dict[int, int] = {}
        self._dependent: dict[int, bool] = {}

    def facts(self, device: int) -> Facts:
        props = rt.getDeviceProperties(device)
        return Facts(
            props["name"].decode(),
            # CuPy's deviceGetPCIBusId has no room for domains beyond four digits.
            f"{props['pciDomainID']:04x}:{props['pciBusID']:02x}:{props['pciDeviceID']:02x}.0",
            10 * props["major"] + props["minor"],
            props["multiProcessorCount"],
            props["sharedMemPerMultiprocessor"],
            props["totalGlobalMem"],
            bool(props.get("integrated", 0)),
        )

    def on(self, device: int) -> _On:
        """Make a device current by its primary context; cudaSetDevice would create one on device 0."""
        return _On(self._contexts.get(device) or self._retain(device))

    def _retain(self, device: int) -> int:
        handle, context = ctypes.c_int(), ctypes.c_void_p()
        libcuda("cuInit", NUMBER)(0)
        libcuda("cuDeviceGet", HANDLE, ctypes.c_int)(ctypes.byref(handle), device)
        libcuda("cuDevicePrimaryCtxRetain", HANDLE, ctypes.c_int)(ctypes.byref(context), handle)
        self._contexts[device] = context.value or 0
        return self._contexts[device]

    def _any(self) -> _On:
        """Make a device that is in use the current one, for calls that concern all devices."""
        return self.on(next(iter(self._contexts), 0))

    def memory_info(self, device: int) -> tuple[int, int]:
        with self.on(device):
            free, total = rt.memGetInfo()
        return int(free), int(total)

    def is_out_of_memory(self, error: Exception) -> bool:
        """Whether an error reports a lack of memory; errors without a status (CuPy's memory pool's) do."""
        return getattr(error, "status", OUT_OF_MEMORY) == OUT_OF_MEMORY

    def trim(self) -> None:
        cupy.get_default_memory_pool().free_all_blocks()
        cupy.get_default_pinned_memory_pool().free_all_blocks()

    def array(self, address: int, nbytes: int, device: int, owner: object) -> Any:
        memory = cupy.cuda.UnownedMemory(address, nbytes, owner, device)
        return cupy.ndarray((nbytes,), np.uint8, cupy.cuda.MemoryPointer(memory, 0))

    def view(
        self, base: Any, shape: tuple[int, ...], dtype: Any, offset: int, strides: tuple[int, ...]
    ) -> Any:
        return cupy.ndarray(shape, dtype, base.data + offset, strides)

    def device_of(self, address: int) -> int:
        return int(rt.pointerGetAttributes(address).device)

    def pinned(self, nbytes: int) -> Bytes:
        """Return page-locked host memory from cudaHostAlloc, freed with the last view of it."""
        with self._any():
            address = int(rt.hostAlloc(nbytes, rt.hostAllocPortable))
        memory: Any = (ctypes.c_ubyte * nbytes).from_address(address)
        weakref.finalize(memory, self._free_pinned, address).atexit = False
        pinned: Bytes = np.frombuffer(memory, np.uint8)
        return pinned

    def _free_pinned(self, address: int) -> None:
        with self._any():
            rt.freeHost(address)

    def is_pinned(self, array: Bytes) -> bool:
        """Whether an array is page-locked, by cudaPointerGetAttributes of its first and last byte."""
        first = address_of(array)
        ends = (first, first + max(array.size, 1) - 1)
        return all(rt.pointerGetAttributes(at).type == HOST_MEMORY for at in ends)

    def register(self, array: Bytes) -> None:
        flags = REGISTER_PORTABLE | (0 if array.flags.writeable else REGISTER_READ_ONLY)
        with self._any():
            rt.hostRegister(address_of(array), array.size, flags)

    def unregister(self, array: Bytes) -> None:
        with self._any():
            rt.hostUnregister(address_of(array))

    def stream_new(self) -> int:
        return _made("cuStreamCreate", (NUMBER, NON_BLOCKING))

    def stream_done(self, stream: int) -> bool:
        return _is_ready("cuStreamQuery", stream)

    def stream_wait(self, stream: int, event: int) -> None:
        libcuda("cuStreamWaitEvent", HANDLE, HANDLE, NUMBER)(stream, event, 0)

    def event_new(self, timed: bool = False) -> int:
        """Return a new event; events that are not `timed` are faster."""
        return _made("cuEventCreate", (NUMBER, TIMED if timed else NOT_TIMED))

    def event_done(self, event: int) -> bool:
        return _is_ready("cuEventQuery", event)

    def event_elapsed(self, start: int, end: int) -> float:
        ms = ctypes.c_float()
        libcuda("cuEventElapsedTime", HANDLE, HANDLE, HANDLE)(ctypes.byref(ms), start, end)
        return ms.value * 1e-3

    def enable_peer(self, device: int, peer: int) -> bool:
        if not rt.deviceCanAccessPeer(device, peer):
            return False
        with self.on(device):
            try:
                rt.deviceEnablePeerAccess(peer)
            except rt.CUDARuntimeError as error:
                return bool(error.status == PEER_ALREADY_ENABLED)
        return True

    def disable_peer(self, device: int, peer: int) -> None:
        with self.on(device):
            rt.deviceDisablePeerAccess(peer)

    def bind(self, launch: Launch, block: bytes, device: int) -> Call:
        """Compile a launch's kernel by NVRTC, through CuPy's disk cache; return the call that runs it."""
        function = self._function(launch, device)
        packet = _Packet(block)
        wg, shared, extra, run = launch.wg, launch.shared, packet.address, cu.launchKernel
        x, y, z = grid(launch, lambda: self._resident(function, wg, shared, device))
        if self._is_dependent(device):
            return _dependent_call(function, (x, y, z, wg, 1, 1, shared), packet)

        def call(stream: int, packet: _Packet = packet) -> None:
            run(function, x, y, z, wg, 1, 1, shared, stream, 0, extra)

        return call

    def _is_dependent(self, device: int) -> bool:
        """Whether kernels are launched before the ones before them end, and wait (GGMLB_CUDA_PDL=1)."""
        if device not in self._dependent:
            wanted = env.flag("GGMLB_CUDA_PDL", default=False)
            can = wanted and self.facts(device).capability >= PDL_CAPABILITY
            self._dependent[device] = can and rt.driverGetVersion() >= PDL_DRIVER
        return self._dependent[device]

    def _resident(self, function: int, wg: int, shared: int, device: int) -> int:
        """Return how many blocks are resident on the device at once, by CUDA's occupancy calculator."""
        if device not in self._n_units:
            self._n_units[device] = self.facts(device).n_units
        with self.on(device):
            each = int(cu.occupancyMaxActiveBlocksPerMultiprocessor(function, wg, shared))
        return each * self._n_units[device]

    def prepare(self, launches: Sequence[Launch], device: int) -> None:
        """Compile the launches' kernels, with a progress display; cached ones take milliseconds each."""
        missing = {_key(x, device): x for x in launches if _key(x, device) not in self._functions}
        if missing:
            with progress.task(f"CUDA{device}: compiling kernels", len(missing)) as task:
                for launch in missing.values():
                    task.step(launch.kernel.name)
                    self._function(launch, device)

    def _function(self, launch: Launch, device: int) -> int:
        key = _key(launch, device)
        if key not in self._functions:
            name = launch.kernel.name
            with self.on(device):
                code = text(launch.kernel, launch.defines, launch.wg, self._is_dependent(device))
                module = cupy.RawModule(code=code, options=OPTIONS, backend="nvrtc")
                try:
                    function = module.get_function(name).kernel
                    own = cu.funcGetAttribute(cu.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, function.ptr)
                    if own + launch.shared > MUCH_SHARED:
                        carve_out = cu.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
                        cu.funcSetAttribute(function.ptr, carve_out, 100)
                    if launch.shared:
                        most = cu.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                        cu.funcSetAttribute(function.ptr, most, launch.shared)
                    self._functions.setdefault(key, function)  # the first, if threads compile it: it is bound
                except self.errors:
                    raise
                except Exception as error:  # of the compiler, or of the search for it and for CUDA's headers
                    raise BackendError(self._uncompiled(name, device, error)) from error
        return int(self._functions[key].ptr)

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
        return library()

    def collective(self, devices: Sequence[int]) -> Collective | None:
        """Connect devices for all-reduce sums by NCCL; `None` if NCCL is missing."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # CuPy warns where there is no NCCL
            from cupy.cuda import nccl
        return _Nccl(nccl, devices) if nccl.available else None

    def capture_begin(self, stream: int) -> None:
        """Capture later calls on the stream into a graph, in relaxed mode: other threads may allocate."""
        libcuda("cuStreamBeginCapture_v2", HANDLE, NUMBER)(stream, RELAXED)

    def capture_end(self, stream: int) -> int:
        graph = HANDLE()
        libcuda("cuStreamEndCapture", HANDLE, HANDLE)(stream, ctypes.byref(graph))
        return graph.value or 0

    def exec_new(self, graph: int) -> int:
        return _made("cuGraphInstantiateWithFlags", (HANDLE, graph), (ctypes.c_uint64, 0))

    def exec_update(self, executable: int, graph: int) -> bool:
        """Update an executable graph; return whether it worked."""
        outcome = (ctypes.c_uint64 * 3)()  # CUgraphExecUpdateResultInfo: a result and two nodes
        update = libcuda("cuGraphExecUpdate_v2", HANDLE, HANDLE, HANDLE, check=False)
        return bool(update(executable, graph, ctypes.byref(outcome)) == 0)


@cache
def libcuda(name: str, *kinds: Any, check: bool = True) -> Any:
    """Return a function of NVIDIA's driver that raises the runtime's errors: their numbers are equal.

    Args:
        name: The exported symbol.
        kinds: The types of its arguments.
        check: Whether it raises; it returns its status if not.

    Raises:
        CUDARuntimeError: The driver is missing: cudaErrorInsufficientDriver, as from the runtime.
    """
    try:
        found = ctypes.CDLL("libcuda.so.1")[name]
    except OSError as error:
        raise rt.CUDARuntimeError(INSUFFICIENT_DRIVER) from error
    found.argtypes, found.restype = kinds, _checked if check else ctypes.c_int
    return found


def _checked(status: int) -> None:
    if status:
        raise rt.CUDARuntimeError(status)


def _made(name: str, *args: tuple[Any, int]) -> int:
    """Return the handle that a function makes of arguments, given with their types."""
    handle = HANDLE()
    libcuda(name, HANDLE, *(kind for kind, _ in args))(ctypes.byref(handle), *(value for _, value in args))
    return handle.value or 0


def _is_ready(query: str, handle: int) -> bool:
    """Return whether a query's status is success; raise errors of earlier work."""
    status = libcuda(query, HANDLE, check=False)(handle)
    if status != NOT_READY:
        _checked(status)
    return bool(status == 0)


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute: its number, and a union of 64 bytes, here of a flag."""

    _fields_ = (("id", ctypes.c_uint64), ("value", ctypes.c_int), ("rest", ctypes.c_char * 60))


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (("sizes", NUMBER * 7), ("stream", HANDLE), ("attributes", HANDLE), ("n_attributes", NUMBER))


def _dependent_call(function: int, sizes: tuple[int, ...], packet: _Packet) -> Call:
    """Return the call that launches a kernel by programmatic dependent launch.

    Args:
        function: The kernel, which begins with the wait for the one before (`text`).
        sizes: Blocks and threads in three dimensions, and dynamic shared memory of a block [bytes].
        packet: Its arguments.
    """
    attribute = _Attribute(PROGRAMMATIC_STREAM_SERIALIZATION, 1)
    config = _Config((NUMBER * 7)(*sizes), None, ctypes.addressof(attribute), 1)
    where, run = ctypes.byref(config), libcuda("cuLaunchKernelEx", HANDLE, HANDLE, HANDLE, HANDLE)

    def call(stream: int, kept: object = (packet, attribute)) -> None:
        config.stream = stream
        run(where, function, None, packet.address)

    return call


def _key(launch: Launch, device: int) -> Hashable:
    """Return the cache key of a compiled kernel."""
    return launch.kernel.name, launch.defines, launch.wg, device


class _Nccl:
    """Communicators of one process, one for each device."""

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
        """In an NCCL group, because one thread calls for all devices."""
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
