"""Arena: addresses given out and taken back, in memory that need not exist."""

from __future__ import annotations

from bisect import bisect_left

CHUNK_BITS = 64
"""An address is `chunk << CHUNK_BITS | offset`, so that blocks of two chunks are never neighbours."""

OFFSET_MASK = (1 << CHUNK_BITS) - 1
"""What of an address is the offset in its chunk."""


class Arena:
    """Gives out the smallest free block that fits, and joins freed neighbours (ggml_dyn_tallocr).

    Where one buffer may not exceed `limit`, the memory consists of chunks. All sizes are multiples of
    the alignment, hence all addresses are.

    Attributes:
        peaks: Bytes that each chunk needs.
    """

    __slots__ = ("_limit", "_sizes", "_starts", "_tops", "peaks")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        # The free blocks, by address. The unused end of each chunk is not among them.
        self._starts: list[int] = []
        self._sizes: list[int] = []
        self._tops: list[int] = []
        self.peaks: list[int] = []

    def alloc(self, size: int) -> int:
        """Return the address of `size` bytes; `size` is at most the limit."""
        sizes = self._sizes
        if not size or not sizes:
            return self._grow(size)
        best = 0
        for free in sizes:
            if free >= size and (free < best or not best):
                best = free
        if not best:
            return self._grow(size)
        # Of equal blocks the last: what lies low lives long.
        i = len(sizes) - 1
        while sizes[i] != best:
            i -= 1
        address = self._starts[i]
        if best == size:
            del sizes[i], self._starts[i]
        else:
            sizes[i] = best - size
            self._starts[i] = address + size
        return address

    def _grow(self, size: int) -> int:
        tops = self._tops
        chunk = 0 if len(tops) == 1 and tops[0] + size <= self._limit else self._chunk_for(size)
        offset = tops[chunk]
        top = tops[chunk] = offset + size
        if top > self.peaks[chunk]:
            self.peaks[chunk] = top
        return chunk << CHUNK_BITS | offset

    def _chunk_for(self, size: int) -> int:
        """Return the chunk that grows least by so many bytes at its end; a new one if none has room."""
        best, best_spare = -1, 0
        for chunk, top in enumerate(self._tops):
            if top + size > self._limit:
                continue
            spare = self.peaks[chunk] - top - size
            if best < 0 or (0 <= spare < best_spare) or (best_spare < 0 and spare > best_spare):
                best, best_spare = chunk, spare
        if best < 0:
            best = len(self._tops)
            self._tops.append(0)
            self.peaks.append(0)
        return best

    def free(self, address: int, size: int) -> None:
        """Take back `size` bytes at an address."""
        if not size:
            return
        starts, sizes = self._starts, self._sizes
        i = bisect_left(starts, address)
        if i and starts[i - 1] + sizes[i - 1] == address:
            i -= 1
            address = starts.pop(i)
            size += sizes.pop(i)
        end = address + size
        chunk = address >> CHUNK_BITS
        if end == chunk << CHUNK_BITS | self._tops[chunk]:
            self._tops[chunk] -= size
        elif i < len(starts) and starts[i] == end:
            starts[i] = address
            sizes[i] += size
        else:
            starts.insert(i, address)
            sizes.insert(i, size)
