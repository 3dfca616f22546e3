"""Rotary position embedding: pairs of a row are rotated by angles proportional to a position."""

from __future__ import annotations

from math import log

import numpy as np

from ggmlb.backends.common.formulas import pair_angles
from ggmlb.backends.common.rules import F32, FLOATS, I32, operands
from ggmlb.backends.common.workspace import Array
from ggmlb.backends.cpu.lowering import RULES, NodeLowering
from ggmlb.core.enums import Op, RopeType
from ggmlb.core.tensor import Tensor

WORK = 6
"""Cost of a rotation per element, in additions."""


def _rope(lw: NodeLowering, t: Tensor, direction: float) -> None:
    a, positions = t.operand(0), t.operand(1)
    factors = t.optional(2)
    params = t.params
    n_dims, start = params["n_dims"], params["offset"]
    n_pairs = n_dims if params["mode"] == RopeType.VISION else n_dims // 2
    n_tokens = t.ne[2]
    angle, channel = pair_angles(n_pairs, params)
    magnitude = params["attn_factor"]
    if params["ext_factor"]:
        magnitude *= 1 + 0.1 * log(1 / params["freq_scale"])
    pos = lw.view(positions).reshape(-1, n_tokens)
    ff = lw.view(factors)[0, 0, 0, :n_pairs] if factors is not None else None
    cos, sin = lw.scratch((n_tokens, n_pairs)), lw.scratch((n_tokens, n_pairs))

    def turn(cos: Array, sin: Array, pos: Array, ff: Array | None, angle: Array, channel: Array) -> None:
        np.copyto(cos, pos[channel].T if len(pos) > 1 else pos.T)
        np.multiply(cos, angle, out=cos)
        if ff is not None:
            np.divide(cos, ff, out=cos)
        np.sin(cos, out=sin)
        np.cos(cos, out=cos)
        if magnitude != 1:
            np.multiply(cos, magnitude, out=cos)
        if magnitude * direction != 1:
            np.multiply(sin, magnitude * direction, out=sin)

    lw.emit(turn, cos, sin, pos, ff, angle, channel)
    if params["mode"] == RopeType.NORMAL:
        first, second = slice(start, start + n_dims, 2), slice(start + 1, start + n_dims, 2)
    else:
        first = slice(start, start + n_pairs)
        second = slice(start + n_pairs, start + 2 * n_pairs)
    end = start + 2 * n_pairs

    def kernel(y: Array, x: Array, c: Array, s: Array, tmp: Array) -> None:
        x0, x1 = x[..., first], x[..., second]
        y0, y1 = y[..., first], y[..., second]
        u, v = tmp[..., :n_pairs], tmp[..., n_pairs : 2 * n_pairs]
        np.multiply(x0, s, out=u)
        np.multiply(x1, c, out=v)
        np.add(u, v, out=v)
        np.multiply(x1, s, out=u)
        np.multiply(x0, c, out=y0)
        np.subtract(y0, u, out=y0)
        np.copyto(y1, v)
        np.copyto(y[..., :start], x[..., :start])
        np.copyto(y[..., end:], x[..., end:])

    tables = [x.reshaped((1, n_tokens, 1, n_pairs), (0, x.strides[0], 0, x.strides[1])) for x in (cos, sin)]
    lw.tiled(kernel, lw.view(t), lw.view(a), *tables, inner=1, scratch=1, work=WORK)


@RULES.rule(Op.ROPE, operands(FLOATS, I32, F32))
def rope(lw: NodeLowering, t: Tensor) -> None:
    """`(x0 cos - x1 sin, x0 sin + x1 cos)` for each pair of a row, by its angle at the row's position."""
    _rope(lw, t, 1.0)


@RULES.rule(Op.ROPE_BACK, operands(FLOATS, I32, F32))
def rope_back(lw: NodeLowering, t: Tensor) -> None:
    """`(x0 cos + x1 sin, x1 cos - x0 sin)` for each pair: the rotation of `rope` by the opposite angle."""
    _rope(lw, t, -1.0)
