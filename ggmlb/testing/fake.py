"""Fake devices: several GPUs simulated with NumPy, which expose errors that a real GPU hides.

Each fake device has its own memory, poisoned (NaN) when allocated, and a queue that runs only when
something waits for it. A missing wait reads NaN, and a missing copy raises. The test chooses supported
ops, memory size and failing calls. They test the scheduler and the allocators, and are no evidence about
real devices.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ggmlb.backends.common.kinds import Kinds
from ggmlb.backends.common.workspace import Workspace
from ggmlb.backends.cpu.lowering import RULES
from ggmlb.backends.cpu.plan import CpuLowering, CpuPlan
from ggmlb.backends.cpu.threads import Threads
from ggmlb.core.enums import DeviceType, Status, as_enum
from ggmlb.core.graph import Graph
from ggmlb.core.tensor import Tensor
from ggmlb.interface import Backend, BackendReg, BufferType, Caps, Device, Event, GraphPlan
from ggmlb.interface.data import Bytes
from ggmlb.interface.host import HostBuffer, aligned_empty
from ggmlb.interface.registry import cpu_buffer_type
from ggmlb.testing.memory import POISON

Declines = Callable[[Tensor], "str | None"]


class FakeReg(BackendReg):
    """The registration of fake devices.

    Attributes:
        calls: Every transfer, computation and wait of the devices, in the order in which they ran.
    """

    name = "Fake"

    def __init__(
        self,
        n_devices: int = 2,
        *,
        declines: Declines | None = None,
        capacity: int = 1 << 30,
        events: bool = True,
        async_copies: bool = True,
        device_type: DeviceType | str = DeviceType.GPU,
        host_buffer: bool = False,
    ) -> None:
        self.calls: list[str] = []
        self.device_type = as_enum("FakeReg", DeviceType, device_type)
        self.events = events
        self.async_copies = async_copies
        self.host_buffer = host_buffer
        self._devices = [FakeDevice(self, i, declines, capacity) for i in range(n_devices)]

    @property
    def devices(self) -> Sequence[FakeDevice]:
        """The fake devices."""
        return self._devices


class FakeDevice(Device):
    """A fake GPU.

    Attributes:
        used: Allocated memory [bytes].
        capacity: Total memory [bytes].
        n_buffers: Number of buffers not freed.
    """

    description = "a GPU simulated with NumPy"

    def __init__(self, reg: FakeReg, index: int, declines: Declines | None, capacity: int) -> None:
        self._reg = reg
        self._name = f"Fake{index}"
        self._declines = declines
        self.capacity = capacity
        self.used = 0
        self.n_buffers = 0
        self._buft = FakeBufferType(self)

    @property
    def name(self) -> str:
        """`Fake0`, `Fake1`, ..."""
        return self._name

    @property
    def type(self) -> DeviceType:
        """The device type (GPU, ...) that the test chose for the registration."""
        return self._reg.device_type

    @property
    def memory(self) -> tuple[int, int]:
        """Free and total memory of this fake device [bytes]."""
        return self.capacity - self.used, self.capacity

    @property
    def caps(self) -> Caps:
        """Capabilities: asynchronous; with events, and host memory, if the registration was created so."""
        return Caps(async_=True, events=self._reg.events, host_buffer=self._reg.host_buffer)

    @property
    def reg(self) -> FakeReg:
        """The registration that this fake device belongs to."""
        return self._reg

    @property
    def buffer_type(self) -> FakeBufferType:
        """Memory of this device only."""
        return self._buft

    @property
    def host_buffer_type(self) -> BufferType | None:
        """The CPU's memory, if the registration was created with host memory."""
        return cpu_buffer_type() if self._reg.host_buffer else None

    def init_backend(self, params: Mapping[str, Any] | None = None) -> FakeBackend:
        """Open a stream; there are no parameters."""
        self.check_params(params)
        return FakeBackend(self)

    def declines(self, op: Tensor) -> str | None:
        """Return the test's reason for declining a node, else that of the CPU's rules, or `None`."""
        why = self._declines(op) if self._declines is not None else None
        return why if why is not None else RULES.declines(op)

    def event_new(self) -> FakeEvent:
        """Create an event; refuse if the registration has none."""
        return FakeEvent(self) if self._reg.events else super().event_new()  # type: ignore[return-value]


class FakeBufferType(BufferType):
    """Memory that only its own device can use."""

    device: FakeDevice

    def __init__(self, device: FakeDevice) -> None:
        super().__init__(device, device.name, 256)  # as a GPU's

    def _alloc_buffer(self, nbytes: int) -> FakeBuffer:
        device = self.device
        if device.used + nbytes > device.capacity:
            raise self.out_of_memory(nbytes)
        device.used += nbytes
        device.n_buffers += 1
        return FakeBuffer(self, nbytes)


class FakeBuffer(HostBuffer):
    """NumPy memory, poisoned when allocated and when freed."""

    def __init__(self, buft: FakeBufferType, size: int) -> None:
        super().__init__(buft, np.full(size, POISON, np.uint8))
        self._device = buft.device

    def _free(self) -> None:
        self._clear(POISON)
        self._device.used -= self.size
        self._device.n_buffers -= 1


class FakeBackend(Backend):
    """A queue of work that runs only when something waits for it.

    Attributes:
        n_queued: Number of pieces of work queued so far.
    """

    guid = "ggmlb-fake"

    device: FakeDevice

    def __init__(self, device: FakeDevice) -> None:
        super().__init__(device)
        self._queue: deque[Callable[[], object]] = deque()
        self._workspace = Workspace(aligned_empty)
        self._threads = Threads(1)
        self._kinds: Kinds[Any] = Kinds()
        self.n_queued = 0

    def enqueue(self, label: str, work: Callable[[], object]) -> None:
        """Queue a piece of work; it appears in the registration's `calls` when it runs."""

        def run() -> None:
            self.device.reg.calls.append(f"{self.name} {label}")
            work()

        self._queue.append(run)
        self.n_queued += 1

    def run_until(self, n: int) -> None:
        """Run the queue until `n` pieces of work have been started in total."""
        self._run_until(n)

    def _run_until(self, n: int) -> None:
        while self._queue and self.n_queued - len(self._queue) < n:
            self._queue.popleft()()

    def _synchronize(self) -> None:
        self._run_until(self.n_queued)

    def _plan(self, graph: Graph) -> GraphPlan:
        return CpuPlan(self, graph, CpuLowering(self._kinds, self._workspace, self._threads))

    def _compute(self, plan: GraphPlan) -> Status:
        assert isinstance(plan, CpuPlan)

        def run() -> None:
            with np.errstate(all="ignore"):  # poison is NaN
                plan.run()

        self.enqueue(f"computes {len(plan.nodes)} nodes", run)
        return Status.SUCCESS

    def _set_tensor_async(self, tensor: Tensor, data: Bytes, offset: int) -> None:
        buffer = tensor.placed("set_tensor_async")
        self.enqueue(f"writes {tensor.name}", lambda: buffer._set_tensor(tensor, data, offset))

    def _get_tensor_async(self, tensor: Tensor, out: Bytes, offset: int) -> None:
        buffer = tensor.placed("get_tensor_async")
        self.enqueue(f"reads {tensor.name}", lambda: buffer._get_tensor(tensor, out, offset))

    def _cpy_tensor_async(self, backend_src: Backend, src: Tensor, dst: Tensor) -> bool:
        if not self.device.reg.async_copies or not isinstance(backend_src, FakeBackend):
            return False
        if not isinstance(src.buffer, FakeBuffer) or src.buffer.buft is not backend_src.default_buffer_type:
            return False
        buffer, source, before = dst.placed("cpy_tensor_async"), src.buffer, backend_src.n_queued

        def copy() -> None:
            backend_src._run_until(before)
            buffer._set_tensor(dst, source.base[src.offset : src.offset + src.nbytes], 0)

        self.enqueue(f"copies {src.name}", copy)
        if backend_src is not self:
            done = self.n_queued
            backend_src.enqueue(f"waits for the copy of {src.name}", lambda: self._run_until(done))
        return True

    def _copy_on_stream(self, src: Tensor, dst: Tensor) -> bool:
        source, buffer = src.buffer, dst.buffer
        if not self.device.reg.async_copies:
            return False
        if not isinstance(source, FakeBuffer) or not isinstance(buffer, FakeBuffer):
            return False
        self.enqueue(
            f"sends {src.name}",
            lambda: buffer._set_tensor(dst, source.base[src.offset : src.offset + src.nbytes], 0),
        )
        return True

    def _event_record(self, event: Event) -> None:
        assert isinstance(event, FakeEvent)
        event.backend, event.n = self, self.n_queued

    def _event_wait(self, event: Event) -> None:
        assert isinstance(event, FakeEvent)
        backend, n = event.backend, event.n
        if backend is not None and backend is not self:
            self.enqueue("waits for an event", lambda: backend._run_until(n))


class FakeEvent(Event):
    """An event: a position in a queue's work."""

    def __init__(self, device: FakeDevice) -> None:
        super().__init__(device)
        self.backend: FakeBackend | None = None
        self.n = 0

    def _synchronize(self) -> None:
        if self.backend is not None:
            self.backend._run_until(self.n)
