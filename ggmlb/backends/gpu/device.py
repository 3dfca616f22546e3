"""GpuDevice: base class of CUDA and OpenCL devices."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from ggmlb.backends.common.kinds import Kinds
from ggmlb.core.enums import DeviceType, Op
from ggmlb.interface import Device
from ggmlb.parallel.row_split import SplitBufferType

if TYPE_CHECKING:
    from ggmlb.backends.gpu.kinds import Lowered
    from ggmlb.core.tensor import Tensor
    from ggmlb.interface import BackendReg, BufferType

MIN_OFFLOAD_COLUMNS: Final = 32
"""Fewest columns of a product for which its weights are uploaded (ggml's threshold)."""


class GpuDevice(Device):
    """Base class of devices that run the portable kernels.

    Attributes:
        kinds: Cache of lowered nodes, shared by its streams.
    """

    _own_types: tuple[BufferType, ...]
    """The types of its memory."""

    def __init__(self, reg: BackendReg, name: str) -> None:
        self._reg = reg
        self._name = name
        self.kinds: Kinds[Lowered[Any]] = Kinds()

    @property
    def name(self) -> str:
        """Registration name and device number, such as `CUDA0` or `OpenCL1`."""
        return self._name

    @property
    def reg(self) -> BackendReg:
        """The registration of the device's backend."""
        return self._reg

    def supports_buft(self, buft: BufferType) -> bool:
        """Whether `buft` is memory of this device, or a row-split type whose main device it is."""
        return buft in self._own_types or (isinstance(buft, SplitBufferType) and buft.device is self)

    def offload_op(self, op: Tensor) -> bool:
        """Whether to copy a node's host weights here: on a discrete GPU, for products of many columns."""
        if self.type is not DeviceType.GPU:
            return False
        n_columns = op.ne[2] if op.op is Op.MUL_MAT_ID else op.ne[1]
        return op.op in (Op.MUL_MAT, Op.MUL_MAT_ID) and n_columns >= MIN_OFFLOAD_COLUMNS
