"""Rotary position embedding: pairs of a row are turned by angles proportional to a position."""

from __future__ import annotations

from math import log
from typing import TYPE_CHECKING

from ggmlb.backends.common.formulas import pair_angles
from ggmlb.backends.cpu.array.rules import F32, FLOAT, I32, operands, rule
from ggmlb.backends.cpu.array.views import View
from ggmlb.core.enums import Op, RopeType
from ggmlb.core.tensor import Tensor

if TYPE_CHECKING:
    from ggmlb.backends.common.workspace import Array
    from ggmlb.backends.cpu.array.lowering import Lowering


WORK = 6
"""Of a rotation per element, in additions."""


def _rope(lw: Lowering, t: Tensor, direction: float) -> None:
    a, positions = t.operand(0), t.operand(1)
    factors = t.optional(2)
    xp, params = lw.xp, t.params
    n_dims, start = params["n_dims"], params["offset"]
    n_pairs = n_dims if params["mode"] == RopeType.VISION else n_dims // 2
    n_tokens = t.ne[2]
    angle, channel = (xp.asarray(x) for x in pair_angles(n_pairs, params))
    magnitude = params["attn_factor"]
    if params["ext_factor"]:
        magnitude *= 1 + 0.1 * log(1 / params["freq_scale"])
    pos = lw.array(positions).reshape(-1, n_tokens)
    ff = lw.array(factors)[0, 0, 0, :n_pairs] if factors is not None else None
    cos, sin = lw.scratch((n_tokens, n_pairs)), lw.scratch((n_tokens, n_pairs))

    def turn(cos: Array, sin: Array, pos: Array, ff: Array | None) -> None:
        xp.copyto(cos, pos[channel].T if len(pos) > 1 else pos.T)
        xp.multiply(cos, angle, out=cos)
        if ff is not None:
            xp.divide(cos, ff, out=cos)
        xp.sin(cos, out=sin)
        xp.cos(cos, out=cos)
        if magnitude != 1:
            xp.multiply(cos, magnitude, out=cos)
        if magnitude * direction != 1:
            xp.multiply(sin, magnitude * direction, out=sin)

    lw.emit(turn, cos, sin, pos, ff)
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
        xp.multiply(x0, s, out=u)
        xp.multiply(x1, c, out=v)
        xp.add(u, v, out=v)
        xp.multiply(x1, s, out=u)
        xp.multiply(x0, c, out=y0)
        xp.subtract(y0, u, out=y0)
        xp.copyto(y1, v)
        xp.copyto(y[..., :start], x[..., :start])
        xp.copyto(y[..., end:], x[..., end:])

    tables = [
        lw.view(x).reshaped((1, n_tokens, 1, n_pairs), (0, x.strides[0], 0, x.strides[1])) for x in (cos, sin)
    ]
    lw.tiled(kernel, View.of(t), View.of(a), *tables, inner=1, scratch=1, work=WORK)


@rule(Op.ROPE, operands(FLOAT, I32, F32))
def rope(lw: Lowering, t: Tensor) -> None:
    """`(x0 cos - x1 sin, x0 sin + x1 cos)` for each pair."""
    _rope(lw, t, 1.0)


@rule(Op.ROPE_BACK, operands(FLOAT, I32, F32))
def rope_back(lw: Lowering, t: Tensor) -> None:
    """The inverse rotation."""
    _rope(lw, t, -1.0)
