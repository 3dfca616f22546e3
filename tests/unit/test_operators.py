"""Operators of tensors compute what NumPy does with the same values, shapes and indices."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

import ggmlb
from ggmlb import ArgumentError, BoundsError, Context, GraphError, ShapeError, Tensor, evaluate

RNG = np.random.default_rng(0)
A = RNG.standard_normal((3, 4, 6)).astype(np.float32)
M = RNG.standard_normal((4, 6)).astype(np.float32)
W = RNG.standard_normal((5, 6)).astype(np.float32)
COLUMN = RNG.standard_normal((4, 1)).astype(np.float32)
V = RNG.uniform(1, 2, 6).astype(np.float32)


def evaluated(tensor: Tensor) -> np.ndarray:
    assert tensor.context is not None
    return evaluate(tensor.context.cont(tensor))


@pytest.mark.parametrize(
    "expression",
    [
        lambda a, m, w, c, v: a + a,
        lambda a, m, w, c, v: a - v,
        lambda a, m, w, c, v: v - a,
        lambda a, m, w, c, v: v * a,
        lambda a, m, w, c, v: c / v,
        lambda a, m, w, c, v: m / c,
        lambda a, m, w, c, v: 2 * a - 1,
        lambda a, m, w, c, v: 1 - a / 3,
        lambda a, m, w, c, v: 2 / v + 1,
        lambda a, m, w, c, v: np.float32(2) * -a + np.int64(3),
        lambda a, m, w, c, v: m @ w.T,
        lambda a, m, w, c, v: a @ w.T,
        lambda a, m, w, c, v: a[0].T @ m,
        lambda a, m, w, c, v: m @ v,
        lambda a, m, w, c, v: v @ w.T,
        lambda a, m, w, c, v: a.T,
        lambda a, m, w, c, v: v.T,
        lambda a, m, w, c, v: a.reshape(4, -1),
        lambda a, m, w, c, v: a.T.reshape((8, 9)),
        lambda a, m, w, c, v: a[1:3, :, ::2],
        lambda a, m, w, c, v: a[..., None, 1] + a[:, :, :1],
        lambda a, m, w, c, v: np.float32(len(a)) + v,
        lambda a, m, w, c, v: a**2 + a**3 - a**7 + a**0 * a**1,
        lambda a, m, w, c, v: v**0.5 + v**-0.5 + v**-2,
        lambda a, m, w, c, v: (a > 0.5) + (m < v) * 2.0,
        lambda a, m, w, c, v: (a < 0.5) * (c < m) * 1.0,
        lambda a, m, w, c, v: a.transpose(1, 2, 0) + a.transpose((-2, -1, 0)),
        lambda a, m, w, c, v: a.transpose() + a.T,
    ],
)
def test_as_numpy(expression: Callable[..., Any]) -> None:
    ctx = Context()
    expected = expression(A, M, W, COLUMN, V)
    found = evaluated(expression(*map(ctx.from_array, (A, M, W, COLUMN, V))))
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("device", ["CPU", "LLVM"])
@pytest.mark.parametrize("shape", [(5,), (4, 6), (3, 4, 6), (2, 3, 4, 5)])
def test_sums_and_means_as_numpy(shape: tuple[int, ...], device: str) -> None:
    values = RNG.standard_normal(shape).astype(np.float32)
    n = len(shape)
    subsets = [axes for k in range(n + 1) for axes in itertools.combinations(range(n), k)]
    ctx, expected, tensors = Context(), [], []
    a = ctx.from_array(values)
    for axis in [None, -1, *subsets]:
        for keepdims in (False, True):
            for name in ("sum", "mean"):
                tensors.append(getattr(a, name)(axis=axis, keepdims=keepdims))
                expected.append(getattr(values, name)(axis=axis, keepdims=keepdims))
    expected.append(values.T.sum(0))
    tensors.append(a.T.sum(0))
    for y, found, want in zip(tensors, evaluate(tensors, devices=device), expected, strict=True):
        dropped = want.reshape(-1) if want.size == 1 else want
        while dropped.ndim > 1 and dropped.shape[0] == 1:
            dropped = dropped[0]
        assert y.shape == dropped.shape
        np.testing.assert_allclose(found, dropped, rtol=1e-5, atol=1e-5)


def test_equality_stays_identity() -> None:
    ctx = Context()
    a, b = ctx.from_array(M), ctx.from_array(M)
    assert a == a and (a != b) is True and len({a, b, a}) == 2


@given(st.data())
def test_indices_as_numpy(data: st.DataObject) -> None:
    shape = data.draw(arrays.array_shapes(min_dims=1, max_dims=4, max_side=5))
    shape = (shape[0] + 1, *shape[1:])  # a tensor's shape has no leading 1
    values = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    key = data.draw(arrays.basic_indices(shape, allow_newaxis=True, max_dims=4))
    ctx = Context()
    tensor = ctx.from_array(values)
    keys = key if isinstance(key, tuple) else (key,)
    if any(isinstance(k, slice) and (k.step or 1) < 0 for k in keys):
        with pytest.raises(ArgumentError, match="positive step"):
            tensor[key]
        return
    expected = values[key]
    found = tensor[key]
    assert found.view_src is tensor
    np.testing.assert_array_equal(found.to_numpy().reshape(expected.shape), expected)


def test_rows_of_blocks_are_views() -> None:
    ctx = Context()
    tensor = ctx.from_array(RNG.standard_normal((6, 64)).astype(np.float32), "q8_0")
    np.testing.assert_array_equal(tensor[1::2, 32:].to_numpy(), tensor.to_numpy()[1::2, 32:])
    for key in ((slice(None), 3), (slice(None), slice(8, 40)), (slice(None), slice(None, None, 2))):
        with pytest.raises(ShapeError, match="blocks of 32 elements; take whole blocks"):
            tensor[key]


def test_a_product_with_a_transposed_weight_copies_nothing() -> None:
    ctx = Context()
    x, w = ctx.new_tensor("f32", (6, 4)), ctx.new_tensor("q8_0", (64, 5))
    y = ctx.new_tensor("f32", (64, 4)) @ w.T
    assert y.op is ggmlb.Op.MUL_MAT and y.src[0] is w
    assert (ctx.new_tensor("f32", (64, 4)) @ w.transpose(1, 0)).src[0] is w
    with pytest.raises(ShapeError, match=r"shapes \(4, 6\) and \(5, 64\) do not fit"):
        x @ w


@pytest.mark.parametrize(
    ("expression", "error", "message"),
    [
        (lambda a: a + list(V), ArgumentError, "list is neither a tensor nor a number"),
        (lambda a: V + a, ArgumentError, "ndarray is neither a tensor nor a number"),
        (lambda a: a @ 2, ArgumentError, "@: int is neither"),
        (lambda a: a / 0, ArgumentError, "/ 0"),
        (lambda a: a + a[:, :2], ShapeError, r"shapes \(3, 4, 6\) and \(3, 2, 6\) do not fit"),
        (lambda a: a[:, :2] + a, ShapeError, "extents must be equal, or 1"),
        (lambda a: a.reshape(5, -1), ShapeError, "a product of 72"),
        (lambda a: a[3], BoundsError, "the extent is 3"),
        (lambda a: a[0, 0, 0, 0], BoundsError, "there are only 3 axes"),
        (lambda a: a[..., ...], ArgumentError, "only once"),
        (lambda a: a[[0, 1]], ArgumentError, "use Context.get_rows"),
        (lambda a: a[None, None], ShapeError, "has 5 axes"),
        (lambda a: list(a), ArgumentError, "iteration over"),
        (lambda a: a**1.5, ArgumentError, r"use ctx.exp\(ctx.log\(a\) \* exponent\)"),
        (lambda a: a**a, ArgumentError, "give a whole number from -16 to 16"),
        (lambda a: 2**a, ArgumentError, r"use ctx.exp\(a \* math.log\(base\)\)"),
        (lambda a: a >= 1, ArgumentError, r"use 1 - \(a < b\)"),
        (lambda a: a <= 1, ArgumentError, r"use 1 - \(a > b\)"),
        (lambda a: a > "x", ArgumentError, "str is neither"),
        (lambda a: a < "x", ArgumentError, "str is neither"),
        (lambda a: a.sum(3), BoundsError, "axis 3; there are 3"),
        (lambda a: a.mean((0, -3)), ArgumentError, "give each only once"),
        (lambda a: a.sum(0.5), ArgumentError, "give whole numbers"),
        (lambda a: a.transpose(0, 1), ArgumentError, "give each of 3 once"),
        (lambda a: 0.5 in a, ArgumentError, "iteration over"),
        (
            lambda a: a + Context().from_array(A),
            GraphError,
            "or that was garbage-collected",
        ),
        (lambda a: a + Tensor("f32", a.ne), GraphError, "it has no Context"),
    ],
)
def test_what_cannot_be(expression: Callable[[Tensor], object], error: type[Exception], message: str) -> None:
    ctx = Context()
    a = ctx.from_array(A)
    n = len(ctx)
    with pytest.raises(error, match=message):
        expression(a)
    assert all(t.op is ggmlb.Op.VIEW for t in ctx.tensors[n:])


def test_two_contexts_are_not_mixed() -> None:
    ctx, other = Context(), Context()
    a, b = ctx.from_array(A), other.from_array(A)
    with pytest.raises(ArgumentError, match=r"of two contexts; call the op .*: ctx.add\(a, b\)"):
        a + b
    assert a.context is ctx and (-a).context is ctx


def test_a_tensor_is_true() -> None:
    """`tensor or other` does not ask for values, which are not there yet."""
    assert Context().new_tensor("f32", (4, 0))
