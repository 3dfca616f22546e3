"""What golden programs and the differential test cannot tell of the array rules.

They cannot hold what ggml gets wrong, aborts on, or leaves undefined: other types, batches, empty tensors,
and what depends on limits.
"""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
import pytest

from ggmlb.backends.common.kinds import Kinds
from ggmlb.backends.cpu import backend_reg
from ggmlb.backends.cpu.ops import conv, deepseek
from ggmlb.core.context import Context
from ggmlb.core.dtypes import DType
from ggmlb.core.enums import OpPool, ScaleFlag, ScaleMode
from ggmlb.core.errors import BackendError
from ggmlb.core.graph import Graph
from ggmlb.runtime.alloc import alloc_ctx_tensors
from tests.support.array_program import Program, close

F32, F16, BF16, I32 = DType.F32, DType.F16, DType.BF16, DType.I32


# -- convolution -----------------------------------------------------------------------------------


def correlate(data, kernel, stride, padding, dilation):
    """`[N, IC, ..]` with `[OC, IC, ..]`, one place after another."""
    data = np.pad(data, [(0, 0), (0, 0), *((p, p) for p in padding)])
    taps = kernel.shape[2:]
    ways = zip(data.shape[2:], taps, stride, dilation, strict=True)
    places = [(n - d * (k - 1) - 1) // s + 1 for n, k, s, d in ways]
    y = np.zeros((len(data), len(kernel), *places))
    for place in itertools.product(*map(range, places)):
        first = [i * s for i, s in zip(place, stride, strict=True)]
        here = tuple(slice(f, f + d * (k - 1) + 1, d) for f, k, d in zip(first, taps, dilation, strict=True))
        met = data[(slice(None), slice(None), *here)].reshape(len(data), -1)
        y[(slice(None), slice(None), *place)] = met @ kernel.reshape(len(kernel), -1).T
    return y


@pytest.mark.parametrize("items", [1, 200, 1 << 20])
def test_convolutions_are_cut_into_patches_that_fit(cpu, monkeypatch, items):
    monkeypatch.setattr(conv, "N_PATCH_ITEMS", items)
    monkeypatch.setattr(cpu.device, "kinds", Kinds())
    p = Program()
    a, b = p.leaf((3, 2, 3, 4)), p.leaf((9, 8, 3, 2))
    plane = p.ctx.conv_2d_direct(a, b, 2, 1, 1, 0, 1, 2)
    k, x = p.leaf((2, 3, 2, 2 * 3)), p.leaf((5, 6, 4, 2 * 2))
    space = p.ctx.conv_3d_direct(k, x, 1, 2, 1, 1, 0, 1, 2, 1, 1, 2, 2, 3)
    got_plane, got_space = p.compute(cpu, plane, space)
    close(got_plane, correlate(p.array(b), p.array(a), (1, 2), (0, 1), (2, 1)))
    kernel = p.array(k).reshape(3, 2, 2, 3, 2)
    expected = correlate(p.array(x).reshape(2, 2, 4, 6, 5), kernel, (1, 2, 1), (1, 0, 1), (1, 1, 2))
    close(got_space, expected.reshape(got_space.shape))


def test_a_batch_of_conv_1d_is_in_order(cpu):
    p = Program()
    a, b = p.leaf((3, 2, 5), F16), p.leaf((11, 2, 3))
    got = p.compute(cpu, p.ctx.conv_1d(a, b, 2, 1, 1))
    kernel = p.array(a)[0].astype(np.float16).astype(np.float32)
    close(got[0], correlate(p.array(b)[0], kernel, (2,), (1,), (1,)), 1e-3)


def test_a_batch_of_conv_transpose_2d_is_computed_whole(cpu):
    p = Program()
    a, b = p.leaf((2, 3, 4, 2)), p.leaf((5, 4, 2, 3))
    got = p.compute(cpu, p.ctx.conv_transpose_2d_p0(a, b, 2))
    expected = np.zeros(got.shape)
    for i, j in itertools.product(range(4), range(5)):
        spread = np.einsum("nc,cohw->nohw", p.array(b)[:, :, i, j], p.array(a))
        expected[:, :, 2 * i : 2 * i + 3, 2 * j : 2 * j + 2] += spread
    close(got, expected)


# -- other rules with limits -----------------------------------------------------------------------


@pytest.mark.parametrize("n_scores", [1, 100, 1 << 20])
@pytest.mark.parametrize("dtype", [F32, F16, DType.Q8_0])
def test_the_lightning_indexer_scores_in_pieces(cpu, monkeypatch, n_scores, dtype):
    monkeypatch.setattr(deepseek, "N_SCORES", n_scores)
    monkeypatch.setattr(cpu.device, "kinds", Kinds())
    p, (d, h, n_q, n_kv, n) = Program(), (32, 3, 5, 7, 2)
    q, k = p.leaf((d, h, n_q, n)), p.leaf((d, 1, n_kv, n), dtype)
    w, mask = p.leaf((h, n_q, 1, n)), p.leaf((n_kv, n_q, 1, n), F16)
    got = p.compute(cpu, p.ctx.lightning_indexer(q, k, w, mask))
    scores = np.maximum(np.einsum("nqhd,nkd->nqhk", p.array(q), p.array(k)[:, :, 0]), 0)
    expected = np.einsum("nqhk,nqh->nqk", scores, p.array(w)[:, 0])[:, None]
    expected = expected + p.array(mask).astype(np.float16)
    close(got, expected, 1e-6 if dtype is F32 else 2e-2)


def test_a_maximum_over_nothing_but_padding_is_the_lowest_number(cpu):
    p = Program()
    got = p.compute(cpu, p.ctx.pool_1d(p.leaf((3,)), OpPool.MAX, 2, 1, 3))
    assert got[0, 0, 0, 0] == got[0, 0, 0, -1] == np.finfo(np.float32).min


def test_the_first_of_equal_peaks_takes_the_gradient(cpu):
    p = Program()
    grad, data = p.leaf((2, 1)), p.leaf((4, 2), values=np.ones((2, 4)))
    got = p.compute(cpu, p.ctx.pool_2d_back(grad, data, OpPool.MAX, 2, 2, 2, 2))
    g = p.array(grad)[0, 0, 0]
    np.testing.assert_array_equal(got[0, 0], [[g[0], 0, g[1], 0], [0] * 4])


@pytest.mark.parametrize("n", [1, 2, 5])
def test_circular_padding_goes_round_more_than_once(cpu, n):
    p = Program()
    a = p.leaf((n, 2))
    got = p.compute(cpu, p.ctx.pad_ext_circular(a, 7, 6, 1, 4))
    np.testing.assert_array_equal(got[0, 0], np.pad(p.array(a)[0, 0], [(1, 4), (7, 6)], mode="wrap"))


@pytest.mark.parametrize("mode", [*ScaleMode, ScaleMode.BILINEAR | ScaleFlag.ANTIALIAS])
def test_resampling_to_the_same_size_changes_nothing(cpu, mode):
    p = Program()
    a = p.leaf((5, 4, 2, 2))
    p.array(a)[0, 0, 0, 0] = np.inf
    np.testing.assert_array_equal(p.compute(cpu, p.ctx.interpolate(a, 5, 4, 2, 2, mode)), p.array(a))


@pytest.mark.parametrize(
    "build",
    [
        lambda p, bad: p.ctx.add_id(p.leaf((4, 1, 1)), p.leaf((4, 3)), p.leaf((1, 1), I32, [bad])),
        lambda p, bad: p.ctx.get_rows_back(p.leaf((4, 1)), p.leaf((1,), I32, [bad]), p.leaf((4, 3))),
    ],
    ids=["add_id", "get_rows_back"],
)
@pytest.mark.parametrize("bad", [-1, 3])
def test_row_numbers_are_checked(cpu, build, bad):
    p = Program()
    with pytest.raises(BackendError, match="3 rows"):
        p.compute(cpu, build(p, bad))


# -- types that ggml does not take -----------------------------------------------------------------

SHORT = {F16: np.dtype(np.float16), BF16: np.dtype(ml_dtypes.bfloat16)}


def chosen_bias(p, t):
    return p.ctx.add_id(p.leaf((5, 2, 3), t), p.leaf((5, 4), t), p.leaf((2, 3), I32, [[0, 3]] * 3))


def window(p, t):
    return p.ctx.set_2d(p.leaf((6, 4), t), p.leaf((3, 2), t), 6 * t.type_size, 7 * t.type_size)


def image(p, t):
    return p.leaf((6, 5, 2, 2), t)


WIDER = {
    "add_id": chosen_bias,
    "diag": lambda p, t: p.ctx.diag(p.leaf((4, 1, 2), t)),
    "diag_mask_inf": lambda p, t: p.ctx.diag_mask_inf(p.leaf((5, 4, 2), t), 1),
    "pad": lambda p, t: p.ctx.pad(image(p, t), 1, 2, 0, 1),
    "pad_circular": lambda p, t: p.ctx.pad_circular(image(p, t), 1, 2),
    "roll": lambda p, t: p.ctx.roll(image(p, t), 2, -1),
    "set": window,
    "silu_back": lambda p, t: p.ctx.silu_back(image(p, t), image(p, t)),
    "rms_norm_back": lambda p, t: p.ctx.rms_norm_back(image(p, t), image(p, t), 1e-5),
    "im2col": lambda p, t: p.ctx.im2col(p.leaf((3, 2, 2, 1), t), image(p, t), 1, 1, 1, 0, 1, 1, True, t),
    "conv_2d_direct": lambda p, t: p.ctx.conv_2d_direct(p.leaf((3, 2, 2, 3), t), image(p, t), 1, 1, 1, 1),
    "conv_2d_dw_direct": lambda p, t: p.ctx.conv_2d_dw_direct(p.leaf((3, 2, 1, 2), t), image(p, t)),
    "conv_transpose_1d": lambda p, t: p.ctx.conv_transpose_1d(p.leaf((3, 4, 2), t), p.leaf((6, 2), t), 2),
    "col2im_1d": lambda p, t: p.ctx.col2im_1d(p.leaf((6, 4), t), 2, 2, 1),
    "pool_2d": lambda p, t: p.ctx.pool_2d(image(p, t), OpPool.MAX, 2, 2, 1, 2, 1, 0),
    "pool_2d_back": lambda p, t: p.ctx.pool_2d_back(
        p.leaf((3, 2, 2, 2), t), image(p, t), OpPool.AVG, 2, 2, 2, 2
    ),
    "get_rel_pos": lambda p, t: p.ctx.get_rel_pos(p.leaf((4, 5), t), 3, 3),
    "cross_entropy_loss": lambda p, t: p.ctx.cross_entropy_loss(image(p, t), image(p, t)),
    "ssm_conv": lambda p, t: p.ctx.ssm_conv(p.leaf((6, 3, 2), t), p.leaf((3, 3), t)),
}


@pytest.mark.parametrize("name", WIDER)
@pytest.mark.parametrize("dtype", SHORT, ids=lambda t: t.name)
def test_short_floats_give_what_their_values_give_as_float32(cpu, name, dtype):
    short, full = Program(), Program()
    results = [WIDER[name](p, t) for p, t in ((short, dtype), (full, F32))]
    for s, f in zip(short.values, full.values, strict=True):
        if s.dtype is dtype:
            full.values[f] = short.values[s].astype(SHORT[dtype]).astype(np.float32)
    got, expected = short.compute(cpu, results[0]), full.compute(cpu, results[1])
    if results[0].dtype in SHORT:
        expected = expected.astype(SHORT[results[0].dtype])
    np.testing.assert_allclose(got.astype(np.float32), expected.astype(np.float32), rtol=2**-7, atol=1e-6)


# -- empty tensors ---------------------------------------------------------------------------------


def no_bias(p):
    return p.ctx.add_id(p.leaf((4, 2, 0)), p.leaf((4, 3)), p.leaf((2, 0), I32, np.zeros(0, np.int32)))


def no_patches(p):
    return p.ctx.im2col(p.leaf((3, 3, 0)), p.leaf((5, 5, 0)), 1, 1, 1, 1, 1, 1, True, F32)


EMPTY = {
    "acc": lambda p: p.ctx.acc(p.leaf((4, 3)), p.leaf((2, 0)), 16, 48, 48, 0),
    "add_id": no_bias,
    "pad of nothing": lambda p: p.ctx.pad(p.leaf((0, 3)), 2, 1),
    "im2col without channels": no_patches,
    "conv without channels": lambda p: p.ctx.conv_2d_direct(p.leaf((3, 3, 0, 2)), p.leaf((5, 5, 0))),
    "conv of no image": lambda p: p.ctx.conv_2d_direct(p.leaf((3, 3, 1, 2)), p.leaf((5, 5, 1, 0))),
    "transposed conv of nothing": lambda p: p.ctx.conv_transpose_1d(p.leaf((3, 2, 0)), p.leaf((4, 0))),
    "pool of no channel": lambda p: p.ctx.pool_2d(p.leaf((4, 4, 0)), OpPool.AVG, 2, 2, 2, 2),
    "upscale of no image": lambda p: p.ctx.upscale(p.leaf((4, 4, 1, 0)), 2),
    "ssm_conv of no token": lambda p: p.ctx.ssm_conv(p.leaf((2, 4, 1)), p.leaf((3, 4))),
    "ssm_conv of no tap": lambda p: p.ctx.ssm_conv(p.leaf((2, 4, 1)), p.leaf((0, 4))),
    "win_part of no channel": lambda p: p.ctx.win_part(p.leaf((0, 5, 5)), 2),
    "solve_tri of no column": lambda p: p.ctx.solve_tri(p.leaf((3, 3)), p.leaf((0, 3))),
    "timestep_embedding of no step": lambda p: p.ctx.timestep_embedding(p.leaf((0,)), 4),
}


@pytest.mark.parametrize("name", EMPTY)
def test_nothing_is_made_of_nothing(cpu, name):
    p = Program()
    result = EMPTY[name](p)
    got = p.compute(cpu, result)
    kept = p.array(result.src[0]) if name == "acc" else np.zeros(got.shape)
    np.testing.assert_array_equal(got, kept)


@pytest.mark.parametrize(
    "build",
    [
        lambda ctx, rows: ctx.pad_circular(rows, 2),
        lambda ctx, rows: ctx.argmax(rows),
        lambda ctx, rows: ctx.cross_entropy_loss(rows, rows),
    ],
    ids=["pad_circular", "argmax", "cross_entropy_loss"],
)
def test_what_does_not_follow_from_nothing_is_declined(build):
    ctx = Context()
    node = build(ctx, ctx.new_tensor(F32, (0, 3)))
    assert backend_reg().devices[0].declines(node) == "src0 has no elements"


@pytest.mark.parametrize("scale", [1.0, 0.5])
@pytest.mark.parametrize("max_bias", [0.0, 8.0])
def test_soft_max_in_place_is_that_of_another_result(cpu, scale, max_bias):
    x, mask = np.float32([[1, 2, -1]]), np.float32([[0.5, -0.25, 0]])
    found = []
    for name in ("soft_max_ext", "soft_max_ext_inplace"):
        ctx = Context()
        a, m = ctx.new_tensor("f32", (3, 1)), ctx.new_tensor("f32", (3, 1))
        y = getattr(ctx, name)(a, m, scale, max_bias)
        with alloc_ctx_tensors(ctx, cpu):
            a.set_array(x)
            m.set_array(mask)
            cpu.graph_compute(Graph().build_forward_expand(y))
            found.append(y.to_numpy())
    np.testing.assert_array_equal(*found)
