"""Strided memory: kernel arguments as views, and merging of contiguous dimensions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ggmlb.core.dtypes import DType
from ggmlb.core.tensor import Ne, Tensor


@dataclass(slots=True)
class Mem:
    """A kernel's tensor argument: buffer, offset, type, extents and strides.

    Attributes:
        buffer: Its buffer, or memory provided by the plan.
        offset: Offset of its first element [bytes].
        dtype: Its type.
        ne: Extents, innermost first.
        nb: Strides in the same order [bytes]; 0 where one element is repeated.
        packing: Suffix of the type's name for its memory's byte order (`Buffer.packing`).
    """

    buffer: Any
    offset: int
    dtype: DType
    ne: Ne
    nb: Ne
    packing: str = ""

    @classmethod
    def of(cls, tensor: Tensor) -> Mem:
        """Return the kernel argument for a tensor: its buffer, offset, type, extents and strides."""
        packing = "" if tensor.buffer is None else tensor.buffer.packing(tensor)
        return cls(tensor.buffer, tensor.offset, tensor.dtype, tensor.ne, tensor.nb, packing)

    @classmethod
    def all_of(cls, node: Tensor) -> list[Mem]:
        """Return the kernel arguments for a node: its present operands in order, then its result."""
        return [*map(cls.of, node.sources), cls.of(node)]

    def window(self, ne: Ne, nb: Ne | None = None, offset: int = 0, dtype: DType | None = None) -> Mem:
        """Return a part of this argument, from `offset` bytes on, with other extents, strides or type."""
        return Mem(
            self.buffer,
            self.offset + offset,
            self.dtype if dtype is None else dtype,
            ne,
            self.nb if nb is None else nb,
            self.packing if dtype is None else "",
        )

    def tiled_to(self, ne: Ne) -> Mem:
        """Return this argument broadcast to the extents `ne`: its dimensions of extent 1 get stride 0."""
        nb = tuple(0 if n == 1 else b for n, b in zip(self.ne, self.nb, strict=True))
        return self.window(ne, nb)  # type: ignore[arg-type]

    def steps(self) -> list[int]:
        """Return offset and strides of dimensions 1 to 3 [bytes], which decide how rows are aligned."""
        return [self.offset, *(b for n, b in zip(self.ne[1:], self.nb[1:], strict=True) if n > 1)]


def merged(
    extents: Sequence[int], strides: Sequence[Sequence[int]], *, keep_first: bool = False
) -> tuple[list[int], list[list[int]]]:
    """Merge dimensions contiguous in all operands; drop those of extent 1, with `keep_first` not the first.

    Args:
        extents: Extents, innermost first.
        strides: Strides of each operand, in the same order.
        keep_first: Keep the innermost dimension even if its extent is 1.
    """
    ne: list[int] = []
    nbs: list[list[int]] = [[] for _ in strides]
    for i, n in enumerate(extents):
        if n == 1 and (ne or not keep_first):
            continue
        if ne and all([s[i] == nb[-1] * ne[-1] for s, nb in zip(strides, nbs, strict=True)]):
            ne[-1] *= n
            continue
        ne.append(n)
        for s, nb in zip(strides, nbs, strict=True):
            nb.append(s[i])
    return ne, nbs
