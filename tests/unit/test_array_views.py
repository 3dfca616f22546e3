from __future__ import annotations

from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ggmlb.backends.cpu.views import View, broadcast, cuts, is_blas_matrix, merged, tiles
from ggmlb.core.dtypes import DType

F32 = np.dtype(np.float32)
EXTENTS = st.sampled_from([1, 2, 3, 4, 6])


class Memory:
    def __init__(self, n: int) -> None:
        self.base = np.arange(n, dtype=np.float32).view(np.uint8)


def look(view: View) -> np.ndarray:
    return np.ndarray(view.shape, view.item, view.buffer.base, view.offset, view.strides)


@st.composite
def strided(draw, shape):
    """A view of that shape, with its axes in any order in memory and gaps between them."""
    strides, step = [0] * len(shape), 4
    for axis in draw(st.permutations(range(len(shape)))):
        strides[axis] = step
        step *= shape[axis] + draw(st.integers(0, 1))
    return View(Memory(step // 4), DType.F32, F32, 0, tuple(shape), tuple(strides))


@st.composite
def operands(draw):
    """A view, and one that repeats over it as ggml's binary operands do."""
    shape = draw(st.tuples(EXTENTS, EXTENTS, EXTENTS, EXTENTS))
    small = tuple(draw(st.sampled_from([d for d in range(1, n + 1) if n % d == 0])) for n in shape)
    return draw(strided(shape)), draw(strided(small))


@given(operands())
def test_broadcast_repeats_as_tiles_do(views):
    big, small = views
    a, b = broadcast([big, small])
    assert a.shape == b.shape
    repeats = [n // m for n, m in zip(big.shape, small.shape, strict=True)]
    assert np.array_equal(look(a).reshape(big.shape), look(big))
    assert np.array_equal(look(b).reshape(big.shape), np.tile(look(small), repeats))


@given(operands(), st.integers(0, 3))
def test_merged_views_hold_the_same_in_fewer_dimensions(views, inner):
    same = broadcast(list(views))
    n_outer = len(same[0].shape) - inner
    for view, before in zip(merged(same, inner), same, strict=True):
        assert len(view.shape) <= max(len(before.shape), inner + 1)
        assert view.shape[len(view.shape) - inner :] == before.shape[n_outer:]
        assert np.array_equal(look(view).ravel(), look(before).ravel())


def test_packed_operands_merge_into_one_dimension():
    packed = View(Memory(24), DType.F32, F32, 0, (1, 2, 3, 4), (96, 48, 16, 4))
    assert merged([packed, packed])[0].shape == (24,)
    assert merged([packed, packed], inner=1)[0].shape == (6, 4)


@given(operands(), st.integers(0, 2), st.integers(1, 40))
def test_tiles_cover_everything_once_and_keep_within_the_limit(views, inner, limit):
    same = broadcast(list(views))
    row = prod(same[0].shape[len(same[0].shape) - inner :])
    seen: list[float] = []
    for a, b in tiles(same, inner, limit):
        assert a.shape == b.shape
        assert prod(a.shape) <= max(limit, row)
        assert a.shape[len(a.shape) - inner :] == same[0].shape[len(same[0].shape) - inner :]
        seen += look(a).ravel().tolist()
    assert sorted(seen) == sorted(look(same[0]).ravel().tolist())


@given(st.lists(st.integers(1, 5), max_size=4), st.integers(1, 7), st.integers(1, 60))
def test_cuts_cover_a_shape_once(shape, row, limit):
    count = np.zeros(shape, int)
    for cut in cuts(tuple(shape), row, limit):
        piece = tuple(slice(start, start + n) for start, n in cut)
        count[piece] += 1
        assert prod(n for _, n in cut) * row <= max(limit, row)
    assert (count == 1).all()


def test_no_limit_cuts_nothing():
    assert list(cuts((3, 4), 5, None)) == [((0, 3), (0, 4))]


def test_parts_of_a_view():
    view = View(Memory(24), DType.F32, F32, 0, (4, 6), (24, 4))
    array = np.arange(24, dtype=np.float32).reshape(4, 6)
    assert np.array_equal(look(view.cut(1, 2, 3)), array[:, 2:5])
    assert np.array_equal(look(view.cut(0, 1, 2).cut(1, 5, 1)), array[1:3, 5:])
    assert np.array_equal(look(view.split(1, 3)), array.reshape(4, 2, 3))
    assert np.array_equal(look(view.transposed(1, 0)), array.T)
    assert view.is_packed()
    assert not view.cut(1, 0, 5).is_packed()
    assert view.cut(0, 1, 3).is_packed()


@pytest.mark.parametrize(
    ("shape", "strides", "fits"),
    [
        ((3, 4), (16, 4), True),
        ((3, 4), (64, 4), True),
        ((3, 4), (4, 12), True),  # transposed
        ((3, 4), (0, 4), False),  # rows that repeat
        ((3, 4), (32, 8), False),  # gaps in both directions
    ],
)
def test_what_blas_takes(shape, strides, fits):
    assert is_blas_matrix(View(Memory(64), DType.F32, F32, 0, shape, strides)) is fits
