"""What writing shares. Values are *columns*, float32 `(..., block_size, n_blocks)`.

The elements of a block lie in axis -2, so NumPy adds them up one after another, as ggml does, and each call
runs over many blocks. Functions of one number per block return `(..., n_blocks)`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from ggmlb.core.quants.codec import Blocks, Bytes, Floats, Ints


def total(columns: Floats) -> Floats:
    """The sum of each block, added up in order."""
    out: Floats = np.add.reduce(columns, axis=-2)
    return out


def magnitude(columns: Floats) -> Floats:
    """The largest absolute value of each block."""
    out: Floats = np.abs(np.maximum(columns.max(-2), -columns.min(-2)))  # of zeros +0, never -0
    return out


def peak(columns: Floats) -> Floats:
    """The value of the largest magnitude in each block, the first of equals; +0 if all are zero."""
    high, low = columns.max(-2), columns.min(-2)
    out: Floats = np.where(high > -low, high, low)
    tied = np.nonzero((high == -low) & (high > 0))
    if tied[0].size:
        rows = np.moveaxis(columns, -2, -1)[tied]
        first = np.abs(rows).argmax(-1)
        out[tied] = np.take_along_axis(rows, first[:, None], -1)[:, 0]
    out += np.float32(0)  # turns -0 into +0
    return out


def ratio(numerator: float, d: Floats) -> Floats:
    """Return `numerator / d`, and 0 where `d` is 0."""
    return np.divide(np.float32(numerator), d, out=np.zeros_like(d), where=d != 0)


def round_away(columns: Floats) -> Floats:
    """Round to integers in place, halves away from zero, as C's `roundf` (for magnitudes below 2^23)."""
    almost_half = columns.view(np.int32) & np.int32(-(1 << 31))
    almost_half |= np.int32(0x3EFFFFFF)  # the float before 0.5, with the sign of the value
    columns += almost_half.view(np.float32)
    return np.trunc(columns, out=columns)


def codes_of(columns: Floats, most: int | None = None) -> Bytes:
    """Cut off the fractions; make values above `most` equal to it."""
    codes = columns.astype(np.uint8)
    return codes if most is None else np.minimum(codes, np.uint8(most), out=codes)


def pack(codes: Bytes, n_bits: int) -> Bytes:
    """Undo `codec.split` on codes `(..., 8 / n_bits, k, n_blocks)`: return bytes `(..., k, n_blocks)`."""
    out: Bytes = codes[..., 0, :, :].copy()
    for i in range(1, codes.shape[-3]):
        out |= codes[..., i, :, :] << np.uint8(i * n_bits)
    return out


def put(blocks: Blocks, name: str, data: Ints) -> None:
    """Fill a field of bytes or runs from columns of bytes, `(..., n_blocks)`."""
    field = blocks[name]
    field.view(np.uint8)[...] = data.reshape(-1, len(blocks)).view(np.uint8).T
