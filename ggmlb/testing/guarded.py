"""Programs among guard bytes: no byte may be left unwritten, and none written beside the results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ggmlb.alloc.linear import padded
from ggmlb.context import Context
from ggmlb.dtypes import DType
from ggmlb.enums import NO_OPS
from ggmlb.interface import tensor_alloc, view_init

if TYPE_CHECKING:
    import numpy.typing as npt

    from ggmlb.interface import Buffer, BufferType
    from ggmlb.tensor import Tensor
    from ggmlb.testing.programs import Built

GUARD = 256
"""Bytes before and after each tensor, at least."""


def poison(size: int) -> npt.NDArray[np.uint8]:
    """Return bytes that are NaN in every float type, wherever one begins, and tell where they belong.

    Each pair is 0xFFF1 to 0xFFFF: a NaN of half precision, of bfloat16, and at the head of longer types.
    """
    pairs = np.empty((size + 1) // 2, "<u2")
    pairs[:] = 0xFFF1 + np.arange(pairs.size) % 15
    return pairs.view(np.uint8)[:size]


@dataclass
class Image:
    """A program in memory.

    Attributes:
        whole: A tensor over all bytes of the buffer that the program uses.
        before: What they were before the computation.
        written: Which of them the computation may change.
    """

    built: Built
    whole: Tensor
    before: npt.NDArray[np.uint8]
    written: npt.NDArray[np.bool_]

    def upload(self) -> None:
        """Poison all memory, and write the inputs."""
        self.whole.set(poison(self.whole.nbytes))
        self.built.upload()
        self.before = self.whole.get()

    def trespass(self) -> str:
        """Say which byte was changed that the computation does not own; empty if none was."""
        changed = np.flatnonzero((self.whole.get() != self.before) & ~self.written)
        return self._whose(int(changed[0]), changed.size) if changed.size else ""

    @property
    def keeps_inputs(self) -> bool:
        """Whether the program writes into none of its inputs, so that it can be computed again."""
        leafs = [self.built.tensors[leaf.name] for leaf in self.built.case.leafs]
        return not any(self.written[t.offset : t.offset + t.nbytes].any() for t in leafs)

    def _whose(self, place: int, n: int) -> str:
        roots = [t for t in self.built.ctx.tensors if t.view_src is None and t.nbytes]
        for t in roots:
            if t.offset <= place < t.offset + t.nbytes:
                what = "an input" if t.op in NO_OPS else "a gap of the result"
                return (
                    f"{n} bytes were changed in {what}: {t.describe()}, from its byte {place - t.offset} on"
                )
        nearest = min(roots, key=lambda t: min(abs(place - t.offset), abs(place - t.offset - t.nbytes)))
        if place < nearest.offset:
            where = f"{nearest.offset - place} bytes before the start of"
        else:
            where = f"{place - nearest.offset - nearest.nbytes} bytes after the end of"
        return f"{n} guard bytes were overwritten, the first {where} {nearest.describe()}"


class GuardedMemory:
    """A buffer in which one program after the other is placed.

    Args:
        buft: Of which type.
    """

    def __init__(self, buft: BufferType) -> None:
        self._buft = buft
        self._buffer: Buffer | None = None

    def place(self, built: Built) -> Image:
        """Place a program; `Image.upload` writes its inputs."""
        roots = [t for t in built.ctx.tensors if t.view_src is None]
        step = self._buft.alignment
        offsets, end = [], padded(GUARD, step)
        for tensor in roots:
            offsets.append(end)
            end = padded(end + self._buft.alloc_size(tensor) + GUARD, step)
        buffer = self._of_size(end)
        whole = Context().new_tensor(DType.I8, (end,), "whole")
        tensor_alloc(buffer, whole, 0)
        for tensor, offset in zip(roots, offsets, strict=True):
            tensor_alloc(buffer, tensor, offset)
        for tensor in built.ctx.tensors:
            if tensor.view_src is not None:
                view_init(tensor)
        return Image(built, whole, np.empty(0, np.uint8), _written(built, end))

    def free(self) -> None:
        """Give the memory back."""
        if self._buffer is not None and not self._buffer.is_freed:
            self._buffer.free()
        self._buffer = None

    def _of_size(self, nbytes: int) -> Buffer:
        if self._buffer is None or self._buffer.size < nbytes:
            self.free()
            self._buffer = self._buft.alloc_buffer(padded(max(nbytes, 1 << 20), self._buft.alignment))
        return self._buffer


def _written(built: Built, size: int) -> npt.NDArray[np.bool_]:
    """Mark the bytes of all elements that the program computes."""
    marks = np.zeros(size, np.bool_)
    results = [node for node in built.graph.nodes if node.op not in NO_OPS]
    results += [built.tensors[spec.name] for spec in built.case.outputs]
    for t in results:
        if t.nbytes:
            shape = (*t.ne[:0:-1], t.ne[0] // t.dtype.block_size, t.dtype.type_size)
            np.ndarray(shape, np.bool_, marks.data, t.offset, (*t.nb[::-1], 1))[...] = True
    return marks
