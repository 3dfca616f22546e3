"""Placement of a plan's scratch: pieces with disjoint lifetimes share memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

ALIGNMENT = 256
"""Alignment promised by `launch.Scratch` [bytes]."""


def place_pieces(pieces: Sequence[Sequence[int]]) -> tuple[int, list[int]]:
    """Return the total size of scratch [bytes], and the offset of each piece.

    Args:
        pieces: Of each piece its size [bytes], and the first and last step that use it.
    """
    live: defaultdict[int, list[int]] = defaultdict(list)  # the placed pieces by step
    offsets = [0] * len(pieces)
    total = 0
    for number in sorted(range(len(pieces)), key=lambda i: -pieces[i][0]):
        nbytes, first, last = pieces[number]
        size = -(-nbytes // ALIGNMENT) * ALIGNMENT
        others = {other for step in range(first, last + 1) for other in live[step]}
        at = 0
        for start, end in sorted([(offsets[i], offsets[i] + pieces[i][0]) for i in others]):
            if at + size <= start:
                break
            at = max(at, -(-end // ALIGNMENT) * ALIGNMENT)
        offsets[number] = at
        total = max(total, at + size)
        for step in range(first, last + 1):
            live[step].append(number)
    return total, offsets
