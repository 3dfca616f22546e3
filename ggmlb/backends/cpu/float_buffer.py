"""CPU_F32: memory that stores weights of any type as float32.

A weight is dequantised and transposed once, at upload, for fast BLAS products, at the cost of four bytes
per element. It is one of the CPU's extra buffer types: `get_proc_address("dev_get_extra_bufts")`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from ggmlb.backends.common.weight_memory import misplaced, weight_in
from ggmlb.core import dtypes
from ggmlb.core.dtypes import DType
from ggmlb.core.errors import BackendError, BoundsError, ShapeError
from ggmlb.core.tensor import Ne, Tensor, same_layout
from ggmlb.interface import Buffer, BufferType
from ggmlb.interface.data import Bytes
from ggmlb.interface.host import ALIGNMENT, HostBuffer, allocate

if TYPE_CHECKING:
    from ggmlb.backends.cpu.device import CpuDevice

CHUNK: Final = 1 << 20
"""Values that are converted at a time."""


class FloatBufferType(BufferType):
    """Host memory that stores weights as float32.

    Tensors in it are contiguous, and written by whole rows. They are read by products only.
    """

    def __init__(self, device: CpuDevice) -> None:
        super().__init__(device, "CPU_F32", ALIGNMENT)

    def alloc_size(self, tensor: Tensor) -> int:
        """Return four bytes per element."""
        return tensor.n_elements * 4

    def stored_layout(self, tensor: Tensor) -> tuple[DType, Ne]:
        """Float32, each matrix transposed."""
        k, m, n2, _ = tensor.ne
        return DType.F32, (4 * m, 4, 4 * k * m, 4 * k * m * n2)

    def declines(self, node: Tensor) -> str | None:
        """Return why a node cannot use operands in this memory, or `None`; only its weight may be here."""
        weight = weight_in(self, node)
        if weight is not None and weight.view_src is not None and not same_layout(weight, weight.view_src):
            return f"src0 is a view of a weight in {self.name} memory: give the product the weight itself"
        return misplaced(self, node)

    def _alloc_buffer(self, nbytes: int) -> Buffer:
        return FloatBuffer(self, allocate(self, nbytes))


class FloatBuffer(HostBuffer):
    """Weights as float32 in host memory."""

    def _init_tensor(self, tensor: Tensor) -> None:
        if not tensor.is_contiguous() or tensor.view_offs:
            raise ShapeError(
                f"{tensor.describe()}: {self.name} memory holds whole contiguous weights only, "
                "no windows on them"
            )

    def _set_tensor(self, tensor: Tensor, data: Bytes, offset: int) -> None:
        row = tensor.dtype.row_size(tensor.ne[0])
        first, begun = divmod(offset, row)
        n, rest = divmod(data.size, row)
        if begun or rest:
            raise BoundsError(
                f"set_tensor on {tensor.describe()}: bytes {offset} to {offset + data.size} are not whole "
                f"rows of {row} bytes; {self.name} memory is written by rows, because it converts them"
            )
        rows = data.reshape(n, row)
        k, m = tensor.ne[:2]
        matrices = self._base[tensor.offset :][: tensor.n_elements * 4].view(np.float32).reshape(-1, k, m)
        done = 0
        while done < n:
            matrix, column = divmod(first + done, m)
            count = min(n - done, m - column, max(1, CHUNK // k))
            values = np.empty((count, k), np.float32)
            dtypes.dequantize_into(values, rows[done : done + count], tensor.dtype)
            matrices[matrix, :, column : column + count] = values.T
            done += count

    def _get_tensor(self, tensor: Tensor, out: Bytes, offset: int) -> None:
        raise BackendError(
            f"get_tensor on {tensor.describe()}: {self.name} memory holds its values as float32, not the "
            "bytes that were written; keep the weight in CPU memory if it must be read back"
        )

    def _memset_tensor(self, tensor: Tensor, value: int, offset: int, size: int) -> None:
        self._set_tensor(tensor, np.full(size, value, np.uint8), offset)

    def _cpy_tensor(self, src: Tensor, dst: Tensor) -> bool:
        return False  # the values have to be converted
