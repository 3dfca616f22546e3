"""soft_max, with scale, mask, ALiBi and sinks; and the causal masks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from ggmlb.backends.common.formulas import alibi_slopes
from ggmlb.backends.cpu.array.ops.unary import EXP
from ggmlb.backends.cpu.array.rules import F32, FLOAT, operands, rule
from ggmlb.backends.cpu.array.views import View
from ggmlb.core.enums import Op
from ggmlb.core.tensor import Tensor

if TYPE_CHECKING:
    from ggmlb.backends.common.workspace import Array
    from ggmlb.backends.cpu.array.lowering import Lowering


def per_head(view: View) -> View:
    """See one value per head as an operand of `[heads, 1, 1]`."""
    return view.reshaped((1, view.shape[-1], 1, 1), (0, view.strides[-1], 0, 0))


@rule(Op.SOFT_MAX, operands(FLOAT, FLOAT, F32))
def soft_max(lw: Lowering, t: Tensor) -> None:
    """`exp(z - max z) / sum`, with `z = x scale + slope mask`; a sink joins maximum and sum."""
    a = t.operand(0)
    mask, sinks = t.optional(1), t.optional(2)
    xp, scale, max_bias = lw.xp, t.params["scale"], t.params["max_bias"]
    views = [View.of(t), View.of(a)]
    has_mask, has_sinks = mask is not None, sinks is not None
    if mask is not None:
        views.append(View.of(mask).cut(2, 0, a.ne[1]))
        if max_bias > 0:
            views.append(per_head(lw.view(lw.xp.asarray(alibi_slopes(a.ne[2], max_bias)))))
    if sinks is not None:
        views.append(per_head(View.of(sinks)))

    def kernel(y: Array, x: Array, *rest: Array) -> None:
        *operands, z = rest
        sink = operands.pop() if has_sinks else None
        if scale != 1:
            x = xp.multiply(x, scale, out=z)
        if has_mask:
            bias = operands[0]
            if max_bias > 0:
                bias = xp.multiply(bias, operands[1], out=y)
            x = xp.add(x, bias, out=z)
        soft_max_rows(xp, y, x, z, sink, lw.row_sum)

    lw.tiled(kernel, *views, inner=1, scratch=1, work=2 * EXP)


def soft_max_rows(
    xp: Any,
    y: Array,
    x: Array,
    tmp: Array,
    sink: Array | None = None,
    row_sum: Callable[[Array], Array] | None = None,
) -> None:
    """`y = exp(x - max x) / sum exp(x - max x)` along the last axis; `tmp` may be `x`."""
    peak = x.max(axis=-1, keepdims=True)
    if sink is not None:
        peak = xp.maximum(peak, sink)
    xp.subtract(x, peak, out=tmp)
    xp.exp(tmp, out=y)
    total = row_sum(y) if row_sum else y.sum(axis=-1, keepdims=True)
    if sink is not None:
        total += xp.exp(sink - peak)
    xp.multiply(y, 1 / total, out=y)


@rule(Op.SOFT_MAX_BACK, operands(FLOAT, FLOAT))
def soft_max_back(lw: Lowering, t: Tensor) -> None:
    """`scale y (dy - sum(y dy))` per row, from the gradient `dy` and the result `y`."""
    xp, scale = lw.xp, t.params["scale"]

    def kernel(dx: Array, dy: Array, y: Array, tmp: Array) -> None:
        xp.subtract(dy, lw.row_dot(y, dy, tmp), out=tmp)
        xp.multiply(tmp, y, out=tmp)
        xp.multiply(tmp, scale, out=dx)

    lw.rowwise(kernel, t, *t.sources, scratch=1)


def _diag_mask(lw: Lowering, t: Tensor, value: float) -> None:
    (a,) = t.sources
    xp = lw.xp
    later = xp.arange(a.ne[0]) > xp.arange(a.ne[1])[:, None] + t.params["n_past"]

    def kernel(y: Array, x: Array) -> None:
        xp.copyto(y, x)
        xp.copyto(y, value, where=later)

    lw.tiled(kernel, View.of(t), View.of(a), inner=2)


@rule(Op.DIAG_MASK_INF, operands(FLOAT))
def diag_mask_inf(lw: Lowering, t: Tensor) -> None:
    """`-inf` where column `i0` is beyond row `i1` plus `n_past`."""
    _diag_mask(lw, t, -np.inf)


@rule(Op.DIAG_MASK_ZERO, operands(FLOAT))
def diag_mask_zero(lw: Lowering, t: Tensor) -> None:
    """0 where column `i0` is beyond row `i1` plus `n_past`."""
    _diag_mask(lw, t, 0.0)
