"""Block formats of ggml's quantised types, read and written with NumPy, many blocks at a time.

Values read equal ggml's to the bit. Blocks written equal, to the byte, those of ggml's reference
quantisers (`quantize_row_*_ref`, which use no importance matrix).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from ggmlb.core.quants.codec import Bytes, Codec, Floats

__all__ = ["read", "write"]

_READ_VALUES = 1 << 17
_WRITE_VALUES = 1 << 16
"""Values to convert per call: scratch stays in the cache, and the cost of calls is small."""


def read(codec: Codec, values: Floats, rows: Bytes) -> None:
    """Fill float32 `values` from rows of the codec's blocks; both contiguous, equally many elements."""
    if not rows.size:
        return
    blocks = rows.reshape(-1).view(codec.layout)
    values = values.reshape(len(blocks), -1)
    step = _READ_VALUES // values.shape[1]
    with np.errstate(all="ignore"):  # a scale may be infinite, as in ggml
        for i in range(0, len(blocks), step):
            codec.read(values[i : i + step], blocks[i : i + step])


def write(codec: Codec, rows: Bytes, values: Floats) -> None:
    """Fill rows of the codec's blocks from float32 `values`; both contiguous, equally many elements."""
    assert codec.write is not None
    if not rows.size:
        return
    blocks = rows.reshape(-1).view(codec.layout)
    values = values.reshape(len(blocks), -1)
    step = _WRITE_VALUES // values.shape[1]
    with np.errstate(all="ignore"):
        for i in range(0, len(blocks), step):
            part = blocks[i : i + step]
            columns = values[i : i + step].T.copy()
            if len(part) > 1:
                codec.write(part, columns)
            else:  # NumPy would add up a lone column pairwise, not in ggml's order
                clones = np.empty(2, codec.layout)
                codec.write(clones, np.repeat(columns, 2, axis=1))
                part[:] = clones[:1]
