"""soft_max, with scale, mask, ALiBi and sinks; the causal masks; cross entropy."""

from __future__ import annotations

import numpy as np

from ggmlb.backends.common.formulas import alibi_slopes
from ggmlb.backends.common.rules import F32, FLOATS, has_elements, operands
from ggmlb.backends.common.workspace import Array
from ggmlb.backends.cpu.kernels import row_dot, row_sum
from ggmlb.backends.cpu.lowering import RULES, NodeLowering
from ggmlb.backends.cpu.ops.elementwise import EXP
from ggmlb.backends.cpu.views import View
from ggmlb.core.enums import Op
from ggmlb.core.tensor import Tensor


def per_head(view: View) -> View:
    """Reshape a view of one value per head so that it broadcasts over the head's rows."""
    return view.reshaped((1, view.shape[-1], 1, 1), (0, view.strides[-1], 0, 0))


@RULES.rule(Op.SOFT_MAX, operands(FLOATS, FLOATS, F32))
def soft_max(lw: NodeLowering, t: Tensor) -> None:
    """`exp(z - max z) / sum`, with `z = x scale + slope mask`; a sink is one more logit of the row."""
    a = t.operand(0)
    mask, sinks = t.optional(1), t.optional(2)
    scale, max_bias = t.params["scale"], t.params["max_bias"]
    views = [lw.view(t), lw.view(a)]
    has_mask, has_sinks = mask is not None, sinks is not None
    if mask is not None:
        views.append(lw.view(mask).cut(2, 0, a.ne[1]))
        if max_bias > 0:
            views.append(per_head(lw.constant(alibi_slopes(a.ne[2], max_bias))))
    if sinks is not None:
        views.append(per_head(lw.view(sinks)))

    def kernel(y: Array, x: Array, *rest: Array) -> None:
        *operands, z = rest
        sink = operands.pop() if has_sinks else None
        if scale != 1 or max_bias > 0:  # y, which may be x, is the memory of the biased mask
            x = np.multiply(x, scale, out=z)
        if has_mask:
            bias = operands[0]
            if max_bias > 0:
                bias = np.multiply(bias, operands[1], out=y)
            x = np.add(x, bias, out=z)
        soft_max_rows(y, x, z, sink)

    lw.tiled(kernel, *views, inner=1, scratch=1, work=2 * EXP)


def soft_max_rows(y: Array, x: Array, tmp: Array, sink: Array | None = None) -> None:
    """`y = exp(x - max x) / sum exp(x - max x)` along the last axis; `tmp` may be `x`."""
    peak = x.max(axis=-1, keepdims=True)
    if sink is not None:
        peak = np.maximum(peak, sink)
    np.subtract(x, peak, out=tmp)
    np.exp(tmp, out=y)
    total = row_sum(y)
    if sink is not None:
        total += np.exp(sink - peak)
    np.multiply(y, 1 / total, out=y)


@RULES.rule(Op.SOFT_MAX_BACK, operands(FLOATS, FLOATS))
def soft_max_back(lw: NodeLowering, t: Tensor) -> None:
    """`scale y (dy - sum(y dy))` per row, from the gradient `dy` and the result `y`."""
    scale = t.params["scale"]

    def kernel(dx: Array, dy: Array, y: Array, tmp: Array) -> None:
        np.subtract(dy, row_dot(y, dy), out=tmp)
        np.multiply(tmp, y, out=tmp)
        np.multiply(tmp, scale, out=dx)

    lw.rowwise(kernel, t, *t.sources, scratch=1)


def _diag_mask(lw: NodeLowering, t: Tensor, value: float) -> None:
    n_past = t.params["n_past"]

    def kernel(y: Array, x: Array) -> None:
        n_rows, n = y.shape[-2:]
        np.copyto(y, x)
        np.copyto(y, value, where=np.arange(n) > np.arange(n_rows)[:, None] + n_past)

    lw.tiled(kernel, lw.view(t), lw.view(t.sources[0]), inner=2)


@RULES.rule(Op.DIAG_MASK_INF, operands(FLOATS))
def diag_mask_inf(lw: NodeLowering, t: Tensor) -> None:
    """`-inf` where column `i0` is beyond row `i1` plus `n_past`."""
    _diag_mask(lw, t, -np.inf)


@RULES.rule(Op.DIAG_MASK_ZERO, operands(FLOATS))
def diag_mask_zero(lw: NodeLowering, t: Tensor) -> None:
    """0 where column `i0` is beyond row `i1` plus `n_past`."""
    _diag_mask(lw, t, 0.0)


@RULES.rule(Op.CROSS_ENTROPY_LOSS, operands(FLOATS, FLOATS), has_elements)
def cross_entropy_loss(lw: NodeLowering, t: Tensor) -> None:
    """`-sum(p log soft_max(x))` per row of logits `x` and probabilities `p`, the mean of all rows."""
    (a, b) = t.sources
    by_row, y, n = lw.scratch((*a.ne[:0:-1], 1)), lw.out_f32(t), a.n_rows

    def kernel(y: Array, x: Array, p: Array, z: Array, tmp: Array) -> None:
        np.subtract(x, x.max(axis=-1, keepdims=True), out=z)
        np.exp(z, out=tmp)
        np.subtract(z, np.log(row_sum(tmp)), out=z)
        np.copyto(y, row_dot(z, p))

    def mean(y: Array, by_row: Array) -> None:
        np.sum(by_row, keepdims=True, out=y)
        np.divide(y, -n, out=y)

    lw.tiled(kernel, by_row, lw.view(a), lw.view(b), inner=1, scratch=2, work=2 * EXP)
    lw.emit(mean, y, by_row)
    lw.store(t, y)


@RULES.rule(Op.CROSS_ENTROPY_LOSS_BACK, operands(FLOATS, FLOATS, FLOATS))
def cross_entropy_loss_back(lw: NodeLowering, t: Tensor) -> None:
    """`grad (soft_max(x) - p) / n_rows`."""
    (grad, a, b) = t.sources
    g, n = lw.f32(lw.view(grad)), a.n_rows

    def kernel(dx: Array, x: Array, p: Array, g: Array, z: Array, tmp: Array) -> None:
        np.copyto(z, x)
        soft_max_rows(tmp, z, z)
        np.subtract(tmp, p, out=tmp)
        np.multiply(tmp, g / n, out=dx)

    views = [lw.view(x) for x in (t, a, b)]
    lw.tiled(kernel, *views, whole=[g.reshape(1)], inner=1, scratch=2, work=2 * EXP)
