"""Buffer types that repack weights at upload, as ggml's extra buffer types: checks of nodes, transfers."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection
from typing import Final

import numpy as np

from ggmlb.core.enums import NO_OPS, Op
from ggmlb.core.tensor import Tensor
from ggmlb.interface import Buffer, BufferType
from ggmlb.interface.data import Bytes

PRODUCTS: Final = frozenset({Op.MUL_MAT, Op.MUL_MAT_ID, Op.OUT_PROD})
"""Ops whose first operand is a weight."""


def weight_in(buft: BufferType, node: Tensor, readers: Collection[Op] = PRODUCTS) -> Tensor | None:
    """Return `src0` if it is in a buffer of type `buft` and the op is one of `readers`; else `None`."""
    weight = node.src[0] if node.op in readers else None
    return weight if _is_in(buft, weight) else None


def misplaced(
    buft: BufferType, node: Tensor, readers: Collection[Op] = PRODUCTS, who: str = "products"
) -> str | None:
    """Return why a node may not read operands in `buft` memory (only `readers`, named `who`, may), or `None`.

    The ops of `readers` may as `src0` only; `who` names them in the message.
    """
    if node.op in NO_OPS:
        return None
    for i, src in enumerate(node.src):
        if _is_in(buft, src) and (i or node.op not in readers):
            return f"src{i} is in {buft.name} memory, which only {who} read"
    return None


def _is_in(buft: BufferType, tensor: Tensor | None) -> bool:
    """Whether a tensor, or the source of a view, is in a buffer of type `buft`."""
    buffer = None if tensor is None else (tensor.view_src or tensor).buffer
    return buffer is not None and buffer.buft is buft


class PackedBuffer(Buffer):
    """Mixin for buffers that repack weights as they are written, and unpack them as they are read.

    Bytes change places only within a group, so that a partial write reads and repacks whole groups.
    """

    @abstractmethod
    def group_nbytes(self, tensor: Tensor) -> int:
        """Size of a group [bytes]: the unit of a weight that is repacked as a whole."""

    @abstractmethod
    def _set_groups(self, tensor: Tensor, data: Bytes, offset: int) -> None:
        """Write whole groups of a packed weight, given in ggml's order."""

    @abstractmethod
    def _get_groups(self, tensor: Tensor, out: Bytes, offset: int) -> None:
        """Read whole groups of a packed weight in ggml's order."""

    def _set_tensor(self, tensor: Tensor, data: Bytes, offset: int) -> None:
        if not self.packing(tensor):
            super()._set_tensor(tensor, data, offset)  # type: ignore[safe-super]
            return
        whole, start, first, end = self._whole_groups(tensor, offset, data.size)
        if (first, end) != (start, start + data.size):
            plain = np.empty(end - first, np.uint8)
            self._get_tensor(whole, plain, first)
            plain[start - first : start - first + data.size] = data
            data = plain
        self._set_groups(whole, data, first)

    def _get_tensor(self, tensor: Tensor, out: Bytes, offset: int) -> None:
        if not self.packing(tensor):
            super()._get_tensor(tensor, out, offset)  # type: ignore[safe-super]
            return
        whole, start, first, end = self._whole_groups(tensor, offset, out.size)
        if (first, end) == (start, start + out.size):
            self._get_groups(whole, out, first)
            return
        plain = np.empty(end - first, np.uint8)
        self._get_groups(whole, plain, first)
        out[:] = plain[start - first : start - first + out.size]

    def _memset_tensor(self, tensor: Tensor, value: int, offset: int, size: int) -> None:
        self._set_tensor(tensor, np.full(size, value, np.uint8), offset)

    def _whole_groups(self, tensor: Tensor, offset: int, nbytes: int) -> tuple[Tensor, int, int, int]:
        """Return the weight that owns a tensor's memory, a byte range's start in it, and its groups' ends."""
        whole = tensor.view_src or tensor
        size = self.group_nbytes(whole)
        start = tensor.offset - whole.offset + offset
        return whole, start, start // size * size, -(-(start + nbytes) // size) * size
