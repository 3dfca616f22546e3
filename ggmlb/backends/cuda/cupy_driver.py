"""CupyDriver: the driver interface over CuPy's bindings of CUDA's runtime, driver and compiler."""

from __future__ import annotations

import ctypes
import warnings
import weakref
from collections.abc import Hashable, Sequence
from contextlib import suppress
from functools import cache
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
from ggmlb.system import progress

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

OLDEST = 75
"""Oldest compute capability, times ten, that CUDA 13 compiles for."""


class CupyDriver:
    """Implementation of `Driver` by CuPy's functions."""

    errors = (rt.CUDARuntimeError, cu.CUDADriverError, OutOfMemoryError)

    device_count = staticmethod(rt.getDeviceCount)
    malloc = staticmethod(rt.malloc)  # cudaMalloc: one allocation for each buffer needs no pool
    free = staticmethod(rt.free)
    stream_free = staticmethod(rt.streamDestroy)
    stream_synchronize = staticmethod(rt.streamSynchronize)  # without the GIL
    stream_wait = staticmethod(rt.streamWaitEvent)
    event_free = staticmethod(rt.eventDestroy)
    event_record = staticmethod(rt.eventRecord)
    event_synchronize = staticmethod(rt.eventSynchronize)
    copy = staticmethod(rt.memcpyAsync)
    copy_2d = staticmethod(rt.memcpy2DAsync)
    copy_peer = staticmethod(rt.memcpyPeerAsync)  # through the host if needed
    fill = staticmethod(rt.memsetAsync)
    capture_end = staticmethod(rt.streamEndCapture)
    graph_free = staticmethod(rt.graphDestroy)
    exec_new = staticmethod(rt.graphInstantiate)
    exec_launch = staticmethod(rt.graphLaunch)
    exec_free = staticmethod(rt.graphExecDestroy)

    def __init__(self) -> None:
        self._functions: dict[Hashable, Any] = {}
        self._contexts: dict[int, int] = {}
        self._n_units: dict[int, int] = {}

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
        cuda, handle, context = libcuda(), ctypes.c_int(), ctypes.c_void_p()
        for status in (
            cuda.cuInit(0),
            cuda.cuDeviceGet(ctypes.byref(handle), device),
            cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), handle),
        ):
            if status:
                raise rt.CUDARuntimeError(status)  # the numbers are equal
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
        return int(rt.streamCreateWithFlags(rt.streamNonBlocking))

    def stream_done(self, stream: int) -> bool:
        return _is_ready(rt.streamQuery(stream))

    def event_new(self, timed: bool = False) -> int:
        """Return a new event; events that are not `timed` are faster."""
        return int(rt.eventCreateWithFlags(rt.eventDefault if timed else rt.eventDisableTiming))

    def event_done(self, event: int) -> bool:
        return _is_ready(rt.eventQuery(event))

    def event_elapsed(self, start: int, end: int) -> float:
        return float(rt.eventElapsedTime(start, end)) * 1e-3

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

        def call(stream: int, packet: _Packet = packet) -> None:
            run(function, x, y, z, wg, 1, 1, shared, stream, 0, extra)

        return call

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
                module = cupy.RawModule(
                    code=text(launch.kernel, launch.defines, launch.wg), options=OPTIONS, backend="nvrtc"
                )
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
        rt.streamBeginCapture(stream, rt.streamCaptureModeRelaxed)

    def exec_update(self, executable: int, graph: int) -> bool:
        """Update an executable graph by cuGraphExecUpdate, called by ctypes; return whether it worked."""
        outcome = (ctypes.c_uint64 * 3)()  # CUgraphExecUpdateResultInfo: a result and two nodes
        status = libcuda().cuGraphExecUpdate_v2(
            ctypes.c_void_p(executable), ctypes.c_void_p(graph), ctypes.byref(outcome)
        )
        return bool(status == 0)


@cache
def libcuda() -> Any:
    """Load NVIDIA's driver, for functions that CuPy does not bind.

    Raises:
        CUDARuntimeError: It is missing: cudaErrorInsufficientDriver, as from the runtime.
    """
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise rt.CUDARuntimeError(INSUFFICIENT_DRIVER) from error


def _is_ready(status: int) -> bool:
    """Return whether a query's status is success; raise errors of earlier work, which CuPy does not."""
    if status not in (0, NOT_READY):
        raise rt.CUDARuntimeError(status)
    return status == 0


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
