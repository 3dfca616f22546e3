"""Recurrences against loops over tokens and heads, where golden programs and ggml do not reach."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from ggmlb.core.dtypes import DType
from tests.support.array_program import Program, close

I32 = DType.I32


def states_of(flat, n_outputs, kept, shape):
    return flat.reshape(-1)[n_outputs:].reshape(kept, *shape)


def delta_net(q, k, v, g, beta, first):
    """One token after another, one head after another: outputs, and the state after each token."""
    n, tokens, heads, s = v.shape
    state, outputs, states = first.astype(np.float64), np.zeros(v.shape), []
    for t in range(tokens):
        state = state.copy()
        for i, h in itertools.product(range(n), range(heads)):
            query, key = (x[i, t, h % x.shape[2]] for x in (q, k))
            m = state[i, h] * np.exp(g[i, t, h])
            m += np.outer((v[i, t, h] - m @ key) * beta[i, t, h], key)
            outputs[i, t, h] = m @ query / np.sqrt(s)
            state[i, h] = m
        states.append(state)
    return outputs, states


@pytest.mark.parametrize("kept", [1, 2, 3, 5])
def test_states_from_before_the_first_token_are_the_first_state(cpu, kept):
    p, (s, h, tokens, n) = Program(), (4, 2, 3, 2)
    q, k = (p.leaf((s, 1, tokens, n), low=-0.5, high=0.5) for _ in range(2))
    v, g = p.leaf((s, h, tokens, n)), p.leaf((1, h, tokens, n), low=-1, high=0)
    beta, first = p.leaf((1, h, tokens, n), low=0, high=1), p.leaf((s, s, h, n))
    got = p.compute(cpu, p.ctx.gated_delta_net(q, k, v, g, beta, first, kept))
    outputs, states = delta_net(*(p.array(x) for x in (q, k, v, g, beta, first)))
    newest_first = [*states[::-1], *[p.array(first)] * 9][:kept]
    close(got.reshape(-1)[: outputs.size].reshape(outputs.shape), outputs)
    close(states_of(got, outputs.size, kept, (n, h, s, s)), np.stack(newest_first))


@pytest.mark.parametrize("kept", [1, 4])
def test_a_selective_scan_keeps_states(cpu, kept):
    p, (d_state, dim, h, tokens, n) = Program(), (3, 2, 4, 2, 2)
    s, x = p.leaf((d_state, dim, h, n + 1)), p.leaf((dim, h, tokens, n))
    dt, a = p.leaf((h, tokens, n)), p.leaf((d_state, h), low=-2, high=-0.1)
    b, c = (p.leaf((d_state, 2, tokens, n)) for _ in range(2))
    ids = p.leaf((n,), I32, [2, 0])
    got = p.compute(cpu, p.ctx.ssm_scan(s, x, dt, a, b, c, ids, kept)).reshape(-1)
    state = p.array(s)[[2, 0]].astype(np.float64)
    states, outputs = [state], []
    for t in range(tokens):
        step = np.log1p(np.exp(p.array(dt)[0, :, t]))[:, :, None, None]
        group = [0, 0, 1, 1]
        bs, cs = (p.array(v)[:, t, group][:, :, None] for v in (b, c))
        state = state * np.exp(step * p.array(a)[0, 0][:, None]) + p.array(x)[:, t, :, :, None] * step * bs
        states.insert(0, state)
        outputs.append((state * cs).sum(-1))
    expected = np.stack(outputs, axis=1)
    close(got[: expected.size].reshape(expected.shape), expected)
    newest_first = np.stack((states + states[-1:] * 9)[:kept])
    close(states_of(got, expected.size, kept, (n, h, dim, d_state)), newest_first)


@pytest.mark.parametrize("s", [1, 5, 64])
def test_rwkv7_takes_heads_of_any_size(cpu, s):
    p, (h, tokens, n) = Program(), (2, 3, 2)
    r, w, k, v, a, b = (p.leaf((s, h, n * tokens), low=-0.4, high=0.4) for _ in range(6))
    first = p.leaf((s * s * h, n))
    got = p.compute(cpu, p.ctx.rwkv_wkv7(r, w, k, v, a, b, first)).reshape(-1)
    xs = [p.array(x).reshape(n, tokens, h, s).astype(np.float64) for x in (r, w, k, v, a, b)]
    state = p.array(first).reshape(n, h, s, s).astype(np.float64)
    expected = np.zeros((n, tokens, h, s))
    for t in range(tokens):
        rt, wt, kt, vt, at, bt = (x[:, t] for x in xs)
        seen = np.einsum("nhij,nhj->nhi", state, at)
        state = state * wt[:, :, None] + np.einsum("nhi,nhj->nhij", vt, kt)
        state += np.einsum("nhi,nhj->nhij", seen, bt)
        expected[:, t] = np.einsum("nhij,nhj->nhi", state, rt)
    close(got[: expected.size].reshape(expected.shape), expected)
    close(got[expected.size :].reshape(state.shape), state)


def test_no_token_leaves_the_state(cpu):
    p, (s, h, n) = Program(), (4, 2, 3)
    q, k, v = (p.leaf((s, h, 0, n)) for _ in range(3))
    first = p.leaf((s, s, h, n))
    node = p.ctx.gated_delta_net(q, k, v, p.leaf((1, h, 0, n)), p.leaf((1, h, 0, n)), first, 2)
    np.testing.assert_array_equal(p.compute(cpu, node).reshape(2, -1), [p.array(first).reshape(-1)] * 2)
