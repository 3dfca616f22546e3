"""OpenCL devices and their discovery."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy.typing as npt
import pyopencl as cl
import pyopencl.array

from ggmlb.backends.gpu import MAX_WG, RULES, Target
from ggmlb.backends.gpu.device import GpuDevice
from ggmlb.backends.opencl import pocl
from ggmlb.backends.opencl.backend import OpenClBackend, OpenClEvent
from ggmlb.backends.opencl.buffer import MemoryLedger, OpenClBuffer, OpenClBufferType, OpenClHostBufferType
from ggmlb.backends.opencl.packed_buffer import OpenClPackedBufferType
from ggmlb.backends.opencl.program import Programs
from ggmlb.backends.opencl.runtime import cl_errors
from ggmlb.core.enums import DeviceType
from ggmlb.core.errors import ArgumentError, BackendError, BackendUnavailable
from ggmlb.core.tensor import Tensor
from ggmlb.interface import Backend, Buffer, BufferType, Caps
from ggmlb.interface.data import host_bytes
from ggmlb.parallel import row_split

if TYPE_CHECKING:
    from ggmlb.backends.opencl import OpenClReg

GPU_WG = 128
"""Work-items of a group on a GPU: a multiple of all vendors' wavefront widths."""

LOCAL_MEMORY = 32 << 10
"""Required local memory [bytes], the minimum of OpenCL's full profile; kernels use up to 21 KiB."""


class OpenClDevice(GpuDevice):
    """A device of an OpenCL platform, in a context shared with the platform's other devices if possible.

    Attributes:
        cl_device: PyOpenCL's device.
        context: One for all devices of the platform if possible, so that they share buffers and events.
        transfers: The queue of synchronous transfers.
        programs: Its built kernels.
        ledger: Its allocations.
        packed_buffer_type: Its memory for weights packed at upload.
    """

    def __init__(self, reg: OpenClReg, name: str, cl_device: cl.Device, context: cl.Context) -> None:
        super().__init__(reg, name)
        self.cl_device = cl_device
        self.context = context
        self._kind = kind_of(cl_device.type)
        self.transfers = cl.CommandQueue(context, cl_device)
        self.programs = Programs(context, cl_device, name)
        self.ledger = MemoryLedger(cl_device.global_mem_size)
        self._buffer_type = OpenClBufferType(self)
        self._host_buffer_type = OpenClHostBufferType(self)
        self.packed_buffer_type = OpenClPackedBufferType(self)
        self._own_types = (self._buffer_type, self.packed_buffer_type)

    @property
    def description(self) -> str:
        """The names of the device and the platform."""
        return f"{self.cl_device.name.strip()} ({self.cl_device.platform.name.strip()})"

    @property
    def driver_version(self) -> str:
        """The platform and the driver, each with its version."""
        platform = self.cl_device.platform
        return f"{platform.name.strip()}, {platform.version.strip()}; driver {self.cl_device.driver_version}"

    @property
    def type(self) -> DeviceType:
        """GPU, IGPU where it shares the host's memory, ACCEL for CPU-type devices and accelerators."""
        if self._kind is not DeviceType.GPU:
            return DeviceType.ACCEL
        return DeviceType.IGPU if self.cl_device.host_unified_memory else DeviceType.GPU

    @property
    def is_cpu(self) -> bool:
        """Whether the device is a CPU: cores work best on separate rows, and may read unaligned bytes."""
        return self._kind is DeviceType.CPU

    @property
    def work_split(self) -> str:
        """The default work split, `"cpu"` (rows per work-item) or `"gpu"` (rows shared by a work-group).

        `"cpu"` on PoCL and Intel, which vectorise the loops of a work-item. Mesa's rusticl vectorises over
        work-items, and 25.0.7 crashes on `mul_mat_id_panel`, which only `"cpu"` needs.
        """
        return "cpu" if self.is_cpu and self.cl_device.platform.name != "rusticl" else "gpu"

    @property
    def memory(self) -> tuple[int, int]:
        """Free memory (total less what this process has allocated through ggmlb) and total [bytes]."""
        return self.ledger.free, self.ledger.total

    @property
    def caps(self) -> Caps:
        """All capabilities; `buffer_from_host_ptr` only if the device shares the host's memory."""
        return Caps(
            async_=True,
            host_buffer=True,
            buffer_from_host_ptr=bool(self.cl_device.host_unified_memory),
            events=True,
        )

    def init_backend(self, params: Mapping[str, Any] | None = None) -> Backend:
        """Open a stream: an in-order queue.

        Args:
            params: `work_split`: `"cpu"` gives each core its own rows, `"gpu"` shares a row among the
                work-items of a group. By default, it is the device's `work_split`.

        Raises:
            ArgumentError: An unknown parameter or work split.
            BackendError: The queue cannot be made.
        """
        params = self.check_params(params, "work_split")
        split = params.get("work_split", self.work_split)
        if split not in ("cpu", "gpu"):
            raise ArgumentError(f"{self.name}: work_split is {split!r}; give 'cpu' or 'gpu'")
        with cl_errors(f"open a queue on {self.name}", device=self.name):
            return OpenClBackend(self, self._target(split == "cpu"))

    def _target(self, on_cpu: bool) -> Target:
        limit = 1 << (min(MAX_WG, self.cl_device.max_work_group_size).bit_length() - 1)  # AMD's is often 256
        wg = 1 if on_cpu else min(GPU_WG, limit)
        return Target(on_cpu, self.cl_device.max_compute_units, wg, limit)

    @property
    def buffer_type(self) -> BufferType:
        """The device's memory."""
        return self._buffer_type

    @property
    def host_buffer_type(self) -> BufferType:
        """Host memory allocated by the runtime, for fast transfers."""
        return self._host_buffer_type

    def buffer_from_host_ptr(self, array: npt.NDArray[Any], max_tensor_size: int = 0) -> Buffer:
        """Use a NumPy array's memory as a buffer; see `Device.buffer_from_host_ptr`.

        Raises:
            ArgumentError: The array is not contiguous.
            BackendError: The device does not share the host's memory.
        """
        if not self.caps.buffer_from_host_ptr:
            raise BackendError(
                f"buffer_from_host_ptr: {self.name} does not share the host's memory; allocate a buffer and "
                "copy into it"
            )
        return OpenClBuffer.over_host_memory(self._buffer_type, host_bytes(array, "buffer_from_host_ptr"))

    def adopt(self, array: Any) -> tuple[Buffer, int] | None:
        """Wrap a `pyopencl.array.Array` of `context` without a copy, after waiting for its queued work."""
        if not isinstance(array, cl.array.Array) or array.context != self.context:
            return None
        if array.queue is not None and array.queue.device != self.cl_device:
            return None
        array.finish()
        memory: Any = array.base_data
        nbytes = 0 if memory is None else memory.size
        return OpenClBuffer(self._buffer_type, memory, nbytes, is_ours=False), array.offset

    def declines(self, op: Tensor) -> str | None:
        """Return why the node cannot be computed, or `None` if it can."""
        return self.packed_buffer_type.declines(op) or row_split.declines(op) or RULES.declines(op)

    @property
    def extra_bufts(self) -> tuple[BufferType, ...]:
        """Memory that packs weights at upload, if that is faster (ggml_backend_dev_get_extra_bufts).

        Not on CPU-type devices, which read unaligned bytes at the same speed (benchmarks/results/opencl.md).
        """
        return () if self.is_cpu else (self.packed_buffer_type,)

    def event_new(self) -> OpenClEvent:
        """Return a new event, which the device's queues can record."""
        return OpenClEvent(self)


def kind_of(bits: int) -> DeviceType:
    """Return GPU, CPU or ACCEL for the bits of `CL_DEVICE_TYPE`.

    A device may have several bits (Oclgrind's simulator has all): any with the GPU bit is a GPU.
    """
    if bits & cl.device_type.GPU:
        return DeviceType.GPU
    return DeviceType.CPU if bits & cl.device_type.CPU else DeviceType.ACCEL


def find_devices(reg: OpenClReg) -> tuple[OpenClDevice, ...]:
    """Return the usable devices of all platforms, in their order.

    A machine may have several platforms, a runtime installed twice, and drivers without a card. A
    platform or device that fails is skipped.

    Raises:
        BackendUnavailable: No device is usable; the message has each failure, and what to install.
    """
    found: list[OpenClDevice] = []
    runtimes: set[tuple[str, ...]] = set()
    failures: list[str] = []
    has_pocl = False
    for platform in _platforms():
        try:
            name = platform.name.strip()
            has_pocl |= pocl.is_pocl(platform)
            runtime = (platform.vendor, name, platform.version)
            if runtime not in runtimes and (opened := _open(reg, platform, len(found), failures)):
                runtimes.add(runtime)
                found += opened
        except cl.Error as error:
            failures.append(f"a platform: {error}")
    if not found:
        reason = (
            "no OpenCL platform has a device: install the card's OpenCL driver, or a runtime for the CPU "
            "with pip install 'ggmlb[opencl]'"
        )
        if has_pocl:
            reason += (
                "; PoCL is installed but has no device, perhaps because it cannot write its cache: set "
                "POCL_CACHE_DIR to a writable folder"
            )
        raise BackendUnavailable("; ".join((reason, *failures)))
    return tuple(found)


def _platforms() -> Sequence[cl.Platform]:
    try:
        return cl.get_platforms()
    except cl.Error:  # raised by the loader if there are none
        return ()


def _open(reg: OpenClReg, platform: cl.Platform, first: int, failures: list[str]) -> list[OpenClDevice]:
    """Return the platform's usable devices, named from `OpenCL{first}` on, in one context if possible."""
    usable: list[cl.Device] = []
    for cl_device in platform.get_devices():
        try:
            if not (cl_device.available and cl_device.compiler_available):
                continue
            if cl_device.local_mem_size < LOCAL_MEMORY:
                failures.append(
                    f"{cl_device.name}: {cl_device.local_mem_size:,} bytes of local memory; kernels need "
                    f"{LOCAL_MEMORY:,}"
                )
                continue
            if pocl.is_of_unknown_processor(cl_device) and not pocl.name_processor(cl_device):
                failures.append(
                    f"{cl_device.name}: PoCL does not know this processor, and builds nothing for it; "
                    "install a newer PoCL, or another OpenCL runtime"
                )
                continue
            usable.append(cl_device)
        except cl.Error as error:
            failures.append(f"a device of {platform.name}: {error}")
    try:
        context = cl.Context(usable) if usable else None
    except cl.Error:
        context = None  # a failing device must not disable the others: each gets its own context
    opened: list[OpenClDevice] = []
    for cl_device in usable:
        try:
            name = f"OpenCL{first + len(opened)}"
            opened.append(OpenClDevice(reg, name, cl_device, context or cl.Context([cl_device])))
        except cl.Error as error:
            failures.append(f"a device of {platform.name}: {error}")
    return opened
