"""CPU_F32: memory that stores weights of any type as float32.

A weight is dequantised and transposed once, at upload, for fast BLAS products, at the cost of four bytes
per element. It is one of the CPU's extra buffer types: `get_proc_address("dev_get_extra_bufts")`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from ggmlb.backends.common.rules import FLOATS
from ggmlb.backends.common.weight_memory import PackedBuffer, misplaced, weight_in
from ggmlb.core import dtypes
from ggmlb.core.dtypes import DType
from ggmlb.core.errors import BackendError, ShapeError
from ggmlb.core.tensor import Ne, Tensor, same_layout
from ggmlb.interface import Buffer, BufferType
from ggmlb.interface.data import Bytes
from ggmlb.interface.host import ALIGNMENT, HostBuffer, allocate

if TYPE_CHECKING:
    from ggmlb.backends.cpu.device import CpuDevice

CHUNK: Final = 1 << 20
"""Values converted at a time."""


class FloatBufferType(BufferType):
    """Host memory that stores weights of matrix products as float32, other tensors unchanged."""

    def __init__(self, device: CpuDevice) -> None:
        super().__init__(device, "CPU_F32", ALIGNMENT)

    def suits(self, tensor: Tensor) -> bool:
        """Whether a tensor is stored as float32: f32, f16, bf16 and quantised types are."""
        return tensor.dtype.is_quantized or tensor.dtype in FLOATS

    def is_readable(self, tensor: Tensor) -> bool:
        """Whether `get_tensor` can return the bytes that were written: not for quantised types."""
        return not tensor.dtype.is_quantized

    def alloc_size(self, tensor: Tensor) -> int:
        """Return the stored size of a tensor [bytes]: four per element of a weight."""
        return tensor.n_elements * 4 if self.suits(tensor) else tensor.nbytes

    def stored_layout(self, tensor: Tensor) -> tuple[DType, Ne]:
        """Return type and strides of a tensor as stored: for weights, float32 with each matrix transposed."""
        if not self.suits(tensor):
            return tensor.dtype, tensor.nb
        k, m, n2, _ = tensor.ne
        return DType.F32, (4 * m, 4, 4 * k * m, 4 * k * m * n2)

    def packing(self, tensor: Tensor) -> str:
        """Return the type-name suffix `_f32` for weights, else an empty one."""
        return "_f32" if self.suits(tensor) else ""

    def declines(self, node: Tensor) -> str | None:
        """Return why a node cannot read operands in this memory, or `None`; only products can, as src0."""
        weight = weight_in(self, node)
        if weight is not None and weight.view_src is not None and not same_layout(weight, weight.view_src):
            return f"src0 is a view of a weight in {self.name} memory: pass the whole weight to the product"
        return misplaced(self, node)

    def _alloc_buffer(self, nbytes: int) -> Buffer:
        return FloatBuffer(self, allocate(self, nbytes))


class FloatBuffer(PackedBuffer, HostBuffer):
    """A buffer of weights stored as float32, converted row by row in transfers."""

    def _init_tensor(self, tensor: Tensor) -> None:
        if self.packing(tensor) and (not tensor.is_contiguous() or tensor.view_offs):
            raise ShapeError(
                f"{tensor.describe()}: {self.name} memory holds whole contiguous weights only, "
                "no views of them; place it in CPU memory"
            )

    def group_nbytes(self, tensor: Tensor) -> int:
        """Size of a row in the weight's own type [bytes], the unit in which weights are converted."""
        return tensor.dtype.row_size(tensor.ne[0])

    def _set_groups(self, tensor: Tensor, data: Bytes, offset: int) -> None:
        for rows, columns in self._columns(tensor, data, offset):
            values = np.empty((len(rows), tensor.ne[0]), np.float32)
            dtypes.dequantize_into(values, rows, tensor.dtype)
            columns[:] = values.T

    def _get_groups(self, tensor: Tensor, out: Bytes, offset: int) -> None:
        if not self.buft.is_readable(tensor):
            raise BackendError(
                f"get_tensor on {tensor.describe()}: {self.name} memory holds its values as float32, not the "
                "bytes that were written; write it by whole rows, and keep the weight in CPU memory if it "
                "must be read back"
            )
        for rows, columns in self._columns(tensor, out, offset):
            rows[:] = dtypes.quantize(columns.T, tensor.dtype).view(np.uint8)

    def _columns(
        self, tensor: Tensor, data: Bytes, offset: int
    ) -> Iterator[tuple[Bytes, npt.NDArray[np.float32]]]:
        """Yield chunks of rows in the weight's type, from `offset` on, each with the memory of its values."""
        k, m = tensor.ne[:2]
        rows = data.reshape(-1, self.group_nbytes(tensor))
        matrices = self._base[tensor.offset :][: tensor.n_elements * 4].view(np.float32).reshape(-1, k, m)
        first, done = offset // rows.shape[1], 0
        while done < len(rows):
            matrix, column = divmod(first + done, m)
            count = min(len(rows) - done, m - column, max(1, CHUNK // k))
            yield rows[done : done + count], matrices[matrix, :, column : column + count]
            done += count

    def _cpy_tensor(self, src: Tensor, dst: Tensor) -> bool:
        return False  # the values have to be converted
