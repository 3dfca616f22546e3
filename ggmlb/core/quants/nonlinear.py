"""IQ4_NL and IQ4_XS: 4-bit codes of unevenly spaced levels."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ggmlb.core.quants.codec import (
    Blocks,
    Codec,
    Floats,
    Ints,
    blockwise,
    expand,
    f32,
    layout,
    look_up,
    pair_table,
    planes,
    runs,
    split,
)
from ggmlb.core.quants.columns import pack, peak, put, ratio, total
from ggmlb.core.quants.search import TINY, per_run, rounded

_LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_PAIRS = pair_table(_LEVELS)

# All midpoints of neighbours are multiples of 0.5, so the nearest level of x depends on floor(2 x) only.
_STEPS = np.arange(-256, 256) / 2
_MIDPOINTS = np.add(_LEVELS[1:], _LEVELS[:-1]) / 2
_CODES = np.searchsorted(_MIDPOINTS, _STEPS, side="right").astype(np.uint8)  # at a midpoint, the upper
_NEAREST = np.array(_LEVELS, np.float32)[_CODES]


def _steps(x: Floats, scale: Floats) -> Ints:
    """Return the table index of the level nearest to each value times its run's scale."""
    scaled: Floats = x * per_run(scale + scale)
    np.floor(scaled, out=scaled)
    scaled += np.float32(256)
    np.fmin(scaled, np.float32(511), out=scaled)  # NaN gets the last code, as ggml's search ends there
    np.maximum(scaled, np.float32(0), out=scaled)
    return scaled.astype(np.intp)


def _fit(x: Floats, first: int, divisors: Iterable[int]) -> tuple[Floats, Floats]:
    """Fit `x = level * scale` (quantize_row_iq4_nl_impl).

    Args:
        x: Columns `(n_runs, 32, n_blocks)`; squares are the weights.
        first: The first candidate maps the value of the largest magnitude to this level.
        divisors: The levels that the other candidates map it to.

    Returns:
        The best scale and the inverse of the first, `(n_runs, n_blocks)`; both 0 for runs of zeros.
    """
    top = peak(x)
    top[np.abs(top) < TINY] = 0
    w = x * x

    def sums(inverse: Floats) -> tuple[Floats, Floats]:
        q = np.take(_NEAREST, _steps(x, inverse), mode="clip")
        wq = w * q
        return total(wq * x), total(np.multiply(wq, q, out=q))

    first_inverse = ratio(1, top / np.float32(first))
    sum_qx, sum_q2 = sums(first_inverse)
    scale = np.where(sum_q2 > 0, sum_qx / sum_q2, np.float32(0))
    best = scale * sum_qx
    for divisor in divisors:
        sum_qx, sum_q2 = sums(ratio(divisor, top))
        better = (sum_q2 > 0) & (sum_qx * sum_qx > best * sum_q2)
        scale = np.where(better, sum_qx / sum_q2, scale)
        best = np.where(better, scale * sum_qx, best)
    scale[top == 0] = 0
    return scale, first_inverse


def _put_codes(blocks: Blocks, x: Floats, inverse: Floats) -> None:
    codes = np.take(_CODES, _steps(x, inverse), mode="clip")
    put(blocks, "qs", pack(codes.reshape(-1, 2, 16, len(blocks)), 4))


def _write_iq4_nl(blocks: Blocks, columns: Floats) -> None:
    x = columns[None]
    scale, inverse = _fit(x, _LEVELS[0], ())
    blocks["d"] = scale[0]
    _put_codes(blocks, x, inverse)


def _write_iq4_xs(blocks: Blocks, columns: Floats) -> None:
    x = columns.reshape(8, 32, -1)
    scales, _ = _fit(x, -_LEVELS[0], range(_LEVELS[0] - 7, _LEVELS[0] + 8))
    d = peak(scales) / np.float32(-32)
    blocks["d"] = d
    whole = rounded(scales * ratio(1, d), -32, 31)
    _put_codes(blocks, x, ratio(1, d * whole))
    codes = (whole + np.float32(32)).astype(np.uint8)
    put(blocks, "scales_l", pack((codes & np.uint8(15)).reshape(4, 2, -1).swapaxes(0, 1), 4))
    put(blocks, "scales_h", pack((codes >> np.uint8(4)).reshape(2, 4, -1).swapaxes(0, 1), 2))


def _read_iq4_nl(values: Floats, blocks: Blocks) -> None:
    codes = split(planes(blocks["qs"]), 4)[0]
    expand(values, look_up(_PAIRS, blockwise(codes)), f32(blocks["d"]))


def _read_iq4_xs(values: Floats, blocks: Blocks) -> None:
    n = len(blocks)
    codes = split(planes(blocks["qs"].reshape(-1, 1)), 4)[0]
    low = split(planes(blocks["scales_l"]), 4)[0]
    high = split(planes(blocks["scales_h"]), 2)[0]
    scales = f32(low.transpose(1, 2, 0).reshape(n, 8) | high.transpose(1, 2, 0).reshape(n, 8) << np.uint8(4))
    scales -= np.float32(32)
    scales *= f32(blocks["d"])[:, None]
    expand(values, look_up(_PAIRS, blockwise(codes)), scales)


IQ4_NL = Codec(layout(d="<f2", qs=runs(1, 16)), _read_iq4_nl, _write_iq4_nl, _LEVELS)
IQ4_XS = Codec(
    layout(d="<f2", scales_h=runs(1, 2), scales_l=runs(1, 4), qs=runs(8, 16)),
    _read_iq4_xs,
    _write_iq4_xs,
    _LEVELS,
)
