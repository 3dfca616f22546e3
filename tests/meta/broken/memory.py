"""Devices whose memory is broken."""

from __future__ import annotations

from typing import Any

from ggmlb.backends.cpu.device import CpuReg
from ggmlb.interface import Device, HostBuffer, HostBufferType
from ggmlb.interface.host import ALIGNMENT, aligned_empty
from tests.meta.broken.values import WrongDevice


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


def storing(what: type[Any]) -> Device:
    """A device whose memory is broken."""
    device = WrongDevice(CpuReg())
    kind = what if issubclass(what, BadBufferType) else type("Type", (BadBufferType,), {"kind": what})
    device._buffer_type = kind(device)
    return device
