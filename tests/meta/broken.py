"""Backends that are broken on purpose, each in one way; the conformance kit must find every one.

Those that compute wrongly are the CPU backend with a fault put in; those that do things in the wrong order
are the fake backend, whose queue runs only when something waits for it.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from ggmlb.backends.array.plan import ArrayPlan
from ggmlb.backends.cpu.backend import CpuBackend
from ggmlb.backends.cpu.device import CpuDevice, CpuReg
from ggmlb.backends.cpu.lowering import CpuLowering
from ggmlb.enums import NO_OPS, Op, Status
from ggmlb.errors import BackendError
from ggmlb.interface import Caps, HostBuffer, HostBufferType
from ggmlb.interface.host import ALIGNMENT, aligned_empty
from ggmlb.tensor import contiguous_nb
from ggmlb.testing.fake import FakeBackend, FakeBuffer, FakeBufferType, FakeDevice, FakeEvent, FakeReg

if TYPE_CHECKING:
    from ggmlb.interface import Device
    from ggmlb.tensor import Tensor


def like(t: Tensor, **changes: Any) -> Tensor:
    """The same tensor, seen wrongly."""
    twin = t.reading(t.src, t.view_src)
    twin._contiguous = False
    for name, value in changes.items():
        setattr(twin, name, value)
    return twin


# -- wrong values and wrong bytes: the CPU ---------------------------------------------------------


class WrongBackend(CpuBackend):
    """The CPU, with hooks where faults are put in."""

    def node(self, node: Tensor) -> Tensor:
        """What is computed in place of a node."""
        return node

    def after(self, node: Tensor, memory: np.ndarray) -> None:
        """What happens to memory once a node is computed."""

    def _plan(self, graph: Any) -> Any:
        wrong = SimpleNamespace(nodes=[self.node(n) if n.op not in NO_OPS else n for n in graph.nodes])
        plan = ArrayPlan(self, wrong, CpuLowering(self._workspace, self._threads))
        plan.nodes = tuple(graph.nodes)
        return plan

    def _compute(self, plan: Any) -> Status:
        status = super()._compute(plan)
        for node in plan.nodes:
            if node.op not in NO_OPS and node.nbytes:
                self.after(node, node.buffer.base)
        return status


def sources(node: Tensor, change: Any) -> Tensor:
    return node.reading(tuple(s if s is None else change(s) for s in node.src), node.view_src)


class WrongStride(WrongBackend):
    """It takes every operand for contiguous."""

    def node(self, node):
        if node.op is not Op.ADD:
            return node
        return sources(node, lambda s: like(s, nb=contiguous_nb(s.dtype, s.ne)))


class WrongBroadcast(WrongBackend):
    """It repeats the first row of src1 where it should go through all."""

    def node(self, node):
        if node.op is not Op.MUL or node.src[1].ne[1] == 1:
            return node
        a, b = node.src
        first = like(b, ne=(b.ne[0], 1, *b.ne[2:]))
        return node.reading((a, first), node.view_src)


class UnalignedOffset(WrongBackend):
    """It rounds the offset of a view down to its alignment."""

    def node(self, node):
        if node.op is not Op.CONT:
            return node
        return sources(node, lambda s: like(s, offset=s.offset // 64 * 64))


class OneByteTooMany(WrongBackend):
    """It writes one byte after the end of its result."""

    def after(self, node, memory):
        memory[node.offset + node.nbytes] ^= 1


class OneByteBefore(WrongBackend):
    """It writes one byte before its result."""

    def after(self, node, memory):
        memory[node.offset - 1] ^= 1


class LastElementMissing(WrongBackend):
    """It does not write the last element of its result."""

    def after(self, node, memory):
        size = node.dtype.type_size
        memory[node.offset + node.nbytes - size : node.offset + node.nbytes] = 0xFF


class ChangesItsInput(WrongBackend):
    """It uses an input as scratch."""

    def after(self, node, memory):
        a = node.src[0]
        if a is not None and a.view_src is None and a.nbytes and node.view_src is None:
            memory[a.offset] ^= 1


class FillsTheGaps(WrongBackend):
    """It writes rows with the gaps between them."""

    def after(self, node, memory):
        if node.op is Op.CPY and not node.is_contiguous() and node.ne[1] > 1 and node.ne[0] < 1000:
            memory[node.offset + node.ne[0] * node.nb[0]] ^= 1


class NoInfinity(WrongBackend):
    """It writes a large number where -inf is right."""

    def after(self, node, memory):
        if node.op is Op.DIAG_MASK_INF:
            values = memory[node.offset : node.offset + node.nbytes].view(np.float32)
            values[np.isinf(values)] = -1e30


class LowPrecision(WrongBackend):
    """It keeps 8 bits of its results."""

    def after(self, node, memory):
        if node.op is Op.NORM and node.is_contiguous() and node.dtype.name == "F32":
            values = memory[node.offset : node.offset + node.nbytes].view(np.uint32)
            values &= 0xFFFF0000


class WorksOnce(WrongBackend):
    """A plan computes the first time only."""

    def _compute(self, plan):
        if getattr(plan, "ran", False):
            return Status.SUCCESS
        plan.ran = True
        return super()._compute(plan)


class StalePlan(WrongBackend):
    """It computes the first plan of a graph for ever, wherever the tensors lie."""

    def graph_compute_async(self, graph):
        plan = self._plans.get(graph)
        if plan is None:
            plan = self._plans[graph] = self.graph_plan_create(graph)
        return self._compute(plan)

    def graph_plan_update(self, plan, graph):
        return plan


class IgnoresAbort(WrongBackend):
    """It never asks the abort callback."""

    def _compute(self, plan):
        callback, self.abort_callback = self.abort_callback, None
        try:
            return super()._compute(plan)
        finally:
            self.abort_callback = callback


class ComputesWhatItRefuses(WrongBackend):
    """Its device refuses ABS, and it computes it all the same."""

    def _check_graph(self, graph):
        pass


class OtherError(WrongBackend):
    """It refuses with an error of its own."""

    def _check_graph(self, graph):
        for node in graph.nodes:
            if self.device.declines(node):
                raise KeyError(node.op)


class WrongDevice(CpuDevice):
    """A CPU whose stream is of the class given."""

    backend: type[CpuBackend] = WrongBackend

    @property
    def name(self):
        return "Broken0"

    def init_backend(self, params=None):
        return self.backend(self, 1)


class ClaimsAll(WrongDevice):
    """It claims every op, and fails where it has no rule."""

    def declines(self, op):
        return None

    def init_backend(self, params=None):
        return RefusesLate(self, 1)


class RefusesLate(WrongBackend):
    """It fails while it plans."""

    def _plan(self, graph):
        for node in graph.nodes:
            if node.op is Op.UNARY:
                raise BackendError("no kernel")
        return super()._plan(graph)


class SaysNoForYes(WrongDevice):
    """Its `supports_op` denies what its `declines` does not."""

    def supports_op(self, op):
        return op.op is not Op.UNARY and super().supports_op(op)


class NoReason(WrongDevice):
    """It refuses and does not say why."""

    def declines(self, op):
        return " " if op.op is Op.UNARY else super().declines(op)


class ChangesItsMind(WrongDevice):
    """Its answer depends on whether the tensors lie somewhere."""

    def declines(self, op):
        return "not now" if op.op is Op.UNARY and op.buffer is not None else super().declines(op)


class RefusesAbs(WrongDevice):
    """It refuses unary ops."""

    def declines(self, op):
        return "not of mine" if op.op is Op.UNARY else super().declines(op)


class BadBuffer(HostBuffer):
    """Memory of the CPU, to be broken."""


class BadBufferType(HostBufferType):
    """Allocates `kind`."""

    kind: type[HostBuffer] = BadBuffer

    def __init__(self, device):
        super().__init__(device, "CPU", ALIGNMENT)

    def _alloc_buffer(self, nbytes):
        return self.kind(self, aligned_empty(nbytes))


class MemsetOffByOne(BadBuffer):
    """`memset` sets one byte more than asked for."""

    def _memset_tensor(self, tensor, value, offset, size):
        super()._memset_tensor(tensor, value, offset, size + 1)


class SetIgnoresOffset(BadBuffer):
    """`set_tensor` begins at the tensor's start."""

    def _set_tensor(self, tensor, data, offset):
        super()._set_tensor(tensor, data, 0)


class GetIgnoresOffset(BadBuffer):
    """`get_tensor` begins at the tensor's start."""

    def _get_tensor(self, tensor, out, offset):
        super()._get_tensor(tensor, out, 0)


class WrongPitch(BadBuffer):
    """A strided write goes through the tensor with the stride of the data."""

    def _set_tensor_2d(self, tensor, data, pieces):
        super()._set_tensor_2d(tensor, data, pieces._replace(stride_tensor=pieces.stride_data))


class ClearStopsShort(BadBuffer):
    """`clear` sets whole words only."""

    def _clear(self, value):
        self.base[: self.size // 8 * 8] = value


class KeepsTheData(BadBuffer):
    """A synchronous write reads the caller's data only when something else happens."""

    later: Any = None

    def _set_tensor(self, tensor, data, offset):
        self._flush()
        self.later = (tensor, data, offset)

    def _get_tensor(self, tensor, out, offset):
        self._flush()
        super()._get_tensor(tensor, out, offset)

    def _flush(self):
        if self.later:
            super()._set_tensor(*self.later)
            self.later = None


class MisalignedType(BadBufferType):
    """Its memory begins anywhere."""

    def _alloc_buffer(self, nbytes):
        return HostBuffer(self, aligned_empty(nbytes + 8)[8:])


class NoNothing(BadBufferType):
    """It cannot allocate nothing."""

    def _alloc_buffer(self, nbytes):
        if not nbytes:
            raise ZeroDivisionError("0 pages")
        return super()._alloc_buffer(nbytes)


class OtherMemoryError(BadBufferType):
    """What is too large is an error of its library."""

    def _alloc_buffer(self, nbytes):
        if nbytes > 1 << 40:
            raise OverflowError("too large")
        return super()._alloc_buffer(nbytes)


def computing(backend: type[CpuBackend], device: type[WrongDevice] = WrongDevice) -> Device:
    """A device whose streams are broken."""
    return type(backend.__name__, (device,), {"backend": backend})(CpuReg())


def refusing(device: type[WrongDevice], backend: type[CpuBackend] = WrongBackend) -> Device:
    """A device that says what is not so."""
    return computing(backend, device)


def storing(what: type[Any]) -> Device:
    """A device whose memory is broken."""
    device = WrongDevice(CpuReg())
    kind = what if issubclass(what, BadBufferType) else type("Type", (BadBufferType,), {"kind": what})
    device._buffer_type = kind(device)
    return device


# -- wrong order: the fake device ------------------------------------------------------------------


class NeverWaits(FakeBackend):
    """`synchronize` does not wait."""

    def _synchronize(self):
        pass


class LastFirst(FakeBackend):
    """The queue runs the latest work first."""

    def _synchronize(self):
        while self._queue:
            self._queue.pop()()


class EventDoesNotWait(FakeBackend):
    """Work queued after `event_wait` does not wait for the event."""

    def _event_wait(self, event):
        pass


class CopyOvertakesSource(FakeBackend):
    """A copy takes what the source holds now, not what is being computed."""

    def _cpy_tensor_async(self, backend_src, src, dst):
        if not isinstance(backend_src, FakeBackend):
            return False
        data = src.buffer.base[src.offset : src.offset + src.nbytes].copy()
        self.enqueue("copies", lambda: dst.buffer._set_tensor(dst, data, 0))
        return True


class CopyOvertakesReaders(FakeBackend):
    """A copy is done at once, though queued work still has to read what it overwrites."""

    def _cpy_tensor_async(self, backend_src, src, dst):
        backend_src.synchronize()
        dst.buffer._set_tensor(dst, src.buffer.base[src.offset : src.offset + src.nbytes], 0)
        return True


class SourceDoesNotWait(FakeBackend):
    """Later work on the source does not wait until a copy has read."""

    def _cpy_tensor_async(self, backend_src, src, dst):
        if not isinstance(backend_src, FakeBackend):
            return False
        start, end = src.offset, src.offset + src.nbytes
        self.enqueue("copies", lambda: self._copy(backend_src, src.buffer.base[start:end], dst))
        return True

    def _copy(self, backend_src, data, dst):
        backend_src.synchronize()
        dst.buffer._set_tensor(dst, data, 0)


class FreeForgetsWork(FakeBackend):
    """Freeing the stream drops what is queued."""

    def free(self):
        self._queue.clear()
        super().free()


class AsyncGetReturnsEarly(FakeBackend):
    """An asynchronous read reads at once."""

    def _get_tensor_async(self, tensor, out, offset):
        tensor.buffer._get_tensor(tensor, out, offset)


class DeadEvent(FakeEvent):
    """`synchronize` returns at once."""

    def _synchronize(self):
        pass


class FreedTooEarly(FakeBuffer):
    """Queued work does not find the memory any more."""

    def _set_tensor(self, tensor, data, offset):
        if not self.is_freed:
            super()._set_tensor(tensor, data, offset)


class CopyIgnoresOffset(FakeBuffer):
    """A copy begins at the start of the source's buffer."""

    def _cpy_tensor(self, src, dst):
        if not isinstance(src.buffer, FakeBuffer):
            return False
        self.base[dst.offset : dst.offset + dst.nbytes] = src.buffer.base[: src.nbytes]
        return True


class NoEventsAfterAll(FakeDevice):
    """Its caps name events that it does not have."""

    def event_new(self):
        raise BackendError("no events")


class WrongFacts(FakeDevice):
    """More memory is free than there is."""

    @property
    def memory(self):
        return 2 * self.capacity, self.capacity


class NoHostBuffer(FakeDevice):
    """Its caps name a host buffer that it does not have."""

    @property
    def caps(self):
        return Caps(async_=True, events=True, host_buffer=True)


def queueing(
    backend: type[FakeBackend] = FakeBackend,
    *,
    event: type[FakeEvent] = FakeEvent,
    buffer: type[FakeBuffer] = FakeBuffer,
    device: type[FakeDevice] = FakeDevice,
) -> Device:
    """A fake device with broken parts."""

    class Broken(device):  # type: ignore[misc, valid-type]
        def init_backend(self, params=None):
            return backend(self)

        def event_new(self):
            return event(self) if device.event_new is FakeDevice.event_new else super().event_new()

    class Memory(FakeBufferType):
        def _alloc_buffer(self, nbytes):
            found = super()._alloc_buffer(nbytes)
            found.__class__ = buffer
            return found

    made = Broken(FakeReg(1), 0, None, 1 << 30)
    made._buft = Memory(made)
    return made
