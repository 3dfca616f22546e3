"""Devices whose memory for weights is broken."""

from __future__ import annotations

from typing import Any

from ggmlb.backends.cpu.device import CpuReg
from ggmlb.backends.cpu.float_buffer import FloatBuffer, FloatBufferType
from ggmlb.interface import Device
from ggmlb.interface.host import aligned_empty
from tests.meta.broken.values import WrongDevice


class RowsBeginAtZero(FloatBuffer):
    """It writes each row over the first."""

    def _set_tensor(self, tensor, data, offset):
        super()._set_tensor(tensor, data, 0)


class ReadsWhatItKeeps(FloatBuffer):
    """It returns its own numbers as a weight's bytes."""

    def _get_tensor(self, tensor, out, offset):
        out[:] = self.base[tensor.offset + offset :][: out.size]


class MatricesUpsideDown(FloatBuffer):
    """It keeps a weight's rows in the wrong order."""

    def _set_tensor(self, tensor, data, offset):
        row = tensor.dtype.row_size(tensor.ne[0])
        super()._set_tensor(tensor, data.reshape(-1, row)[::-1].reshape(-1), offset)


def too_small(memory: FloatBufferType, tensor: Any) -> int:
    """The size of a weight's blocks, where its values are kept."""
    return tensor.nbytes


def keeping(kind: type[FloatBuffer], alloc_size: Any = FloatBufferType.alloc_size) -> Device:
    """A device whose memory for weights is broken: its buffers, or how large a weight is in them."""

    class Memory(FloatBufferType):
        def _alloc_buffer(self, nbytes):
            self._used = True
            return kind(self, aligned_empty(nbytes))

    Memory.alloc_size = alloc_size
    device = WrongDevice(CpuReg())
    device._float_buffer_type = Memory(device)
    return device
