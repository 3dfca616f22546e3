"""MXFP4 and NVFP4: 4-bit floats (E2M1) under a scale that is an 8-bit float.

The levels are kept doubled, as integers, and the scales halved.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from ggmlb.quants.codec import Blocks, Bytes, Codec, Floats, blockwise, expand, layout, planes, runs, split
from ggmlb.quants.columns import magnitude, pack, put
from ggmlb.quants.levels import look_up, pair_table
from ggmlb.quants.search import per_run

_LEVELS = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
_PAIRS = pair_table(_LEVELS)
_MIDPOINTS = (0.5, 1.5, 2.5, 3.5, 5.0, 7.0, 10.0)


@cache
def _scales(name: str) -> Floats:
    """What each of the 256 scales of a type means, halved."""
    import gguf.quants

    codes = np.arange(256, dtype=np.uint8)
    if name == "e8m0":
        return np.asarray(gguf.quants.MXFP4.e8m0_to_fp32_half(codes), np.float32)
    return np.asarray(gguf.quants.NVFP4.ue4m3_to_fp32(codes), np.float32)


def _nearest(x: Floats, scale: Floats) -> Bytes:
    """Return codes of the nearest levels, at midpoints the smaller; exact, as midpoints times scales are.

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
    codes = _nearest(x, _scales("e8m0")[blocks["e"]][None])
    put(blocks, "qs", pack(codes.reshape(2, 16, -1), 4))


def _write_nvfp4(blocks: Blocks, columns: Floats) -> None:
    import gguf.quants

    x = columns.reshape(4, 16, -1)
    scale_codes = gguf.quants.NVFP4.fp32_to_ue4m3(magnitude(x) / np.float32(6))
    blocks["d"] = scale_codes.T
    codes = _nearest(x, _scales("ue4m3")[scale_codes])
    put(blocks, "qs", pack(codes.reshape(4, 2, 8, -1), 4))


def _read_mxfp4(values: Floats, blocks: Blocks) -> None:
    codes = split(planes(blocks["qs"]), 4)[0]
    expand(values, look_up(_PAIRS, blockwise(codes)), _scales("e8m0")[blocks["e"]])


def _read_nvfp4(values: Floats, blocks: Blocks) -> None:
    codes = split(planes(blocks["qs"]), 4).reshape(8, -1, 8)
    expand(values, look_up(_PAIRS, blockwise(codes)), _scales("ue4m3")[blocks["d"]])


MXFP4 = Codec(layout(e="u1", qs=runs(1, 16)), _read_mxfp4, _write_mxfp4)
NVFP4 = Codec(layout(d=("u1", 4), qs=runs(4, 8)), _read_nvfp4, _write_nvfp4)
