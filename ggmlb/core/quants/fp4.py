"""MXFP4 and NVFP4: 4-bit floats (E2M1) with an 8-bit float as scale.

Levels are stored doubled, as integers, and scales halved.
"""

from __future__ import annotations

import numpy as np

from ggmlb.core.quants.codec import (
    Blocks,
    Bytes,
    Codec,
    Floats,
    Ints,
    blockwise,
    expand,
    layout,
    look_up,
    pair_table,
    planes,
    runs,
    split,
)
from ggmlb.core.quants.columns import magnitude, pack, put
from ggmlb.core.quants.search import per_run

_LEVELS = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
_PAIRS = pair_table(_LEVELS)
_MIDPOINTS = (0.5, 1.5, 2.5, 3.5, 5.0, 7.0, 10.0)

_BYTE = np.arange(256)
_E8M0 = np.ldexp(np.float32(1), _BYTE - 128)
"""Half the value of each scale code of MXFP4, a power of two."""

_EXPONENT, _FRACTION = _BYTE >> 3 & 15, _BYTE & 7
_UE4M3 = np.ldexp((_FRACTION + 8 * (_EXPONENT > 0)).astype(np.float32), np.maximum(_EXPONENT, 1) - 11)
_UE4M3[0x7F] = 0  # not a number
"""Half the value of each scale code of NVFP4; the sign is ignored."""


def _to_ue4m3(x: Floats) -> Ints:
    """Round non-negative numbers to scales of NVFP4, halves up; 256 and more become 448, as in ggml."""
    bits = x.view(np.uint32)
    codes = ((bits >> np.uint32(19)) + np.uint32(1) >> np.uint32(1)).astype(np.int32)
    codes -= (127 - 7) << 3
    codes[codes >= 15 << 3] = 0x7E
    small = x < 2.0**-6
    codes[small] = np.minimum(x[small] * np.float32(512) + np.float32(0.5), np.float32(7)).astype(np.int32)
    return codes


def _nearest(x: Floats, scale: Floats) -> Bytes:
    """Return the codes of the nearest levels, at midpoints the smaller (compared exactly).

    Args:
        x: Columns `(n_runs, run_length, n_blocks)`.
        scale: `(n_runs, n_blocks)`.
    """
    distance = np.abs(x)
    codes = np.zeros(x.shape, np.uint8)
    for midpoint in _MIDPOINTS:
        codes += distance > per_run(np.float32(midpoint) * scale)
    codes *= per_run(scale != 0)
    codes |= ((x < 0) & (codes > 0)).view(np.uint8) << np.uint8(3)
    return codes


def _write_mxfp4(blocks: Blocks, columns: Floats) -> None:
    # log2 rounded to float32 before the floor, as ggml has it.
    exponent = np.floor(np.log2(magnitude(columns), dtype=np.float64).astype(np.float32))
    blocks["e"] = np.clip(exponent + np.float32(125), 0, 255)
    x = columns[None]
    codes = _nearest(x, _E8M0[blocks["e"]][None])
    put(blocks, "qs", pack(codes.reshape(2, 16, -1), 4))


def _write_nvfp4(blocks: Blocks, columns: Floats) -> None:
    x = columns.reshape(4, 16, -1)
    scale_codes = _to_ue4m3(magnitude(x) / np.float32(6))
    blocks["d"] = scale_codes.T
    codes = _nearest(x, _UE4M3[scale_codes])
    put(blocks, "qs", pack(codes.reshape(4, 2, 8, -1), 4))


def _read_mxfp4(values: Floats, blocks: Blocks) -> None:
    codes = split(planes(blocks["qs"]), 4)[0]
    expand(values, look_up(_PAIRS, blockwise(codes)), _E8M0[blocks["e"]])


def _read_nvfp4(values: Floats, blocks: Blocks) -> None:
    codes = split(planes(blocks["qs"]), 4).reshape(8, -1, 8)
    expand(values, look_up(_PAIRS, blockwise(codes)), _UE4M3[blocks["d"]])


MXFP4 = Codec(layout(e="u1", qs=runs(1, 16)), _read_mxfp4, _write_mxfp4, _LEVELS)
NVFP4 = Codec(layout(d=("u1", 4), qs=runs(4, 8)), _read_nvfp4, _write_nvfp4, _LEVELS)
