"""Programs placed between guard bytes, to detect unwritten results and out-of-bounds writes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from ggmlb.core.context import Context
from ggmlb.core.dtypes import DType
from ggmlb.core.enums import NO_OPS
from ggmlb.core.errors import BackendError
from ggmlb.core.tensor import Tensor
from ggmlb.interface import Buffer, BufferType, tensor_alloc, view_init
from ggmlb.runtime.alloc.context import padded
from ggmlb.testing.programs import FILLED_WITH

if TYPE_CHECKING:
    from ggmlb.testing.programs import Built

GUARD = 256
"""Least number of guard bytes before and after each tensor."""


def poison(size: int) -> npt.NDArray[np.uint8]:
    """Return bytes that are NaN in every float type at every alignment, and that differ by position.

    Each pair is 0xFFF1 to 0xFFFF: a NaN of half precision, of bfloat16, and at the head of longer types.
    """
    pairs = np.empty((size + 1) // 2, "<u2")
    pairs[:] = FILLED_WITH + np.arange(pairs.size) % 15
    return pairs.view(np.uint8)[:size]


class Held(NamedTuple):
    """The byte range of a tensor in a buffer."""

    tensor: Tensor
    start: int
    nbytes: int


class WatchedBuffer:
    """A buffer (or its beginning) whose bytes are compared before and after a computation.

    Args:
        buffer: The buffer.
        size: Bytes used by the program.
        held: The tensors in it.

    Attributes:
        written: Mask of bytes that the computation may change.
    """

    def __init__(self, buffer: Buffer, size: int, held: Iterable[Held]) -> None:
        self._whole = Context().new_tensor(DType.I8, (size,), "whole")
        tensor_alloc(buffer, self._whole, 0)
        self._held = [h for h in held if h.nbytes]
        self._before: npt.NDArray[np.uint8] = np.empty(0, np.uint8)
        self.written = np.zeros(size, np.bool_)

    def poison(self) -> None:
        """Fill all memory with NaN."""
        self._whole.set(poison(self._whole.nbytes))

    def remember(self) -> None:
        """Save the buffer's current bytes, for `trespass` to compare with."""
        self._before = self._whole.get()

    def trespass(self) -> str:
        """Describe an out-of-bounds write since `remember`; empty if there was none."""
        changed = np.flatnonzero((self._whole.get() != self._before) & ~self.written)
        return self._whose(int(changed[0]), changed.size) if changed.size else ""

    def _whose(self, place: int, n: int) -> str:
        for t, start, nbytes in self._held:
            if start <= place < start + nbytes:
                what = "an input" if t.op in NO_OPS else "a gap of the result"
                return f"{n} bytes were changed in {what}: {t.describe()}, from its byte {place - start} on"
        if not self._held:
            return f"{n} bytes were changed in unused memory"
        nearest = min(self._held, key=lambda h: min(abs(place - h.start), abs(place - h.start - h.nbytes)))
        if place < nearest.start:
            where = f"{nearest.start - place} bytes before the start of"
        else:
            where = f"{place - nearest.start - nearest.nbytes} bytes after the end of"
        return f"{n} guard bytes were overwritten, the first {where} {nearest.tensor.describe()}"


@dataclass
class Image:
    """A program in memory that is checked for stray writes.

    Attributes:
        watches: The watched memory.
        kept: Weights in another buffer type, which must not change.
    """

    built: Built
    watches: list[WatchedBuffer]
    kept: list[Tensor] = field(default_factory=list)

    def upload(self) -> None:
        """Poison all memory, and write the inputs."""
        for watch in self.watches:
            watch.poison()
        self.built.upload()
        for watch in self.watches:
            watch.remember()

    def trespass(self) -> str:
        """Describe an out-of-bounds write; empty if there was none."""
        for watch in self.watches:
            if told := watch.trespass():
                return told
        for leaf in self.built.case.leafs:
            tensor = self.built.tensors[leaf.name]
            if tensor in self.kept and not np.array_equal(read_back(tensor, leaf.data), leaf.data):
                return f"a weight was changed: {tensor.describe()}"
        return ""

    @property
    def keeps_inputs(self) -> bool:
        """Whether the program writes to none of its inputs, so that it can be repeated."""
        leafs = {self.built.tensors[leaf.name] for leaf in self.built.case.leafs}
        return not any((t.view_src or t) in leafs for t in results(self.built))


class ProgramMemory(Protocol):
    """Memory that holds one program at a time: the next program placed there replaces the last."""

    def place(self, built: Built) -> Image:
        """Place a program; `Image.upload` writes its inputs."""

    def free(self) -> None:
        """Free the memory."""


class GuardedMemory:
    """Memory that holds one program at a time, with guard bytes between tensors to detect stray writes.

    Args:
        buft: The buffer type.
    """

    def __init__(self, buft: BufferType) -> None:
        self._buft = buft
        self._buffer: Buffer | None = None

    def place(self, built: Built, shared: tuple[Tensor, Tensor] | None = None) -> Image:
        """Place a program's unplaced tensors between guard bytes; one result may share an operand's memory.

        Args:
            built: The program.
            shared: A node, and the operand whose memory its result reuses.
        """
        roots = [t for t in built.ctx.tensors if t.view_src is None and not t.buffer]
        held, buffer, end = self.lay([t for t in roots if shared is None or t is not shared[0]])
        if shared is not None:
            tensor_alloc(buffer, shared[0], shared[1].offset)
        watch = WatchedBuffer(buffer, end, held)
        for tensor in built.ctx.tensors:
            if tensor.view_src is not None and tensor.buffer is None:
                view_init(tensor)
        for t in results(built):
            if t.nbytes and t.buffer is buffer:
                shape = (*t.ne[:0:-1], t.ne[0] // t.dtype.block_size, t.dtype.type_size)
                np.ndarray(shape, np.bool_, watch.written.data, t.offset, (*t.nb[::-1], 1))[...] = True
        return Image(built, [watch])

    def lay(self, roots: list[Tensor]) -> tuple[list[Held], Buffer, int]:
        """Place tensors between guard bytes; return their byte ranges, the buffer, and its used bytes."""
        step = self._buft.alignment
        held, end = [], padded(GUARD, step)
        for tensor in roots:
            held.append(Held(tensor, end, tensor.nbytes))
            end = padded(end + self._buft.alloc_size(tensor) + GUARD, step)
        buffer = self._of_size(end)
        for tensor, offset, _ in held:
            tensor_alloc(buffer, tensor, offset)
        return held, buffer, end

    def free(self) -> None:
        """Free the memory."""
        if self._buffer is not None and not self._buffer.is_freed:
            self._buffer.free()
        self._buffer = None

    def _of_size(self, nbytes: int) -> Buffer:
        if self._buffer is None or self._buffer.size < nbytes:
            self.free()
            self._buffer = self._buft.alloc_buffer(padded(max(nbytes, 1 << 20), self._buft.alignment))
        return self._buffer


def read_back(tensor: Tensor, otherwise: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Return a weight's bytes, or the bytes `otherwise` if its memory cannot be read back."""
    try:
        return tensor.get()
    except BackendError:
        return otherwise


def results(built: Built) -> list[Tensor]:
    """Return the tensors that a program writes."""
    nodes = [node for node in built.graph.nodes if node.op not in NO_OPS]
    return nodes + [built.tensors[spec.name] for spec in built.case.outputs]
