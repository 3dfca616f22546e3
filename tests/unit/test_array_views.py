"""Views of memory that is not there yet: parts and shapes as NumPy's, and tiles within their limit."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ggmlb.backends.cpu.views import View, broadcast, tiles
from ggmlb.core.dtypes import DType

F32 = np.dtype(np.float32)
EXTENTS = st.sampled_from([1, 2, 3, 4, 6])


def look(view: View) -> np.ndarray:
    return np.ndarray(view.shape, view.item, view.memory, view.offset, view.strides)


@st.composite
def strided(draw, shape):
    """A view of that shape, with its axes in any order in memory and gaps between them."""
    strides, step = [0] * len(shape), 4
    for axis in draw(st.permutations(range(len(shape)))):
        strides[axis] = step
        step *= shape[axis] + draw(st.integers(0, 1))
    return View(np.arange(step // 4, dtype=np.float32), DType.F32, F32, 0, tuple(shape), tuple(strides))


@st.composite
def operands(draw):
    """A view, and one that repeats over it as ggml's binary operands do."""
    shape = draw(st.tuples(EXTENTS, EXTENTS, EXTENTS, EXTENTS))
    small = tuple(draw(st.sampled_from([d for d in range(1, n + 1) if n % d == 0])) for n in shape)
    return draw(strided(shape)), draw(strided(small))


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


@st.composite
def indices(draw, shape):
    """An index of an array: a number or a slice for each axis or some, new axes, and perhaps an ellipsis."""
    parts = []
    for n in shape[: draw(st.integers(0, len(shape)))]:
        parts += [None] * draw(st.integers(0, 1))
        parts.append(draw(st.one_of(st.integers(-n, n - 1), st.slices(n))))
    if draw(st.booleans()):
        parts.insert(draw(st.integers(0, len(parts))), ...)
    return tuple(parts)


@given(st.data())
def test_a_part_is_that_of_an_array(data):
    view = data.draw(strided(data.draw(st.tuples(EXTENTS, EXTENTS, EXTENTS))))
    index = data.draw(indices(view.shape))
    np.testing.assert_array_equal(look(view[index]), look(view)[index])


@given(st.data())
def test_another_shape_is_that_of_an_array_or_refused(data):
    view = data.draw(strided(data.draw(st.tuples(EXTENTS, EXTENTS, EXTENTS))))
    n = prod(view.shape)
    shape = [data.draw(st.sampled_from([d for d in range(1, n + 1) if n % d == 0]))]
    shape.insert(data.draw(st.integers(0, 1)), n // shape[0])
    expected = look(view).reshape(shape)
    if np.shares_memory(expected, look(view)):
        np.testing.assert_array_equal(look(view.reshape(*shape)), expected)
        np.testing.assert_array_equal(look(view.reshape(shape[0], -1)), expected)
    else:
        with pytest.raises(ValueError, match="cannot become"):
            view.reshape(*shape)
