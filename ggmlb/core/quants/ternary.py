"""TQ1_0 and TQ2_0: blocks of 256 elements that are -1, 0 or 1 times a scale.

TQ1_0 packs five elements in a byte, as base-3 digits of a fraction of 256. Multiplying the byte by 3
moves the first digit above bit 7.
"""

from __future__ import annotations

import numpy as np

from ggmlb.core.quants.codec import (
    Blocks,
    Bytes,
    Codec,
    Floats,
    blockwise,
    expand,
    f32,
    layout,
    planes,
    runs,
    split,
)
from ggmlb.core.quants.columns import codes_of, magnitude, pack, put, ratio, round_away

_GROUPS = (("qs", 5, 32), ("qs2", 5, 16), ("qh", 4, 4))
"""Fields of TQ1_0: name, digits per byte, bytes."""


def _digits(packed: Bytes, n_digits: int) -> Bytes:
    """Return the first digits of bytes `(1, n, width)`, 0 to 2, as planes `(n_digits, n, width)`."""
    powers = np.array([1, 3, 9, 27, 81], np.uint8)[:n_digits, None, None]
    fraction = packed * powers
    digits = (fraction > 85).view(np.uint8)  # 3 * 86 reaches 256, 3 * 171 twice that
    digits += fraction > 170
    return digits


def _read_tq1_0(values: Floats, blocks: Blocks) -> None:
    n = len(blocks)
    groups = [blockwise(_digits(planes(blocks[name]), k)).reshape(n, -1) for name, k, _ in _GROUPS]
    codes = np.concatenate(groups, axis=1).view(np.int8)
    codes -= np.int8(1)
    expand(values, codes, f32(blocks["d"]))


def _read_tq2_0(values: Floats, blocks: Blocks) -> None:
    codes = blockwise(split(planes(blocks["qs"]), 2).reshape(8, -1, 32)).view(np.int8)
    codes -= np.int8(1)
    expand(values, codes, f32(blocks["d"]))


def _codes(blocks: Blocks, columns: Floats) -> Bytes:
    """Set `d` to the largest magnitude; return the codes, 0 to 2."""
    d = magnitude(columns)
    blocks["d"] = d
    columns *= ratio(1, d)
    columns = round_away(columns)
    columns += np.float32(1)
    return codes_of(columns)


def _write_tq1_0(blocks: Blocks, columns: Floats) -> None:
    codes = _codes(blocks, columns).astype(np.uint16)
    start = 0
    for name, k, width in _GROUPS:
        digits = codes[start : start + k * width].reshape(k, width, -1)
        weights = np.array([81, 27, 9, 3, 1], np.uint16)[:k, None, None]
        number = (digits * weights).sum(0, dtype=np.uint16)
        put(blocks, name, ((number * np.uint16(256) + np.uint16(242)) // np.uint16(243)).astype(np.uint8))
        start += k * width


def _write_tq2_0(blocks: Blocks, columns: Floats) -> None:
    codes = _codes(blocks, columns)
    put(blocks, "qs", pack(codes.reshape(2, 4, 32, -1), 2))


TQ1_0 = Codec(layout(qs=runs(1, 32), qs2=runs(1, 16), qh=runs(1, 4), d="<f2"), _read_tq1_0, _write_tq1_0)
TQ2_0 = Codec(layout(qs=runs(2, 32), d="<f2"), _read_tq2_0, _write_tq2_0)
