"""Fused parts of DeepSeek V3.2 and V4: the lightning indexer and the hyper-connections."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ggmlb.backends.common.rules import F32, FLOATS, operands
from ggmlb.backends.cpu.ops.softmax import soft_max_rows
from ggmlb.backends.cpu.rules import RULES, VALUES
from ggmlb.backends.cpu.views import cuts
from ggmlb.core.enums import Op
from ggmlb.core.tensor import Tensor

if TYPE_CHECKING:
    from ggmlb.backends.common.workspace import Array
    from ggmlb.backends.cpu.lowering import CpuLowering

N_SCORES = 1 << 20
"""Scores, of all heads, that are held at a time."""


@RULES.rule(Op.LIGHTNING_INDEXER, operands(F32, VALUES, F32, FLOATS, out=F32))
def lightning_indexer(lw: CpuLowering, t: Tensor) -> None:
    """`y[token, key] = sum over heads of weight[token, head] relu(q[token, head] . k[key]) + mask`."""
    (q, k, weights, mask) = t.sources
    qs, ks, ws, masks, y = lw.array(q), lw.f32(k)[:, :, 0], lw.array(weights)[:, 0], lw.f32(mask), lw.array(t)
    n_head, n_kv = q.ne[1], k.ne[2]
    pieces = list(cuts((q.ne[3], q.ne[2]), n_head * n_kv, N_SCORES))
    scratch = lw.scratch((max(n * m for (_, n), (_, m) in pieces), n_head, n_kv))

    def step(q: Array, k: Array, w: Array, mask: Array, y: Array, scores: Array) -> None:
        np.matmul(q, k[:, None].swapaxes(-1, -2), out=scores)
        np.fmax(scores, 0, out=scores)  # 0 of NaN, as in ggml
        np.matmul(w[..., None, :], scores, out=y[..., None, :])
        np.add(y, mask, out=y)

    for (i, n), (j, m) in pieces:
        scores = scratch[: n * m].reshape(n, m, n_head, n_kv)
        here = slice(i, i + n), slice(j, j + m)
        lw.emit(step, qs[here], ks[here[0]], ws[here], masks[:, 0][here], y[:, 0][here], scores)


@RULES.rule(Op.DSV4_HC_PRE, operands(F32, F32, out=F32))
def hc_pre(lw: CpuLowering, t: Tensor) -> None:
    """`y[token] = sum over streams of w[token, stream] x[token, stream]`."""
    x, w = (lw.array(s) for s in t.sources)
    lw.emit(np.matmul, w[0, 0, :, None], x[0], out=lw.array(t)[0, 0, :, None])


@RULES.rule(Op.DSV4_HC_POST, operands(F32, F32, F32, F32, out=F32))
def hc_post(lw: CpuLowering, t: Tensor) -> None:
    """`y[token, j] = post[token, j] x[token] + sum_i comb[token, i, j] residual[token, i]`."""
    x, residual, post, comb = (lw.array(s) for s in t.sources)
    y, tmp = lw.array(t)[0], lw.scratch(residual.shape[1:])

    def step() -> None:
        np.matmul(comb[0].swapaxes(-1, -2), residual[0], out=y)
        np.multiply(x[0, 0, :, None], post[0, 0, :, :, None], out=tmp)
        np.add(y, tmp, out=y)

    lw.emit(step)


@RULES.rule(Op.DSV4_HC_COMB, operands(F32, F32, F32, out=F32))
def hc_comb(lw: CpuLowering, t: Tensor) -> None:
    """soft_max of each row, plus eps; then columns and rows in turn are divided by their sums (Sinkhorn).

    The matrices are the last part of `mixes scale[2] + base`; they end with columns that sum to 1.
    """
    eps = t.params["eps"]
    mixes, scale, base = (lw.array(s)[0, 0] for s in t.sources)
    y, hc = lw.array(t)[0], t.ne[0]
    z = lw.scratch(y.shape)
    mix, bias = (x[..., 2 * hc :].reshape(-1, hc, hc) for x in (mixes, base))

    def normalise(axis: int) -> None:
        np.divide(y, y.sum(axis=axis, keepdims=True) + eps, out=y)

    def step() -> None:
        np.multiply(mix, scale[0, 2], out=z)
        np.add(z, bias, out=z)
        soft_max_rows(y, z, z)
        np.add(y, eps, out=y)
        normalise(-2)
        for _ in range(t.params["n_iter"] - 1):
            normalise(-1)
            normalise(-2)

    lw.emit(step)
