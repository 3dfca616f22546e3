"""OpenCL0_Packed: memory that keeps the blocks of some quantised weights in groups of eight, scales in front.

ggml's blocks of 18 and 34 bytes begin at any multiple of two bytes, so that a GPU reads them in pieces of
two. In a group each eight elements are one aligned load. The bytes are the same, and as many; a tensor is
read back as ggml has it. It is one of the extra buffer types: `get_proc_address("dev_get_extra_bufts")`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from ggmlb.backends.common.packed_buffer import PackedBuffer
from ggmlb.backends.common.weight_memory import PRODUCTS, misplaced, weight_in
from ggmlb.backends.opencl.buffer import OpenClBuffer, OpenClBufferType
from ggmlb.core.dtypes import DType
from ggmlb.core.enums import Op
from ggmlb.core.tensor import Tensor
from ggmlb.interface.data import Bytes

if TYPE_CHECKING:
    from ggmlb.backends.opencl.device import OpenClDevice

READERS: Final = PRODUCTS | {Op.GET_ROWS}
"""Ops that read a weight, their first operand, from here."""

SCALE_SIZES: Final = {dtype: dtype.codec.offsets["qs"] for dtype in (DType.Q4_0, DType.Q8_0)}
"""The types that are packed, and the bytes before a block's elements."""

GROUP: Final = 8
"""Blocks that are kept together."""


class OpenClPackedBufferType(OpenClBufferType):
    """Device memory for contiguous weights, which are read by products and as rows."""

    def __init__(self, device: OpenClDevice) -> None:
        super().__init__(device, f"{device.name}_Packed")
        self._used = False

    def suits(self, tensor: Tensor) -> bool:
        """Whether its blocks are kept in groups."""
        return _is_packed(tensor)

    def declines(self, node: Tensor) -> str | None:
        """Return why a node cannot use what lies here, or `None`: it may only read its weight."""
        if not self._used:
            return None
        weight = weight_in(self, node, READERS)
        if weight is not None and not (weight.is_contiguous() and _begins_a_group(weight)):
            return f"src0 lies in {self.name} memory, and is no run of whole rows"
        return misplaced(self, node, READERS, "products and get_rows")

    def _buffer(self, memory: object, nbytes: int) -> OpenClBuffer:
        self._used = True
        return OpenClPackedBuffer(self, memory, nbytes)  # type: ignore[arg-type]


class OpenClPackedBuffer(PackedBuffer, OpenClBuffer):
    """Weights on the device, packed at upload where their rows are whole groups."""

    def packing(self, tensor: Tensor) -> str:
        """`_x8` for the types that are packed, if a row is a whole number of groups."""
        return "_x8" if _is_packed(tensor.view_src or tensor) else ""

    def group_nbytes(self, tensor: Tensor) -> int:
        """Bytes of eight blocks."""
        return GROUP * tensor.dtype.type_size

    def pack(self, data: Bytes, tensor: Tensor) -> Bytes:
        """Blocks in groups."""
        return pack(data, tensor.dtype)

    def unpack(self, data: Bytes, tensor: Tensor) -> Bytes:
        """Blocks as ggml has them."""
        return unpack(data, tensor.dtype)


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
    """Return whole groups of ggml's blocks with the scales of each group in front of its elements."""
    n, blocks = SCALE_SIZES[dtype], data.reshape(-1, GROUP, dtype.type_size)
    parts = [blocks[:, :, :n].reshape(len(blocks), -1), blocks[:, :, n:].reshape(len(blocks), -1)]
    return np.concatenate(parts, axis=1).reshape(-1)


def unpack(data: Bytes, dtype: DType) -> Bytes:
    """Return ggml's blocks: what `pack` was given."""
    n, groups = SCALE_SIZES[dtype], data.reshape(-1, GROUP * dtype.type_size)
    scales = groups[:, : GROUP * n].reshape(-1, GROUP, n)
    elements = groups[:, GROUP * n :].reshape(-1, GROUP, dtype.type_size - n)
    return np.concatenate([scales, elements], axis=2).reshape(-1)
