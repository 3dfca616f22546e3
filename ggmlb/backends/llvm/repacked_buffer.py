"""LLVM_Repacked: weights in strips of 16 interleaved rows (`kernels.interleaved`), read faster by products.

The size is unchanged, and tensors are read back in ggml's order. A weight without whole strips of rows,
or whose type has no strips, is stored in ggml's order. It is the device's extra buffer type:
`get_proc_address("dev_get_extra_bufts")`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from ggmlb.backends.common.packed_buffer import PackedBuffer
from ggmlb.backends.common.weight_memory import misplaced, weight_in
from ggmlb.backends.llvm.codegen.simd import SIZES
from ggmlb.backends.llvm.kernels.blocks import FORMS
from ggmlb.backends.llvm.kernels.interleaved import BITS, ROWS, fields_of
from ggmlb.core.dtypes import DType
from ggmlb.core.tensor import Tensor
from ggmlb.interface import Buffer, BufferType
from ggmlb.interface.data import Bytes
from ggmlb.interface.host import ALIGNMENT, HostBuffer, allocate

if TYPE_CHECKING:
    from ggmlb.backends.llvm.device import LlvmDevice
    from ggmlb.backends.llvm.kernels.interleaved import Field

IN_STRIPS: Final = "_x16"
"""Suffix of the name of a packed type."""


class RepackedBufferType(BufferType):
    """Host memory for contiguous weights, which products read."""

    def __init__(self, device: LlvmDevice) -> None:
        super().__init__(device, "LLVM_Repacked", ALIGNMENT)

    def suits(self, tensor: Tensor) -> bool:
        """Whether the tensor is stored in strips."""
        return is_packed(tensor)

    def packing(self, tensor: Tensor) -> str:
        """`_x16` for tensors in strips."""
        return IN_STRIPS if is_packed(tensor.view_src or tensor) else ""

    def declines(self, node: Tensor) -> str | None:
        """Return why a node cannot use operands in this memory, or `None`; only its weight may be here."""
        if not self.is_used:
            return None
        weight = weight_in(self, node)
        if weight is not None and not _is_whole(weight):
            return f"src0 is a part of a weight in {self.name} memory: give the product the whole weight"
        return misplaced(self, node)

    def _alloc_buffer(self, nbytes: int) -> Buffer:
        return RepackedBuffer(self, allocate(self, nbytes))


class RepackedBuffer(PackedBuffer, HostBuffer):
    """Weights in host memory, packed at upload."""

    def group_nbytes(self, tensor: Tensor) -> int:
        """Bytes of a strip."""
        return ROWS * tensor.dtype.row_size(tensor.ne[0])

    def pack(self, data: Bytes, tensor: Tensor) -> Bytes:
        """Rows as strips."""
        return pack(data, tensor.dtype, tensor.ne[0])

    def unpack(self, data: Bytes, tensor: Tensor) -> Bytes:
        """Strips as rows."""
        return unpack(data, tensor.dtype, tensor.ne[0])

    def _cpy_tensor(self, src: Tensor, dst: Tensor) -> bool:
        return False  # the bytes have to be converted


def is_packed(tensor: Tensor) -> bool:
    """Whether this memory keeps a weight in strips."""
    name = tensor.dtype.name.lower()
    return (name in FORMS or name in SIZES) and tensor.ne[1] % ROWS == 0 and tensor.is_contiguous()


def _is_whole(tensor: Tensor) -> bool:
    whole = tensor.view_src
    if whole is None or not is_packed(whole):
        return True
    return tensor.view_offs == 0 and tensor.ne == whole.ne and is_packed(tensor)


def pack(data: Bytes, dtype: DType, k: int) -> Bytes:
    """Return whole strips of rows of `k` elements: for each, field by field, block, unit, row."""
    out = np.empty_like(data)
    for rows, strips, field in _parts(data, out, dtype, k):
        if field.unit == BITS:
            _pack_bits(rows, strips)
        else:
            by_row, by_strip = _units(rows, strips, field.unit)
            by_strip[...] = by_row
    return out


def unpack(data: Bytes, dtype: DType, k: int) -> Bytes:
    """Return rows: what `pack` was given."""
    out = np.empty_like(data)
    for rows, strips, field in _parts(out, data, dtype, k):
        if field.unit == BITS:
            _unpack_bits(rows, strips)
        else:
            by_row, by_strip = _units(rows, strips, field.unit)
            by_row[...] = by_strip
    return out


def _parts(rows: Bytes, strips: Bytes, dtype: DType, k: int) -> list[tuple[Any, Any, Field]]:
    """Each field in rows `(strips, 16, blocks, bytes)`, and in strips `(strips, blocks, 16 bytes)`."""
    n_blocks = k // dtype.block_size
    by_row = rows.reshape(-1, ROWS, n_blocks, dtype.type_size)
    by_strip = strips.reshape(len(by_row), -1)
    found = []
    for field in fields_of(dtype.name.lower()):
        start, size = ROWS * n_blocks * field.offset, ROWS * field.nbytes
        place = by_strip[:, start : start + n_blocks * size].reshape(len(by_row), n_blocks, size)
        found.append((by_row[..., field.offset : field.offset + field.nbytes], place, field))
    return found


def _units(rows: Bytes, strips: Bytes, unit: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """View a field in rows and in strips as units `(strips, blocks, units, 16)`; nothing is copied."""
    by_row = rows.view(f"u{unit}").transpose(0, 2, 3, 1)
    return by_row, strips.view(f"u{unit}").reshape(by_row.shape)


def _pack_bits(rows: Bytes, strips: Bytes) -> None:
    """Write four neighbours' bits of each row in turn: those of an even row and the next make a byte."""
    even, odd = (rows[:, i::2].transpose(0, 2, 3, 1) for i in (0, 1))
    pairs = strips.reshape(*even.shape[:3], 2, ROWS // 2)
    pairs[..., 0, :] = (even & 15) | (odd << 4)
    pairs[..., 1, :] = (even >> 4) | (odd & 240)


def _unpack_bits(rows: Bytes, strips: Bytes) -> None:
    """Write what `_pack_bits` was given."""
    even, odd = (rows[:, i::2].transpose(0, 2, 3, 1) for i in (0, 1))
    pairs = strips.reshape(*even.shape[:3], 2, ROWS // 2)
    first, second = pairs[..., 0, :], pairs[..., 1, :]
    even[...] = (first & 15) | (second << 4)
    odd[...] = (first >> 4) | (second & 240)
