"""Block formats of ggml's quantised types, read and written with NumPy, many blocks at a time.

Values read equal ggml's to the bit. Blocks written equal, to the byte, those of ggml's reference
quantisers (`quantize_row_*_ref`, which use no importance matrix).
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from ggmlb.core.quants.codec import Bytes, Codec, Floats

__all__ = ["NAMES", "by_name", "read", "write"]

_MODULES = {
    "simple": "Q1_0 Q2_0 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q8_1 Q8_K",
    "kquants": "Q2_K Q3_K Q4_K Q5_K Q6_K",
    "nonlinear": "IQ4_NL IQ4_XS",
    "fp4": "MXFP4 NVFP4",
    "ternary": "TQ1_0 TQ2_0",
    "grids": "IQ1_S IQ1_M IQ2_XXS IQ2_XS IQ2_S IQ3_XXS IQ3_S",
}
_HOME = {name: module for module, names in _MODULES.items() for name in names.split()}

NAMES = frozenset(_HOME)
"""The quantised types."""

_READ_VALUES = 1 << 17
_WRITE_VALUES = 1 << 16
"""Values to convert per call: scratch stays in the cache, and the cost of calls is small."""


@cache
def by_name(name: str) -> Codec:
    """Return the codec of a type of `NAMES`."""
    found: Codec = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    return found


def read(codec: Codec, values: Floats, rows: Bytes) -> None:
    """Fill float32 `values` from rows of blocks; both are contiguous with equally many elements."""
    if not rows.size:
        return
    blocks = rows.reshape(-1).view(codec.layout)
    values = values.reshape(len(blocks), -1)
    step = _READ_VALUES // values.shape[1]
    with np.errstate(all="ignore"):  # a scale may be infinite, as in ggml
        for i in range(0, len(blocks), step):
            codec.read(values[i : i + step], blocks[i : i + step])


def write(codec: Codec, rows: Bytes, values: Floats) -> None:
    """Fill rows of blocks from float32 `values`; both are contiguous with equally many elements."""
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
