"""LLVM_Repacked: an extra buffer type that stores weights in strips of 16 interleaved rows.

Matrix products read strips (`kernels.interleaved`) faster. Sizes are unchanged, and tensors are read back in
ggml's layout. Weights with a number of rows that is not a multiple of 16, and types that have no strips, are
stored in ggml's layout. `get_proc_address("dev_get_extra_bufts")` returns it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from ggmlb.backends.common.weight_memory import PackedBuffer, misplaced, weight_in
from ggmlb.backends.llvm.codegen.library import Emit, function, library
from ggmlb.backends.llvm.codegen.simd import SIZES
from ggmlb.backends.llvm.kernels import interleaved
from ggmlb.backends.llvm.kernels.blocks import SCALES
from ggmlb.core.tensor import Tensor
from ggmlb.interface import Buffer, BufferType
from ggmlb.interface.data import Bytes
from ggmlb.interface.host import ALIGNMENT, HostBuffer, allocate

if TYPE_CHECKING:
    from ggmlb.backends.llvm.device import LlvmDevice

IN_STRIPS: Final = "_x16"
"""Suffix of the type's name for weights in strips."""


class RepackedBufferType(BufferType):
    """Host memory for weights of matrix products, in strips (16 interleaved rows) if contiguous."""

    def __init__(self, device: LlvmDevice) -> None:
        super().__init__(device, "LLVM_Repacked", ALIGNMENT)

    def suits(self, tensor: Tensor) -> bool:
        """Whether the buffer type stores the tensor in strips (16 interleaved rows)."""
        return is_packed(tensor)

    def packing(self, tensor: Tensor) -> str:
        """Name of the tensor's storage order, `_x16` for strips of 16 interleaved rows, else empty."""
        return IN_STRIPS if is_packed(tensor.view_src or tensor) else ""

    def declines(self, node: Tensor) -> str | None:
        """Return why the node cannot use operands in this memory, or `None`; only matrix products can."""
        if not self.is_used:
            return None
        weight = weight_in(self, node)
        if weight is not None and not _is_whole(weight):
            return f"src0 is a part of a weight in {self.name} memory: give the product the whole weight"
        return misplaced(self, node)

    def _alloc_buffer(self, nbytes: int) -> Buffer:
        return RepackedBuffer(self, allocate(self, nbytes))


class RepackedBuffer(PackedBuffer, HostBuffer):
    """Weights in host memory, packed to strips (16 interleaved rows) at upload."""

    def group_nbytes(self, tensor: Tensor) -> int:
        """Size of a strip (16 interleaved rows) of the tensor [bytes]."""
        return interleaved.ROWS * tensor.dtype.row_size(tensor.ne[0])

    def _set_groups(self, tensor: Tensor, data: Bytes, offset: int) -> None:
        start = tensor.offset + offset
        _move(interleaved.pack, self._base[start : start + data.size], data, tensor)

    def _get_groups(self, tensor: Tensor, out: Bytes, offset: int) -> None:
        start = tensor.offset + offset
        _move(interleaved.unpack, self._base[start : start + out.size], out, tensor)

    def _cpy_tensor(self, src: Tensor, dst: Tensor) -> bool:
        return False  # the bytes have to be converted


def is_packed(tensor: Tensor) -> bool:
    """Whether `LLVM_Repacked` memory stores a weight in strips (16 interleaved rows)."""
    name = tensor.dtype.name.lower()
    return (
        (name in SCALES or name in SIZES) and tensor.ne[1] % interleaved.ROWS == 0 and tensor.is_contiguous()
    )


def _is_whole(tensor: Tensor) -> bool:
    whole = tensor.view_src
    if whole is None or not is_packed(whole):
        return True
    return tensor.view_offs == 0 and tensor.ne == whole.ne and is_packed(tensor)


def _move(emit: Emit, packed: Bytes, rows: Bytes, tensor: Tensor) -> None:
    """Pack or unpack whole strips by the kernel `emit`."""
    dtype, k = tensor.dtype, tensor.ne[0]
    kernel = function(library().address(emit, (dtype.name.lower(), dtype.type_size)), 4)
    n_strips = rows.size // (interleaved.ROWS * dtype.row_size(k))
    args = np.array([packed.ctypes.data, rows.ctypes.data, k // dtype.block_size, n_strips], np.int64)
    kernel(args.ctypes.data, 0, 1, 0)
