"""State space models (Mamba): the convolution before, and the selective scan."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ggmlb.backends.common.rules import F32, FLOATS, I32, operands
from ggmlb.backends.cpu.ops.patches import as_f32, sum_of_products
from ggmlb.backends.cpu.ops.recurrent import scan, unpacked, update
from ggmlb.backends.cpu.ops.unary import softplus
from ggmlb.backends.cpu.rules import RULES
from ggmlb.backends.cpu.views import View
from ggmlb.core.enums import Op
from ggmlb.core.tensor import Tensor

if TYPE_CHECKING:
    from ggmlb.backends.common.workspace import Array
    from ggmlb.backends.cpu.lowering import CpuLowering


@RULES.rule(Op.SSM_CONV, operands(FLOATS, FLOATS, out=F32))
def ssm_conv(lw: CpuLowering, t: Tensor) -> None:
    """`y[seq, token, i] = sum over taps of x[seq, i, token + tap] c[i, tap]`."""
    if t.sources[1].is_empty:  # no taps
        lw.emit(lw.array(t).fill, 0)
        return
    x, c = (as_f32(lw, View.of(s)) for s in t.sources)
    y, (_, _, row, item), (_, _, c_row, c_item) = View.of(t), x.strides, c.strides
    factors = []
    for tap in range(c.shape[3]):
        factors.append(x.reshaped(y.shape, (*x.strides[:2], item, row), tap * item))
        factors.append(c.reshaped(y.shape, (0, 0, 0, c_row), tap * c_item))
    lw.tiled(sum_of_products, y, *factors, scratch=1, work=len(factors))


@RULES.rule(Op.SSM_SCAN, operands(*[F32] * 6, I32, out=F32))
def ssm_scan(lw: CpuLowering, t: Tensor) -> None:
    """`S = S exp(dt A) + (x dt) B`, then `y = S C`, with `dt` through softplus and the state `S[x, B]`.

    Consecutive heads share a group's `B` and `C`.
    """
    (state, x, dt, a, b, c, ids) = t.sources
    dim, h, n_tokens, n = x.ne
    heads = (b.ne[1], h // b.ne[1])
    size = (*heads, dim, state.ne[0])
    y, states = unpacked(lw, t, (n, n_tokens, *heads, dim), (t.params["k"], n, *size))
    ys, xs = (v.reshape(n, n_tokens, *heads, dim).swapaxes(0, 1) for v in (y, lw.array(x)))
    dts = lw.array(dt)[0].reshape(n, n_tokens, *heads).swapaxes(0, 1)[..., None]
    bs, cs = (lw.array(v).swapaxes(0, 1)[..., None, :] for v in (b, c))
    rate = lw.array(a)[0, 0].reshape(1, *heads, -1)
    first = lw.scratch((n, *size))
    by_state = lw.array(state).reshape(1, 1, state.ne[3], -1)
    lw.emit(lw.take_rows, first.reshape(1, 1, n, -1), by_state, lw.array(ids)[:1, :1, 0])
    times, inputs, tmp = lw.scratch(dts.shape), lw.scratch(xs.shape), lw.scratch(dts.shape)

    def all_inputs() -> None:
        softplus(times, dts, tmp)
        np.multiply(xs, times, out=inputs)

    def advance(
        new: Array, old: Array, dt: Array, x: Array, b: Array, c: Array, y: Array,
        rate: Array, decay: Array, outer: Array,
    ) -> None:  # fmt: skip
        np.multiply(dt, rate, out=decay)
        np.exp(decay, out=decay)
        update(new, old, decay[..., None, :], x, b, outer)
        np.matmul(new, c[..., None], out=y[..., None])

    lw.emit(all_inputs)
    held = (rate, lw.scratch((n, *rate.shape[1:])), lw.scratch(first.shape))
    scan(lw, first, states, advance, (times, inputs, bs, cs, ys), held)
