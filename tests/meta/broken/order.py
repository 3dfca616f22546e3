"""Devices that do things in the wrong order."""

from __future__ import annotations

from ggmlb.core.errors import BackendError
from ggmlb.interface import Caps, Device
from ggmlb.testing.fake import FakeBackend, FakeBuffer, FakeBufferType, FakeDevice, FakeEvent, FakeReg


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

    caps = Caps(async_=True, events=True, host_buffer=True)


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
