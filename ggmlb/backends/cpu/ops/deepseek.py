"""Fused parts of DeepSeek V3.2 and V4: the lightning indexer and the hyper-connections."""

from __future__ import annotations

import numpy as np

from ggmlb.backends.common.rules import F32, FLOATS, operands
from ggmlb.backends.common.workspace import Array
from ggmlb.backends.cpu.lowering import RULES, VALUES, NodeLowering
from ggmlb.backends.cpu.ops.elementwise import sigmoid
from ggmlb.backends.cpu.ops.softmax import soft_max_rows
from ggmlb.backends.cpu.views import cuts
from ggmlb.core.enums import Op
from ggmlb.core.tensor import Tensor

N_SCORES = 1 << 20
"""Number of scores, over all heads, in scratch at a time."""


@RULES.rule(Op.LIGHTNING_INDEXER, operands(F32, VALUES, F32, FLOATS, out=F32))
def lightning_indexer(lw: NodeLowering, t: Tensor) -> None:
    """`y[token, key] = sum over heads of weight[token, head] relu(q[token, head] . k[key]) + mask`."""
    (q, k, weights, mask) = t.sources
    qs, ks, ws, masks, y = (lw.f32(lw.view(x)) for x in (q, k, weights, mask, t))
    n_head, n_kv = q.ne[1], k.ne[2]
    pieces = list(cuts((q.ne[3], q.ne[2]), n_head * n_kv, N_SCORES))
    scratch = lw.scratch((max(n * m for (_, n), (_, m) in pieces), n_head, n_kv))

    def kernel(q: Array, k: Array, w: Array, mask: Array, y: Array, scores: Array) -> None:
        np.matmul(q, k[:, None].swapaxes(-1, -2), out=scores)
        np.fmax(scores, 0, out=scores)  # 0 of NaN, as in ggml
        np.matmul(w[..., None, :], scores, out=y[..., None, :])
        np.add(y, mask, out=y)

    for (i, n), (j, m) in pieces:
        scores = scratch.first((n, m, n_head, n_kv))
        here = slice(i, i + n), slice(j, j + m)
        lw.emit(kernel, qs[here], ks[here[0], :, 0], ws[:, 0][here], masks[:, 0][here], y[:, 0][here], scores)


@RULES.rule(Op.DSV4_HC_PRE, operands(F32, F32, out=F32))
def hc_pre(lw: NodeLowering, t: Tensor) -> None:
    """`y[token] = sum over streams of w[token, stream] x[token, stream]`, or `scale x sigmoid(gate)`."""
    x, w = (lw.view(s) for s in t.sources)
    y, scale = lw.view(t)[0, 0], np.float32(t.params["scale"])
    if not t.params["gated"]:
        lw.emit(np.matmul, w[0, 0, :, None], x[0], y[:, None])
        return

    def kernel(x: Array, gate: Array, y: Array, tmp: Array) -> None:
        sigmoid(tmp, gate)
        np.multiply(tmp, x, out=tmp)
        np.add.reduce(tmp, axis=1, out=y)
        np.multiply(y, scale, out=y)

    lw.emit(kernel, x[0], w[0], y, lw.scratch(t.operand(0).ne[2::-1]))


@RULES.rule(Op.DSV4_HC_POST, operands(F32, F32, F32, F32, out=F32))
def hc_post(lw: NodeLowering, t: Tensor) -> None:
    """`y[token, j] = post[token, j] x[token] + sum_i comb[token, i, j] residual[token, i]`."""
    x, residual, post, *comb = (lw.view(s)[0] for s in t.sources)

    def kernel(y: Array, x: Array, residual: Array, post: Array, tmp: Array, *comb: Array) -> None:
        mixed = np.matmul(comb[0].swapaxes(-1, -2), residual, out=y) if comb else residual
        np.multiply(x[0, :, None], post[0, :, :, None], out=tmp)
        np.add(mixed, tmp, out=y)

    lw.emit(kernel, lw.view(t)[0], x, residual, post, lw.scratch(residual.shape), *comb)


@RULES.rule(Op.DSV4_HC_COMB, operands(F32, F32, F32, out=F32))
def hc_comb(lw: NodeLowering, t: Tensor) -> None:
    """soft_max of each row, plus eps; then columns and rows in turn are divided by their sums (Sinkhorn).

    The matrices are the last part of `mixes scale[2] + base`; they end with columns that sum to 1.
    """
    eps, n_iter, hc = t.params["eps"], t.params["n_iter"], t.ne[0]
    mixes, scale, base = (lw.view(s)[0, 0] for s in t.sources)
    mix, bias = (x[..., 2 * hc :].reshape(-1, hc, hc) for x in (mixes, base))

    def normalise(y: Array, axis: int) -> None:
        np.divide(y, y.sum(axis=axis, keepdims=True) + eps, out=y)

    def kernel(y: Array, mix: Array, scale: Array, bias: Array, z: Array) -> None:
        np.multiply(mix, scale[0, 2], out=z)
        np.add(z, bias, out=z)
        soft_max_rows(y, z, z)
        np.add(y, eps, out=y)
        normalise(y, -2)
        for _ in range(n_iter - 1):
            normalise(y, -1)
            normalise(y, -2)

    y = lw.view(t)[0]
    lw.emit(kernel, y, mix, scale, bias, lw.scratch(y.shape))
