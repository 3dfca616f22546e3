"""Memories: the kinds of memory of a graph allocator, and the buffers of each that it holds."""

from __future__ import annotations

from collections.abc import Sequence

from ggmlb.core.enums import BufferUsage
from ggmlb.core.tensor import Tensor
from ggmlb.interface import Buffer, BufferType
from ggmlb.runtime.alloc.linear import padded

BufferIds = Sequence[int]
"""Index of a buffer type for each tensor of a topology, by its number."""


class Memories:
    """The distinct ones among some buffer types, each with its buffers (`struct vbuffer`).

    Args:
        bufts: The buffer types.
        separate: Count each of them as distinct.

    Attributes:
        bufts: The distinct buffer types.
        limits: Largest buffer of each [bytes].
        chunks: The buffers of each that are in use.
    """

    __slots__ = ("_alignments", "_index", "_plain", "bufts", "chunks", "limits")

    def __init__(self, bufts: Sequence[BufferType], separate: bool = False) -> None:
        self.bufts = list(bufts) if separate else list(dict.fromkeys(bufts))
        self.limits = [buft.max_size for buft in self.bufts]
        self.chunks: list[list[Buffer]] = [[] for _ in self.bufts]
        self._index = [i if separate else self.bufts.index(buft) for i, buft in enumerate(bufts)]
        self._alignments = [buft.alignment for buft in self.bufts]
        self._plain = all(type(buft).alloc_size is BufferType.alloc_size for buft in self.bufts)

    # -- what goes where -----------------------------------------------------------------------

    def of_ids(self, ids: BufferIds) -> list[int]:
        """Return the index of the memory of each buffer id."""
        index = self._index
        return [index[i] for i in ids]

    def sizes(self, tensors: Sequence[Tensor], where: Sequence[int]) -> list[int]:
        """Return what each tensor takes in its memory [bytes], a multiple of the alignment."""
        alignments = self._alignments
        if self._plain:
            return [(n := t.nbytes) + -n % alignments[m] for t, m in zip(tensors, where, strict=True)]
        bufts = self.bufts
        return [padded(bufts[m].alloc_size(t), alignments[m]) for t, m in zip(tensors, where, strict=True)]

    def by_buffer_id(self, sizes: Sequence[int]) -> list[int]:
        """Spread a figure per memory over the buffer types, counting each memory once."""
        index = self._index
        return [sizes[memory] if index.index(memory) == i else 0 for i, memory in enumerate(index)]

    # -- buffers -------------------------------------------------------------------------------

    def grow(self, peaks: Sequence[Sequence[int]]) -> bool:
        """Make each memory's chunks as large as asked; return whether anything was allocated.

        Chunks that are large enough stay.

        Raises:
            AllocationError: A device lacks room; all chunks were freed.
        """
        short = [
            (m, chunk, size)
            for m, sizes in enumerate(peaks)
            for chunk, size in enumerate(sizes)
            if chunk >= len(self.chunks[m]) or self.chunks[m][chunk].size < size
        ]
        # The old ones go first: the device may lack room for both.
        for m, chunk, _ in short:
            if chunk < len(self.chunks[m]):
                self.chunks[m][chunk].free()
        try:
            for m, chunk, size in short:
                buffer = self.bufts[m].alloc_buffer(size)
                self.chunks[m][chunk : chunk + 1] = [buffer]
                buffer.usage = BufferUsage.COMPUTE
        except BaseException:
            self.free()
            raise
        return bool(short)

    def free(self) -> None:
        """Free all chunks."""
        for chunks in self.chunks:
            for buffer in chunks:
                if not buffer.is_freed:
                    buffer.free()
            chunks.clear()

    def has_hooks(self) -> bool:
        """Whether a buffer wants to prepare the tensors that are placed in it."""
        return any(b.prepares_tensors for b in self.in_use())

    def in_use(self) -> set[Buffer]:
        """The buffers that there are."""
        return {buffer for chunks in self.chunks for buffer in chunks}
