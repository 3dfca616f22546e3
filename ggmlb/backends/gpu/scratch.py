"""Placement of a plan's scratch: pieces with disjoint lifetimes share memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ggmlb.backends.common.strided import Mem
from ggmlb.backends.gpu.launch import Scratch

ALIGNMENT = 256
"""Alignment promised by `Scratch` [bytes]."""


def place(steps: Sequence[Iterable[Mem | int | float]]) -> tuple[int, dict[Scratch, int]]:
    """Return the total size of scratch [bytes], and the offset of each piece.

    Args:
        steps: The arguments of each step, in order of execution.
    """
    first: dict[Scratch, int] = {}
    last: dict[Scratch, int] = {}
    for now, args in enumerate(steps):
        for arg in args:
            buffer = getattr(arg, "buffer", None)
            if isinstance(buffer, Scratch):
                first.setdefault(buffer, now)
                last[buffer] = now
    offsets: dict[Scratch, int] = {}
    total = 0
    for piece in sorted(first, key=lambda s: -s.nbytes):
        size = -(-piece.nbytes // ALIGNMENT) * ALIGNMENT
        taken = sorted(
            (offset, offset + other.nbytes)
            for other, offset in offsets.items()
            if first[other] <= last[piece] and first[piece] <= last[other]
        )
        at = 0
        for start, end in taken:
            if at + size <= start:
                break
            at = max(at, -(-end // ALIGNMENT) * ALIGNMENT)
        offsets[piece] = at
        total = max(total, at + size)
    return total, offsets
