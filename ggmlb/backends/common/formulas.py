"""Constants and tables for gelu, ALiBi, RoPE and YaRN, computed on the host."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from math import ceil, floor, inf, log, log2, pi
from typing import TYPE_CHECKING, Any

import numpy as np

from ggmlb.core.enums import RopeType

if TYPE_CHECKING:
    from ggmlb.backends.common.workspace import Array

SQRT_2_OVER_PI = 0.79788456080286535588
GELU_COEF = 0.044715
GELU_IS_ZERO = -100.0
"""Below about -10, gelu is 0 in float32; at `-inf` its formulas, but not ggml's, would be NaN."""
GELU_QUICK_COEF = 1.702

# The normal distribution function as a sigmoid: log(Phi(x) / Phi(-x)) / x is even and smooth. This is a
# minimax polynomial in x^2, highest power first; the error of x * Phi(x) is 7e-8. It is positive and grows
# without bound, so that the sigmoid saturates.
NORMAL_AS_SIGMOID = (
    3.6112370316510383e-09,
    -2.668930074770149e-07,
    7.938221990564175e-06,
    -0.00011048033954260706,
    -6.625991177758288e-05,
    0.07266856692793666,
    1.5957684322633572,
)


def alibi(n_head: int, max_bias: float) -> tuple[int, float, float]:
    """Return ALiBi's `n_head_log2` (largest power of two up to `n_head`), and slope bases `m0` and `m1`."""
    n = 1 << floor(log2(n_head))
    return n, 2.0 ** (-max_bias / n), 2.0 ** (-max_bias / 2 / n)


def alibi_slopes(n_head: int, max_bias: float) -> Array:
    """Return the ALiBi slope of each head `h`: `m0**(h+1)`, or odd powers of `m1` from `n_head_log2` on."""
    n, base, between = alibi(n_head, max_bias)
    heads = np.arange(n_head)
    slopes = np.where(heads < n, base ** (heads + 1.0), between ** (2.0 * (heads - n) + 1))
    return np.asarray(slopes, np.float32)


def yarn_range(params: Mapping[str, Any]) -> tuple[float, float]:
    """Return the start and length of YaRN's ramp in rotated pairs (`ggml_rope_yarn_corr_dims`)."""
    n_dims, n_ctx = params["n_dims"], params["n_ctx_orig"]
    if not n_ctx or not params["ext_factor"]:
        return 0.0, 0.001

    def pair_of(n_turns: float) -> float:
        return n_dims * log(n_ctx / (n_turns * 2 * pi)) / (2 * log(params["freq_base"])) if n_turns else inf

    low = max(0, floor(pair_of(params["beta_fast"])))
    high = min(n_dims - 1, ceil(pair_of(params["beta_slow"])))
    return low, max(0.001, high - low)


def yarn_ramp(n_pairs: int, params: Mapping[str, Any]) -> Array:
    """Return YaRN's blend factor of each rotated pair: 1 extrapolates its angle, 0 interpolates it."""
    low, length = yarn_range(params)
    return 1 - np.clip((np.arange(n_pairs) - low) / length, 0, 1)


def pair_angles(n_pairs: int, params: dict[str, Any]) -> tuple[Array, Array]:
    """Return each rotated pair's angle per position, and which of M-RoPE's four positions it uses.

    The arrays are cached: do not write to them.
    """
    return _pair_angles(n_pairs, tuple(params.items()))


@lru_cache(64)  # all layers of a model use the same
def _pair_angles(n_pairs: int, items: tuple[tuple[str, Any], ...]) -> tuple[Array, Array]:
    params = dict(items)
    pairs = np.arange(n_pairs)
    exponent: Array = pairs
    channel: Array = np.zeros(n_pairs, np.intp)
    mode, sections = params["mode"], np.asarray(params["sections"])
    if mode & RopeType.MROPE:
        sector = pairs % sections.sum()
        if mode == RopeType.IMROPE:
            inside = sector < 3 * sections[sector % 3]
            channel = np.where(inside, sector % 3, 3)
        else:
            starts = np.cumsum(sections)[:3]
            channel = np.searchsorted(starts, sector, side="right")
            if mode == RopeType.VISION:  # each section counts its exponent from 0
                exponent = sector - np.concatenate(([0], starts))[channel]
    angle = params["freq_base"] ** (-2.0 * exponent / params["n_dims"])
    mix = yarn_ramp(n_pairs, params) * params["ext_factor"] if params["ext_factor"] else 0.0
    return (angle * (params["freq_scale"] * (1 - mix) + mix)).astype(np.float32), channel.astype(np.int64)
