"""Views: extents, strides and offsets, by hand and against NumPy's."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ggmlb.core.context import Context
from ggmlb.core.dtypes import DType
from ggmlb.core.enums import Op
from ggmlb.core.errors import ArgumentError, BoundsError, ShapeError
from ggmlb.core.tensor import Tensor

A = (6, 5, 4, 3)  # f32: nb (4, 24, 120, 480), 1440 bytes


@pytest.mark.parametrize(
    ("fn", "args", "ne", "nb", "offset", "op"),
    [
        ("view_1d", (10, 8), (10, 1, 1, 1), (4, 40, 40, 40), 8, Op.VIEW),
        ("view_1d", (360,), (360, 1, 1, 1), (4, 1440, 1440, 1440), 0, Op.VIEW),
        ("view_2d", (3, 5, 24, 12), (3, 5, 1, 1), (4, 24, 120, 120), 12, Op.VIEW),
        ("view_2d", (6, 1, 0, 0), (6, 1, 1, 1), (4, 0, 0, 0), 0, Op.VIEW),
        ("view_3d", (6, 2, 4, 24, 120, 48), (6, 2, 4, 1), (4, 24, 120, 480), 48, Op.VIEW),
        ("view_4d", (1, 5, 4, 3, 24, 120, 480, 20), (1, 5, 4, 3), (4, 24, 120, 480), 20, Op.VIEW),
        # Overlapping rows, as a sliding window has them, lie within the tensor.
        ("view_2d", (4, 350, 4, 0), (4, 350, 1, 1), (4, 4, 1400, 1400), 0, Op.VIEW),
        ("reshape_1d", (360,), (360, 1, 1, 1), (4, 1440, 1440, 1440), 0, Op.RESHAPE),
        ("reshape_2d", (10, 36), (10, 36, 1, 1), (4, 40, 1440, 1440), 0, Op.RESHAPE),
        ("reshape_3d", (2, 3, 60), (2, 3, 60, 1), (4, 8, 24, 1440), 0, Op.RESHAPE),
        ("reshape_4d", (3, 4, 5, 6), (3, 4, 5, 6), (4, 12, 48, 240), 0, Op.RESHAPE),
        ("permute", (0, 2, 1, 3), (6, 4, 5, 3), (4, 120, 24, 480), 0, Op.PERMUTE),
        ("permute", (1, 2, 3, 0), (3, 6, 5, 4), (480, 4, 24, 120), 0, Op.PERMUTE),
        ("permute", (3, 2, 1, 0), (3, 4, 5, 6), (480, 120, 24, 4), 0, Op.PERMUTE),
        ("transpose", (), (5, 6, 4, 3), (24, 4, 120, 480), 0, Op.TRANSPOSE),
        ("view_tensor", (), A, (4, 24, 120, 480), 0, Op.NONE),
    ],
)
def test_view_by_hand(fn, args, ne, nb, offset, op):
    ctx = Context()
    a = ctx.new_tensor("f32", A)
    view = getattr(ctx, fn)(a, *args)
    assert (view.ne, view.nb, view.view_offs, view.op) == (ne, nb, offset, op)
    assert view.view_src is a
    assert view.src == (() if op is Op.NONE else (a,))
    assert view.dtype is DType.F32


def test_reshape_takes_the_shape_of_a_tensor_and_not_its_strides():
    ctx = Context()
    a, b = ctx.new_tensor("f32", (6, 5)), ctx.transpose(ctx.new_tensor("f16", (3, 10)))
    view = ctx.reshape(a, b)
    assert (view.ne, view.nb, view.src) == ((10, 3, 1, 1), (4, 40, 120, 120), (a,))


def test_views_of_quantised_rows_count_blocks():
    ctx = Context()
    a = ctx.new_tensor("q8_0", (64, 6))
    half = ctx.view_2d(a, 32, 6, a.nb[1], 34)
    assert (half.ne, half.nb, half.view_offs) == ((32, 6, 1, 1), (34, 68, 408, 408), 34)
    assert half.nbytes == 34 + 5 * 68
    assert ctx.view_1d(a, 96, 68).nb == (34, 102, 102, 102)
    with pytest.raises(ShapeError, match="block size 32"):
        ctx.view_1d(a, 48)
    with pytest.raises(ShapeError, match="block size 32"):
        ctx.view_2d(a, 48, 2, 68)


def test_a_view_of_a_view_belongs_to_the_root():
    ctx = Context()
    a = ctx.new_tensor("f32", A)
    first = ctx.view_3d(a, 6, 2, 4, 24, 120, 48)
    second = ctx.view_1d(ctx.permute(first, 0, 2, 1, 3), 6, 120)
    assert second.view_src is a
    assert second.view_offs == 168
    with pytest.raises(BoundsError):
        ctx.view_1d(first, 349, 0)  # 1396 bytes, and the 48 of the first
    assert ctx.view_1d(first, 348, 0).view_offs == 48


@pytest.mark.parametrize(
    ("fn", "args"),
    [
        ("view_1d", (361,)),
        ("view_1d", (360, 4)),
        ("view_1d", (1, -4)),
        ("view_1d", (1, 1440)),
        ("view_2d", (6, 61, 24, 0)),
        ("view_2d", (6, 60, 28, 0)),
        ("view_3d", (6, 5, 13, 24, 120, 0)),
        ("view_4d", (6, 5, 4, 3, 24, 120, 480, 4)),
        ("view_4d", (6, 5, 4, 4, 24, 120, 480, 0)),
    ],
)
def test_view_out_of_bounds(fn, args):
    ctx = Context()
    a = ctx.new_tensor("f32", A, "a")
    with pytest.raises(BoundsError, match=rf"{fn}\(tensor f32.*1440 bytes of tensor f32.*'a'"):
        getattr(ctx, fn)(a, *args)
    assert list(ctx) == [a]


@pytest.mark.parametrize(
    ("fn", "args", "error", "part"),
    [
        ("view_2d", (-6, 2, 24, 0), ShapeError, "must not be negative"),
        ("view_2d", (6, 2, -24, 48), ShapeError, "must not be negative"),
        ("view_4d", (6, 5, 4, -3, 24, 120, 480, 0), ShapeError, "must not be negative"),
        ("reshape_2d", (6, 61), ShapeError, "as many elements as a, 360"),
        ("reshape_2d", (-6, -60), ShapeError, "as many elements"),
        ("reshape_1d", (0,), ShapeError, "as many elements"),
        ("permute", (0, 1, 2, 2), ArgumentError, "in some order"),
        ("permute", (0, 1, 2, 4), ArgumentError, "in some order"),
        ("permute", (-1, 1, 2, 0), ArgumentError, "in some order"),
    ],
)
def test_view_refused(fn, args, error, part):
    ctx = Context()
    a = ctx.new_tensor("f32", A)
    with pytest.raises(error, match=part):
        getattr(ctx, fn)(a, *args)
    assert list(ctx) == [a]


def test_reshape_asks_for_contiguous_operands():
    ctx = Context()
    a = ctx.new_tensor("f32", (6, 5))
    with pytest.raises(ShapeError, match=r"strides nb \[24, 4, 120, 120\].*apply cont"):
        ctx.reshape_1d(ctx.transpose(a), 30)
    assert ctx.reshape_1d(ctx.cont(ctx.transpose(a)), 30).ne == (30, 1, 1, 1)


def test_empty_views():
    ctx = Context()
    a = ctx.new_tensor("f32", (4, 0))
    assert ctx.view_1d(a, 0).nbytes == 0
    assert ctx.view_2d(ctx.new_tensor("f32", (4, 2)), 4, 0, 16, 32).nbytes == 0
    assert ctx.reshape_2d(a, 0, 7).ne == (0, 7, 1, 1)


# -- against NumPy ---------------------------------------------------------------------------------

extents = st.tuples(*[st.integers(1, 5)] * 4)
dtypes = st.sampled_from([DType.F32, DType.F16, DType.I64])


def _same(tensor, array, root):
    """Whether a tensor describes the same memory as a NumPy view of the root array."""
    assert tensor.ne == array.shape[::-1]
    start = array.__array_interface__["data"][0] - root.__array_interface__["data"][0]
    assert tensor.view_offs == start
    for n, mine, theirs in zip(tensor.ne, tensor.nb, array.strides[::-1], strict=True):
        assert n == 1 or mine == theirs


@given(ne=extents, dtype=dtypes, axes=st.permutations(range(4)))
def test_permute_as_numpy(ne, dtype, axes):
    ctx = Context()
    root = np.zeros(ne[::-1], dtype.numpy)
    view = ctx.permute(ctx.new_tensor(dtype, ne), *axes)
    # ggml's axes say where a dimension goes; NumPy's say where it comes from.
    order = [3 - axes.index(3 - i) for i in range(4)]
    _same(view, root.transpose(order), root)
    assert view.is_contiguous() == root.transpose(order).flags.c_contiguous
    assert view.is_permuted() == (sorted(view.nb) != list(view.nb))
    assert view.is_transposed() == (view.nb[0] > view.nb[1])


@given(ne=extents, dtype=dtypes, data=st.data())
def test_view_4d_as_numpy_slices(ne, dtype, data):
    ctx = Context()
    root = np.zeros(ne[::-1], dtype.numpy)
    a = ctx.new_tensor(dtype, ne)
    start = [data.draw(st.integers(0, n - 1)) for n in ne]
    stop = [data.draw(st.integers(s + 1, n)) for s, n in zip(start, ne, strict=True)]
    size = [b - s for s, b in zip(start, stop, strict=True)]
    offset = sum(s * b for s, b in zip(start, a.nb, strict=True))
    view = ctx.view_4d(a, *size, *a.nb[1:], offset)
    window = root[tuple(slice(s, b) for s, b in zip(start[::-1], stop[::-1], strict=True))]
    _same(view, window, root)
    assert view.is_contiguous() == window.flags.c_contiguous
    assert view.nbytes == window.itemsize + sum(
        (n - 1) * s for n, s in zip(window.shape, window.strides, strict=True)
    )


@given(ne=extents, dtype=dtypes, swaps=st.lists(st.permutations(range(4)), max_size=4))
def test_chains_of_views_keep_their_elements(ne, dtype, swaps):
    ctx = Context()
    root = np.arange(np.prod(ne)).astype(dtype.numpy).reshape(ne[::-1])
    view, array = ctx.new_tensor(dtype, ne), root
    for axes in swaps:
        view = ctx.transpose(ctx.permute(view, *axes))
        array = array.transpose([3 - axes.index(3 - i) for i in range(4)]).swapaxes(2, 3)
    if swaps:
        _same(view, array, root)
        back = np.ndarray(view.ne[::-1], dtype.numpy, root.data, view.view_offs, view.nb[::-1])
        np.testing.assert_array_equal(back, array)


@given(ne=extents, dtype=dtypes)
def test_cont_and_dup_are_contiguous(ne, dtype):
    ctx = Context()
    view = ctx.permute(ctx.new_tensor(dtype, ne), 2, 0, 3, 1)
    for copy in (ctx.cont(view), ctx.dup(view), ctx.cont_1d(view, view.n_elements), ctx.cast(view, "f32")):
        assert copy.is_contiguous()
        assert copy.view_src is None
        assert copy.n_elements == view.n_elements


NARROW = {
    "view_1d": lambda c, a, n, at: c.view_1d(a, n(3), at),
    "view_2d": lambda c, a, n, at: c.view_2d(a, n(3), n(2), n(a.nb[1]), at),
    "view_3d": lambda c, a, n, at: c.view_3d(a, n(3), n(2), n(1), n(a.nb[1]), n(a.nb[2]), at),
    "view_4d": lambda c, a, n, at: c.view_4d(a, n(3), n(2), n(1), n(1), n(a.nb[1]), n(a.nb[2]), a.nb[3], at),
    "reshape_2d": lambda c, a, n, at: c.reshape_2d(a, n(1 << 16), n(1 << 16)),
}


@pytest.mark.parametrize("name", NARROW)
def test_numpys_integers_do_not_wrap_around(name):
    ctx = Context()
    a = ctx.new_tensor("f32", (1 << 12, 1 << 12, 1 << 8))
    view = NARROW[name](ctx, a, np.int32, np.int64(a.nbytes - a.nb[1] * 2))
    same = NARROW[name](ctx, a, int, a.nbytes - a.nb[1] * 2)
    assert (view.ne, view.nb, view.view_offs) == (same.ne, same.nb, same.view_offs)
    assert {type(n) for n in (*view.ne, *view.nb, view.view_offs, view.nbytes)} == {int}


@pytest.mark.parametrize("name", NARROW)
def test_a_view_has_whole_numbers(name):
    ctx = Context()
    a = ctx.new_tensor("f32", (1 << 12, 1 << 12, 1 << 8))
    with pytest.raises(ArgumentError, match="whole"):
        NARROW[name](ctx, a, float, 0.0)
    assert len(ctx) == 1


@pytest.mark.parametrize(
    ("nb", "expected"),
    [
        ((4, 24, 120, 480), False),  # as a new tensor
        ((16, 96, 4, 480), True),
        ((80, 16, 4, 480), False),  # columns of rows
        ((16, 16, 4, 480), False),
        ((16, 96, 8, 480), False),  # every second channel
        ((4, 96, 4, 480), False),
    ],
)
def test_channels_are_contiguous_where_they_are_innermost(nb, expected):
    assert Tensor(DType.F32, A, nb).is_contiguous_channels() == expected
