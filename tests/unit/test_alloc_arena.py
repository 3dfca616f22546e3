"""DynamicAllocator: best fit, joined neighbours, chunks."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from ggmlb.runtime.compile.allocate import CHUNK_BITS, DynamicAllocator


def test_the_smallest_block_that_fits_is_taken_and_the_end_grows_last() -> None:
    arena = DynamicAllocator(1 << 40)
    a, _, c, *_ = (arena.alloc(size) for size in (96, 32, 64, 32, 32))
    arena.free(a, 96)
    arena.free(c, 64)
    assert [arena.alloc(size) for size in (64, 64, 64, 32)] == [c, a, 256, 64]
    assert arena.peaks == [320]


def test_a_full_chunk_is_followed_by_another_and_joins_nothing_across() -> None:
    arena = DynamicAllocator(64)
    a, b, c = arena.alloc(64), arena.alloc(32), arena.alloc(64)
    assert (a, b, c) == (0, 1 << CHUNK_BITS, 2 << CHUNK_BITS)
    arena.free(a, 64)
    arena.free(b, 32)
    assert arena.alloc(32) == 1 << CHUNK_BITS  # fits without growing, exactly
    assert arena.alloc(64) == a
    assert arena.peaks == [64, 32, 64]


@given(
    limit=st.sampled_from([8, 20, 1 << 40]),
    steps=st.lists(st.tuples(st.booleans(), st.integers(0, 8), st.integers(0, 100)), max_size=80),
)
def test_blocks_never_overlap_and_lie_in_their_chunks(limit: int, steps: list[tuple[bool, int, int]]) -> None:
    arena = DynamicAllocator(limit)
    held: list[tuple[int, int]] = []
    for take, size, which in steps:
        if take or not held:
            held.append((arena.alloc(size), size))
        else:
            arena.free(*held.pop(which % len(held)))
        used = sorted(block for block in held if block[1])
        assert all(a + n <= b for (a, n), (b, _) in itertools.pairwise(used))
        for address, n in held:
            offset = address & ((1 << CHUNK_BITS) - 1)
            assert offset + n <= arena.peaks[address >> CHUNK_BITS] <= limit
    for block in held:
        arena.free(*block)
    peaks = list(arena.peaks)
    assert all(arena.alloc(peak) is not None for peak in peaks)
    assert arena.peaks == peaks  # all of it was free, in one piece per chunk
