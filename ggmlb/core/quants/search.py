"""The scale searches of ggml's K-quant writers, for many runs of elements at once.

Each tries several scales and keeps the one of least weighted error per run. All arithmetic is float32 in
ggml's order, so that results equal ggml's, ties and rounding included.

Values are columns (see `columns`): `(n_runs, run_length, n_blocks)`. Results have a scale, and perhaps a
minimum, per run, `(n_runs, n_blocks)`, and codes like the values, as whole float32 numbers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ggmlb.core.quants.columns import peak, total

if TYPE_CHECKING:
    from ggmlb.core.quants.codec import Floats

TINY = np.float32(1e-15)
"""The searches treat a run of magnitudes below this as zeros (GROUP_MAX_EPS)."""


def per_run(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Insert axis 1: values `(n_runs, n_blocks)` broadcast over each run (elements that share a scale)."""
    return values[:, None]


def rounded(columns: Floats, least: int, most: int) -> Floats:
    """Round values to whole numbers in place, halves to even, and clip them to `least` and `most`."""
    np.rint(columns, out=columns)
    return np.clip(columns, np.float32(least), np.float32(most), out=columns)


def fit_affine(
    x: Floats, weights: Floats, most: int, first: float, step: float, n_steps: int, *, absolute: bool = False
) -> tuple[Floats, Floats, Floats]:
    """Fit `x = code * scale - minimum`, codes 0 to `most`, trying `n_steps + 1` scales (make_qkx2_quants).

    No minimum is negative.

    Args:
        x: The values.
        weights: Weight of each value's error.
        most: The highest code.
        first: The first candidate for a scale is the range of a run divided by `most + first`.
        step: Added to that divisor for each further candidate.
        n_steps: How many candidates follow the first.
        absolute: Add up absolute errors, not squares.

    Returns:
        `(scale, minimum, codes)`.
    """
    low = np.minimum(x.min(1), np.float32(0))
    high = x.max(1)
    flat = high == low
    sum_w, sum_x = total(weights), total(weights * x)
    codes, weighted, scratch = np.empty_like(x), np.empty_like(x), np.empty_like(x)

    def encode(inverse: Floats, low: Floats) -> None:
        np.subtract(x, per_run(low), out=codes)
        np.multiply(codes, per_run(inverse), out=codes)
        rounded(codes, 0, most)

    def error(scale: Floats, low: Floats) -> Floats:
        diff = np.multiply(codes, per_run(scale), out=scratch)
        diff += per_run(low)
        diff -= x
        diff = np.abs(diff, out=diff) if absolute else np.multiply(diff, diff, out=diff)
        diff *= weights
        return total(diff)

    inverse = np.float32(most) / (high - low)
    scale = np.float32(1) / inverse
    winner = inverse, low
    encode(*winner)
    least = error(scale, low)
    for i in range(n_steps + 1):
        divisor = np.float32(first) + np.float32(step) * np.float32(i) + np.float32(most)
        inverse = divisor / (high - low)
        encode(inverse, low)
        np.multiply(weights, codes, out=weighted)
        sum_l = total(weighted)
        sum_l2 = total(np.multiply(weighted, codes, out=scratch))
        sum_xl = total(np.multiply(weighted, x, out=scratch))
        determinant = sum_w * sum_l2 - sum_l * sum_l
        new_scale = (sum_w * sum_xl - sum_x * sum_l) / determinant
        new_low = (sum_l2 * sum_x - sum_l * sum_xl) / determinant
        above = new_low > 0
        new_scale = np.where(above, sum_xl / sum_l2, new_scale)
        new_low = np.where(above, np.float32(0), new_low)
        new_error = error(new_scale, new_low)
        better = (determinant > 0) & (new_error < least)
        winner = np.where(better, inverse, winner[0]), np.where(better, low, winner[1])
        least = np.where(better, new_error, least)
        scale = np.where(better, new_scale, scale)
        low = np.where(better, new_low, low)  # the next candidates start from it
    encode(*winner)
    np.copyto(codes, np.float32(0), where=per_run(flat))
    return np.where(flat, np.float32(0), scale), -low, codes


def fit_signed(x: Floats, half: int) -> tuple[Floats, Floats]:
    """Fit `x = (code - half) * scale` with codes 0 to `2 * half - 1` (make_qx_quants).

    Squared errors are weighted by the squared values.

    Returns:
        `(scale, codes)`.
    """
    top = peak(x)
    zero = np.abs(top) < TINY
    w = x * x
    wx = w * x
    codes, scratch = np.empty_like(x), np.empty_like(x)

    def encode(inverse: Floats) -> None:
        rounded(np.multiply(x, per_run(inverse), out=codes), -half, half - 1)

    def sums() -> tuple[Floats, Floats]:
        sum_lx = total(np.multiply(wx, codes, out=scratch))
        weighted = np.multiply(w, codes, out=scratch)
        return sum_lx, total(np.multiply(weighted, codes, out=scratch))

    winner = np.float32(-half) / top
    encode(winner)
    sum_lx, sum_l2 = sums()
    scale = np.where(sum_l2 != 0, sum_lx / sum_l2, np.float32(0))
    best = scale * sum_lx
    for i in (*range(-9, 0), *range(1, 10)):
        inverse = -(np.float32(half) + np.float32(0.1) * np.float32(i)) / top
        encode(inverse)
        sum_lx, sum_l2 = sums()
        better = (sum_l2 > 0) & (sum_lx * sum_lx > best * sum_l2)
        winner = np.where(better, inverse, winner)
        scale = np.where(better, sum_lx / sum_l2, scale)
        best = np.where(better, scale * sum_lx, best)
    encode(winner)
    codes += np.float32(half)
    np.copyto(codes, np.float32(0), where=per_run(zero))
    return np.where(zero, np.float32(0), scale), codes


def fit_signed_by_descent(x: Floats, half: int) -> tuple[Floats, Floats]:
    """Fit `x = (code - half) * scale`, like `fit_signed`, by improving one code at a time (make_q3_quants).

    Returns:
        `(scale, codes)`.
    """
    top = peak(x)
    zero = np.abs(top) < TINY
    w = x * x
    wx = w * x
    codes = rounded(x * per_run(np.float32(-half) / top), -half, half - 1)
    sum_lx = total(wx * codes)
    sum_l2 = total(w * codes * codes)
    for _ in range(5):
        changed = False
        for xi, wi, wxi, code in zip(*(a.swapaxes(0, 1) for a in (x, w, wx, codes)), strict=True):
            rest_lx = sum_lx - wxi * code
            rest_l2 = sum_l2 - wi * code * code
            new = rounded(xi * rest_l2 / rest_lx, -half, half - 1)
            new_lx = rest_lx + wxi * new
            new_l2 = rest_l2 + wi * new * new
            better = new_lx * new_lx * sum_l2 > sum_lx * sum_lx * new_l2
            better &= (rest_lx > 0) & (new_l2 > 0) & (new != code)
            if better.any():
                changed = True
                np.copyto(code, new, where=better)
                np.copyto(sum_lx, new_lx, where=better)
                np.copyto(sum_l2, new_l2, where=better)
        if not changed:
            break
    codes += np.float32(half)
    np.copyto(codes, np.float32(0), where=per_run(zero))
    return np.where((sum_l2 > 0) & ~zero, sum_lx / sum_l2, np.float32(0)), codes
