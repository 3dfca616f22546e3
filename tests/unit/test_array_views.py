"""Tiles of operands: how much scratch memory a node takes, which no result shows."""

from __future__ import annotations

from math import prod

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ggmlb.backends.cpu.views import View, broadcast, tiles
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
