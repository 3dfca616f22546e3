"""Functions shared by all writers. Values are *columns*, float32 `(..., block_size, n_blocks)`.

The elements of a block lie along axis -2: NumPy sums them in order, as ggml does, and each call covers many
blocks. Functions of one number per block return `(..., n_blocks)`.

NaN is ignored as minimum and maximum, as in ggml. A value without a code (NaN, infinity) gets code 0, as by
x86 conversion.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from ggmlb.core.quants.codec import Blocks, Bytes, Floats, Ints


def total(columns: Floats) -> Floats:
    """Return the sum of each column (the values of one block, along axis -2), added in order."""
    out: Floats = np.add.reduce(columns, axis=-2)
    return out


def magnitude(columns: Floats) -> Floats:
    """Return the largest absolute value of each column (the values of one block); 0 if all are NaN."""
    high: Floats = np.fmax.reduce(columns, -2)
    low: Floats = np.fmin.reduce(columns, -2)
    out: Floats = np.fmax(np.abs(np.maximum(high, -low)), np.float32(0))  # of zeros +0, never -0
    return out


def peak(columns: Floats) -> Floats:
    """Return the first value of largest magnitude in each column (one block); +0 if all are zero or NaN."""
    high: Floats = np.fmax.reduce(columns, -2)
    low: Floats = np.fmin.reduce(columns, -2)
    out: Floats = np.where(high > -low, high, low)
    tied = np.nonzero((high == -low) & (high > 0))
    if tied[0].size:
        rows = np.moveaxis(columns, -2, -1)[tied]
        first = np.fmax(np.abs(rows), np.float32(0)).argmax(-1)
        out[tied] = np.take_along_axis(rows, first[:, None], -1)[:, 0]
    out += np.float32(0)  # turns -0 into +0
    return np.fmax(out, np.float32(0), out=out, where=np.isnan(out))


def ratio(numerator: float, d: Floats) -> Floats:
    """Return `numerator / d`, and 0 where `d` is 0."""
    return np.divide(np.float32(numerator), d, out=np.zeros_like(d), where=d != 0)


def round_away(columns: Floats) -> Floats:
    """Round values to integers in place, halves away from zero, as C's `roundf` (magnitudes below 2^23)."""
    almost_half = columns.view(np.int32) & np.int32(-(1 << 31))
    almost_half |= np.int32(0x3EFFFFFF)  # the float before 0.5, with the sign of the value
    columns += almost_half.view(np.float32)
    return np.trunc(columns, out=columns)


def codes_of(columns: Floats, most: int | None = None) -> Bytes:
    """Truncate values to unsigned codes, clipped to `most`. May overwrite the values."""
    codes = _known(columns, -1, 256).astype(np.uint8)
    return codes if most is None else np.minimum(codes, np.uint8(most), out=codes)


def signed_codes_of(columns: Floats) -> Ints:
    """Return integral values as int8 codes. May overwrite the values."""
    return _known(columns, -129, 128).astype(np.int8)


def _known(columns: Floats, below: float, above: float) -> Floats:
    """Set values outside an interval, and NaN, to 0."""
    if columns.size and not (columns.min() > below and columns.max() < above):
        np.copyto(columns, np.float32(0), where=~((columns > below) & (columns < above)))
    return columns


def pack(codes: Bytes, n_bits: int) -> Bytes:
    """Undo `codec.split` on codes `(..., 8 / n_bits, k, n_blocks)`: return bytes `(..., k, n_blocks)`."""
    out: Bytes = codes[..., 0, :, :].copy()
    for i in range(1, codes.shape[-3]):
        out |= codes[..., i, :, :] << np.uint8(i * n_bits)
    return out


def put(blocks: Blocks, name: str, data: Ints) -> None:
    """Fill the field `name` of blocks from columns of bytes, `(..., n_blocks)`."""
    field = blocks[name]
    field.view(np.uint8)[...] = data.reshape(-1, len(blocks)).view(np.uint8).T
