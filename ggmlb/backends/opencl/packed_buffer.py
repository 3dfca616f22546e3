"""OpenCL0_Packed: buffers that repack q4_0 and q8_0 weights in groups of eight blocks, scales first.

ggml's blocks of 18 and 34 bytes are aligned to two bytes, so that a GPU loads two bytes at a time. In a
group, eight elements are one aligned load. The size is unchanged, and tensors are read back in ggml's
order. It is an extra buffer type: `get_proc_address("dev_get_extra_bufts")`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from ggmlb.backends.common.weight_memory import PRODUCTS, PackedBuffer, misplaced, weight_in
from ggmlb.backends.opencl.buffer import OpenClBuffer, OpenClBufferType
from ggmlb.core.dtypes import DType
from ggmlb.core.enums import Op
from ggmlb.core.tensor import Tensor
from ggmlb.interface.data import Bytes

if TYPE_CHECKING:
    from ggmlb.backends.opencl.device import OpenClDevice

READERS: Final = PRODUCTS | {Op.GET_ROWS}
"""Ops that read their first operand from this memory."""

SCALE_SIZES: Final = {dtype: dtype.codec.offsets["qs"] for dtype in (DType.Q4_0, DType.Q8_0)}
"""The types that are packed, and the bytes before a block's elements."""

GROUP: Final = 8
"""Blocks of a group."""


class OpenClPackedBufferType(OpenClBufferType):
    """Device memory that stores q4_0 and q8_0 weights repacked, for matrix products and get_rows."""

    def __init__(self, device: OpenClDevice) -> None:
        super().__init__(device, f"{device.name}_Packed")

    def suits(self, tensor: Tensor) -> bool:
        """Whether the tensor is repacked: q4_0 or q8_0, with rows of whole groups."""
        return _is_packed(tensor)

    def packing(self, tensor: Tensor) -> str:
        """Return the type-name suffix `_x8` for repacked tensors, else an empty one."""
        return "_x8" if _is_packed(tensor.view_src or tensor) else ""

    def declines(self, node: Tensor) -> str | None:
        """Return why a node cannot read operands in this memory, or `None`; only `READERS` may, as src0."""
        if not self.is_used:
            return None
        weight = weight_in(self, node, READERS)
        if weight is not None and not (weight.is_contiguous() and _begins_a_group(weight)):
            return f"src0 is in {self.name} memory: it must be contiguous and consist of whole rows"
        return misplaced(self, node, READERS, "products and get_rows")

    def _buffer(self, memory: object, nbytes: int) -> OpenClBuffer:
        return OpenClPackedBuffer(self, memory, nbytes)  # type: ignore[arg-type]


class OpenClPackedBuffer(PackedBuffer, OpenClBuffer):
    """A buffer that repacks weights when they are written, and unpacks them when they are read."""

    def group_nbytes(self, tensor: Tensor) -> int:
        """Size of eight blocks [bytes], the group that is repacked as a unit."""
        return GROUP * tensor.dtype.type_size

    def _set_groups(self, tensor: Tensor, data: Bytes, offset: int) -> None:
        OpenClBuffer._set_tensor(self, tensor, pack(data, tensor.dtype), offset)

    def _get_groups(self, tensor: Tensor, out: Bytes, offset: int) -> None:
        packed = np.empty_like(out)
        OpenClBuffer._get_tensor(self, tensor, packed, offset)
        out[:] = unpack(packed, tensor.dtype)


def _is_packed(tensor: Tensor) -> bool:
    return tensor.dtype in SCALE_SIZES and tensor.ne[0] % (GROUP * tensor.dtype.block_size) == 0


def _begins_a_group(view: Tensor) -> bool:
    whole = view.view_src
    return (
        whole is None
        or not _is_packed(whole)
        or (_is_packed(view) and view.view_offs % (GROUP * view.dtype.type_size) == 0)
    )


def pack(data: Bytes, dtype: DType) -> Bytes:
    """Repack ggml's blocks, in groups of eight: the eight scales first, then the elements of all."""
    n, blocks = SCALE_SIZES[dtype], data.reshape(-1, GROUP, dtype.type_size)
    parts = [blocks[:, :, :n].reshape(len(blocks), -1), blocks[:, :, n:].reshape(len(blocks), -1)]
    return np.concatenate(parts, axis=1).reshape(-1)


def unpack(data: Bytes, dtype: DType) -> Bytes:
    """Restore ggml's order of blocks from groups of eight: the inverse of `pack`."""
    n, groups = SCALE_SIZES[dtype], data.reshape(-1, GROUP * dtype.type_size)
    scales = groups[:, : GROUP * n].reshape(-1, GROUP, n)
    elements = groups[:, GROUP * n :].reshape(-1, GROUP, dtype.type_size - n)
    return np.concatenate([scales, elements], axis=2).reshape(-1)
