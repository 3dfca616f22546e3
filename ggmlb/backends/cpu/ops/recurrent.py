"""Recurrent layers: RWKV, gated linear attention, delta nets and state space models.

The result contains the outputs of all tokens, then the states. Time is the first axis of all views here:
a loop over tokens computes all sequences and heads at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np

from ggmlb.backends.common.rules import F32, FLOATS, I32, operands
from ggmlb.backends.common.workspace import Array
from ggmlb.backends.cpu.kernels import take_rows
from ggmlb.backends.cpu.lowering import RULES, NodeLowering
from ggmlb.backends.cpu.ops.conv import sum_of_products
from ggmlb.backends.cpu.ops.elementwise import softplus
from ggmlb.backends.cpu.views import View
from ggmlb.core.enums import Op
from ggmlb.core.tensor import Tensor


def unpacked(
    lw: NodeLowering, t: Tensor, outputs: tuple[int, ...], states: tuple[int, ...]
) -> tuple[View, View]:
    """Return two views of the result `t`: its first elements as `outputs` (a shape), the rest as `states`."""
    flat, n = lw.view(t).reshape(-1), prod(outputs)
    return flat[:n].reshape(*outputs), flat[n:].reshape(*states)


def scan(
    lw: NodeLowering,
    first: View,
    states: View,
    advance: Callable[..., Any],
    tokens: Sequence[View],
    held: Sequence[View] = (),
) -> None:
    """Emit, for each token in turn, `advance(new state, old, *token, *held)`; `held` is common to all tokens.

    Threads share the sequences or the heads. All arrays have the dimensions of sequences and heads in
    common, or 1 in place of them.

    Args:
        lw: Collects the steps.
        first: The state before the first token: `[sequences, heads.., rows, columns]`.
        states: Memory for the last states, the newest first; if there are fewer tokens, the first state
            fills the rest.
        advance: Fills `new`, which may be the memory of `old`.
        tokens: Operands and outputs, one per token along the first axis.
        held: Operands that do not change in time, and scratch.
    """
    n, kept, n_tokens = tokens[0].shape[0], states.shape[0], len(tokens)
    work = lw.scratch(first.shape) if n > kept else first

    def run(first: Array, states: Array, work: Array, *more: Array) -> None:
        old = first
        for i in range(n):
            new = states[n - 1 - i] if n - 1 - i < kept else work
            advance(new, old, *[x[i] for x in more[:n_tokens]], *more[n_tokens:])
            old = new
        states[n:] = first

    shared, n_items = first.shape[:-2], prod(first.shape)
    axis = shared.index(max(shared))
    n_workers = min(shared[axis], lw.workers(n * n_items, n_items))
    bounds = [i * shared[axis] // n_workers for i in range(n_workers + 1)]
    arrays = [(first, axis), (states, axis + 1), (work, axis)]
    arrays += [*[(x, axis + 1) for x in tokens], *[(x, axis) for x in held]]
    lw.emit_parallel(
        [[(run, tuple([_part(x, at, slice(*ends)) for x, at in arrays]))] for ends in pairwise(bounds)]
    )


def _part(x: View, axis: int, here: slice) -> View:
    return x if x.shape[axis] == 1 else x[(slice(None),) * axis + (here,)]


def update(new: Array, old: Array, decay: Array, rows: Array, columns: Array, outer: Array) -> None:
    """Compute `new[i, j] = old[i, j] decay + rows[i] columns[j]`; `outer` is scratch for the product."""
    np.multiply(rows[..., None], columns[..., None, :], out=outer)
    np.multiply(old, decay, out=new)
    np.add(new, outer, out=new)


def _by_time(lw: NodeLowering, x: Tensor, n_seqs: int) -> View:
    """Vectors of heads `[S, H, all tokens]` as `[tokens, N, H, S]`."""
    s, h = x.ne[:2]
    return lw.f32(lw.view(x)).reshape(n_seqs, -1, h, s).swapaxes(0, 1)


def _linear(lw: NodeLowering, t: Tensor, state: Tensor, *x: Tensor) -> tuple[View, ...]:
    """Return outputs and operands by time, the first state, the last states (one), and scratch like it."""
    n, (s, h, n_tokens) = state.ne[1], x[0].ne[:3]
    shape = (n, h, s, s)
    y, last = unpacked(lw, t, (n, n_tokens // n, h, s), (1, *shape))
    return (
        y.swapaxes(0, 1),
        *(_by_time(lw, v, n) for v in x),
        lw.f32(lw.view(state)).reshape(*shape),
        last,
        lw.scratch(shape),
    )


@RULES.rule(Op.RWKV_WKV6, operands(*[FLOATS] * 6, out=F32))
def rwkv_wkv6(lw: NodeLowering, t: Tensor) -> None:
    """`y = (S + (k f) v) r`, then `S = d S + k v`, with the state `S[k, v]`, bonus `f` and decay `d`."""
    (k, v, r, f, d, state) = t.sources
    ys, ks, vs, rs, ds, first, last, outer = _linear(lw, t, state, k, v, r, d)
    faaaa = lw.f32(lw.view(f)).reshape(*ks.shape[2:])

    def of_the_tokens_themselves(y: Array, k: Array, v: Array, r: Array, faaaa: Array, bonus: Array) -> None:
        np.multiply(k, r, out=bonus)
        np.multiply(bonus, faaaa, out=bonus)
        np.multiply(bonus.sum(axis=-1, keepdims=True), v, out=y)

    def advance(
        new: Array, old: Array, k: Array, v: Array, r: Array, d: Array, y: Array, outer: Array, read: Array
    ) -> None:
        np.matmul(r[..., None, :], old, out=read)
        np.add(y, read[..., 0, :], out=y)
        update(new, old, d[..., None], k, v, outer)

    lw.emit(of_the_tokens_themselves, ys, ks, vs, rs, faaaa, lw.scratch(ks.shape))
    scan(
        lw,
        first,
        last,
        advance,
        (ks, vs, rs, ds, ys),
        (outer, lw.scratch((*outer.shape[:2], 1, outer.shape[3]))),
    )


@RULES.rule(Op.GATED_LINEAR_ATTN, operands(*[FLOATS] * 5, out=F32))
def gated_linear_attn(lw: NodeLowering, t: Tensor) -> None:
    """`S = g S + k v`, then `y = scale q S`, with the state `S[k, v]`."""
    scale, (k, v, q, g, state) = t.params["scale"], t.sources
    ys, ks, vs, qs, gs, first, last, outer = _linear(lw, t, state, k, v, q, g)

    def advance(
        new: Array, old: Array, k: Array, v: Array, q: Array, g: Array, y: Array, outer: Array
    ) -> None:
        update(new, old, g[..., None], k, v, outer)
        np.matmul(q[..., None, :], new, out=y[..., None, :])

    scan(lw, first, last, advance, (ks, vs, qs, gs, ys), (outer,))
    lw.emit(np.multiply, ys, scale, ys)


@RULES.rule(Op.RWKV_WKV7, operands(*[FLOATS] * 7, out=F32))
def rwkv_wkv7(lw: NodeLowering, t: Tensor) -> None:
    """`S = S w + v k + (S a) b`, then `y = S r`, with the state `S[v, k]`."""
    (*x, state) = t.sources
    ys, rs, ws, ks, vs, as_, bs, first, last, outer = _linear(lw, t, state, *x)

    def advance(
        new: Array, old: Array, r: Array, w: Array, k: Array, v: Array, a: Array, b: Array, y: Array,
        outer: Array, seen: Array,
    ) -> None:  # fmt: skip
        np.matmul(old, a[..., None], out=seen)
        update(new, old, w[..., None, :], v, k, outer)
        np.multiply(seen, b[..., None, :], out=outer)
        np.add(new, outer, out=new)
        np.matmul(new, r[..., None], out=y[..., None])

    seen = lw.scratch((*outer.shape[:3], 1))
    scan(lw, first, last, advance, (rs, ws, ks, vs, as_, bs, ys), (outer, seen))


@RULES.rule(Op.GATED_DELTA_NET, operands(*[F32] * 6, out=F32))
def gated_delta_net(lw: NodeLowering, t: Tensor) -> None:
    """`S = S exp(g)`, `S = S + beta (v - S k) k`, then `y = S q / sqrt(size)`, with the state `S[v, k]`.

    Head `h` takes the key and the query of head `h` modulo their number.
    """
    (q, k, v, g, beta, state) = t.sources
    s, h, n_tokens, n = v.ne
    heads = (h // k.ne[1], k.ne[1])
    y, states = unpacked(lw, t, (n, n_tokens, *heads, s), (t.params["k"], n, *heads, s, s))
    ys, vs, gs, betas = (
        x.reshape(n, n_tokens, *heads, x.shape[-1]).swapaxes(0, 1)
        for x in (y, *(lw.f32(lw.view(x)) for x in (v, g, beta)))
    )
    qs, ks = (lw.f32(lw.view(x)).swapaxes(0, 1)[:, :, None] for x in (q, k))
    first = lw.f32(lw.view(state)).reshape(*states.shape[1:])

    def advance(
        new: Array, old: Array, q: Array, k: Array, v: Array, g: Array, beta: Array, y: Array,
        outer: Array, delta: Array, decay: Array,
    ) -> None:  # fmt: skip
        np.exp(g, out=decay)
        np.multiply(old, decay[..., None, :], out=new)
        np.matmul(new, k[..., None], out=delta[..., None])
        np.subtract(v, delta, out=delta)
        np.multiply(delta, beta, out=delta)
        np.multiply(delta[..., None], k[..., None, :], out=outer)
        np.add(new, outer, out=new)
        np.matmul(new, q[..., None], out=y[..., None])

    held = [lw.scratch(x) for x in (first.shape, (n, *heads, s), gs.shape[1:])]
    scan(lw, first, states, advance, (qs, ks, vs, gs, betas, ys), held)
    lw.emit(np.multiply, ys, np.float32(s**-0.5), ys)


@RULES.rule(Op.SSM_CONV, operands(FLOATS, FLOATS, out=F32))
def ssm_conv(lw: NodeLowering, t: Tensor) -> None:
    """`y[seq, token, i] = sum over taps of x[seq, i, token + tap] c[i, tap]`."""
    if t.sources[1].is_empty:  # no taps
        lw.emit(np.ndarray.fill, lw.view(t), 0)
        return
    x, c = (lw.f32(lw.view(s)) for s in t.sources)
    y, (_, _, row, item), (_, _, c_row, c_item) = lw.view(t), x.strides, c.strides
    factors = []
    for tap in range(c.shape[3]):
        factors.append(x.reshaped(y.shape, (*x.strides[:2], item, row), tap * item))
        factors.append(c.reshaped(y.shape, (0, 0, 0, c_row), tap * c_item))
    lw.tiled(sum_of_products, y, *factors, scratch=1, work=len(factors))


@RULES.rule(Op.SSM_SCAN, operands(*[F32] * 6, I32, out=F32))
def ssm_scan(lw: NodeLowering, t: Tensor) -> None:
    """`S = S exp(dt A) + (x dt) B`, then `y = S C`, with `dt` through softplus and the state `S[x, B]`.

    Consecutive heads share a group's `B` and `C`.
    """
    (state, x, dt, a, b, c, ids) = t.sources
    dim, h, n_tokens, n = x.ne
    heads = (b.ne[1], h // b.ne[1])
    size = (*heads, dim, state.ne[0])
    y, states = unpacked(lw, t, (n, n_tokens, *heads, dim), (t.params["k"], n, *size))
    ys, xs = (v.reshape(n, n_tokens, *heads, dim).swapaxes(0, 1) for v in (y, lw.view(x)))
    dts = lw.view(dt)[0].reshape(n, n_tokens, *heads).swapaxes(0, 1)[..., None]
    bs, cs = (lw.view(v).swapaxes(0, 1)[..., None, :] for v in (b, c))
    rate = lw.view(a)[0, 0].reshape(1, *heads, -1)
    first = lw.scratch((n, *size))
    by_state = lw.view(state).reshape(1, 1, state.ne[3], -1)
    lw.emit(take_rows, first.reshape(1, 1, n, -1), by_state, lw.view(ids)[:1, :1, 0])
    times, inputs, tmp = lw.scratch(dts.shape), lw.scratch(xs.shape), lw.scratch(dts.shape)

    def all_inputs(times: Array, inputs: Array, dts: Array, xs: Array, tmp: Array) -> None:
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

    lw.emit(all_inputs, times, inputs, dts, xs, tmp)
    held = (rate, lw.scratch((n, *rate.shape[1:])), lw.scratch(first.shape))
    scan(lw, first, states, advance, (times, inputs, bs, cs, ys), held)
