"""Views of tensors that are sharded: each device's part, put together, is the view of the whole."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from hypothesis import assume, event, example, given
from hypothesis import strategies as st

from ggmlb.core.dtypes import DType
from ggmlb.core.tensor import contiguous_nb
from ggmlb.parallel.meta.layout import slices_of_view
from ggmlb.parallel.meta.state import SplitAxis, SplitState

Array = np.ndarray[Any, Any]
Four = tuple[int, int, int, int]


def owned(values: Array, axis: int, segments: tuple[tuple[int, ...], ...], device: int) -> Array:
    """What a device has of an array: its part of each segment along a numpy axis."""
    indices, start = [], 0
    for segment in segments:
        begin = start + sum(segment[:device])
        indices += range(begin, begin + segment[device])
        start += sum(segment)
    return np.ascontiguousarray(values.take(indices, axis=axis))


def put_together(parts: list[Array], axis: int, segments: tuple[tuple[int, ...], ...]) -> Array:
    pieces, starts = [], [0] * len(parts)
    for segment in segments:
        for j, n in enumerate(segment):
            pieces.append(parts[j].take(range(starts[j], starts[j] + n), axis=axis))
            starts[j] += n
    return np.concatenate(pieces, axis=axis)


def seen(memory: Array, ne: Four, nb: Four, offset: int) -> Array:
    return np.ndarray(ne[::-1], memory.dtype, memory.tobytes(), offset, nb[::-1])


@st.composite
def roots(draw: st.DrawFn) -> tuple[Four, SplitState]:
    axis = draw(st.integers(0, 3))
    n_devices = draw(st.integers(1, 3))
    segment = st.tuples(*[st.integers(0, 3).map(lambda n: 2 * n)] * n_devices)
    segments = tuple(draw(st.lists(segment, min_size=1, max_size=3)))
    ne = [draw(st.integers(1, 4)) for _ in range(4)]
    ne[axis] = sum(map(sum, segments))
    assume(ne[axis])
    return (ne[0], ne[1], ne[2], ne[3]), SplitState(SplitAxis(axis), segments)


def regrouped(draw: st.DrawFn, n: int) -> Four:
    """Four extents of n elements."""
    ne = []
    for _ in range(3):
        ne.append(draw(st.sampled_from([d for d in range(1, n + 1) if n % d == 0])))
        n //= ne[-1]
    return ne[0], ne[1], ne[2], n


@st.composite
def views(draw: st.DrawFn) -> tuple[Four, SplitState, Four, Four, int]:
    """A root; and a view of it: reshaped, then cut, then permuted."""
    ne, state = draw(roots())
    shape = draw(st.sampled_from([ne, regrouped(draw, math.prod(ne))]))
    nb = contiguous_nb(DType.F32, shape)
    offset, cut = 0, list(shape)
    for i, n in enumerate(shape):
        if draw(st.integers(0, 3)) == 0:
            start = draw(st.integers(0, n - 1))
            offset += start * nb[i]
            cut[i] = draw(st.integers(1, n - start))
    order = draw(st.sampled_from([(0, 1, 2, 3), (1, 0, 2, 3), (0, 2, 1, 3), (2, 1, 0, 3), (3, 0, 1, 2)]))
    a, b, c, d = order
    return ne, state, (cut[a], cut[b], cut[c], cut[d]), (nb[a], nb[b], nb[c], nb[d]), offset


@example(((6, 2, 3, 4), SplitState(SplitAxis.AXIS_0, ((6,),)), (6, 16, 1, 1), (4, 36, 576, 576), 0))
@given(views())
def test_parts_make_up_the_view(drawn: tuple[Four, SplitState, Four, Four, int]) -> None:
    root_ne, state, ne, nb, offset = drawn
    found = slices_of_view(DType.F32, root_ne, state, ne, nb, offset)
    event("sharded" if found else "cuts through parts")
    if found is None:
        return
    values = np.arange(math.prod(root_ne), dtype=np.float32).reshape(root_ne[::-1])
    parts = []
    for j, part in enumerate(found.slices):
        memory = owned(values, 3 - state.axis, state.segments, j)
        parts.append(seen(memory, *part) if 0 not in part.ne else np.empty(part.ne[::-1], np.float32))
    whole = put_together(parts, 3 - found.state.axis, found.state.segments)
    np.testing.assert_array_equal(whole, seen(values, ne, nb, offset))


def dealt(root_ne: Four, axis: int, segments: Any, ne: Four, nb: Four, offset: int = 0) -> str | None:
    found = slices_of_view(DType.F32, root_ne, SplitState(SplitAxis(axis), segments), ne, nb, offset)
    return None if found is None else str(found.state)


def test_heads_out_of_rows_of_queries_keys_and_values() -> None:
    n, heads, tokens, batch = 384, 12, 5, 2
    for part in range(3):
        ne, nb = (32, tokens, heads, batch), (4, 12 * n, 128, tokens * 12 * n)
        state = dealt((3 * n, tokens * batch, 1, 1), 0, ((192, 192),) * 3, ne, nb, part * n * 4)
        assert state == "axis 2: 6|6"


def test_heads_joined_to_rows() -> None:
    assert dealt((32, 12, 5, 2), 1, ((8, 4),), (384, 5, 2, 1), (4, 1536, 7680, 15360)) == "axis 0: 256|128"


def test_what_cuts_through_parts_is_refused() -> None:
    rows = (384, 7, 1, 1)
    assert dealt(rows, 1, ((4, 3),), (384, 3, 1, 1), (4, 1536, 4608, 4608), 1536) is None  # some rows of each
    assert dealt(rows, 0, ((200, 184),), (32, 12, 7, 1), (4, 128, 1536, 10752)) is None  # through a head
    assert dealt(rows, 0, ((192, 192),), (192, 7, 1, 1), (8, 1536, 10752, 10752)) is None  # every second one


def test_blocks_are_dealt_out_as_elements_are() -> None:
    """A cut through rows of blocks, with every reach of the view: within a row, and over rows."""
    dtype, root_ne, state = DType.Q8_0, (128, 6, 1, 1), SplitState(SplitAxis.AXIS_0, ((64, 64),))
    nb = contiguous_nb(dtype, root_ne)
    block = dtype.type_size

    def parts(ne: Four, nb: Four, offset: int = 0) -> Any:
        found = slices_of_view(dtype, root_ne, state, ne, nb, offset)
        return None if found is None else (str(found.state), [tuple(s) for s in found.slices])

    own = contiguous_nb(dtype, (64, 6, 1, 1))
    assert parts((128, 3, 1, 1), nb, 2 * nb[1]) == (
        "axis 0: 64|64",
        [((64, 3, 1, 1), contiguous_nb(dtype, (64, 3, 1, 1)), 2 * own[1])] * 2,
    )
    heads = (nb[0], 2 * block, nb[1], nb[2])  # of 64 values, one on each device
    state_of_heads, slices = parts((64, 2, 6, 1), heads)
    assert state_of_heads == "axis 1: 1|1"
    assert [s[0] for s in slices] == [(64, 1, 6, 1)] * 2
    assert [s[1][2] for s in slices] == [own[1]] * 2
    assert parts((96, 6, 1, 1), nb) is None, "it ends within a part"


def test_rows_of_one_block() -> None:
    state = SplitState(SplitAxis.AXIS_0, ((256, 0),))
    nb = contiguous_nb(DType.Q4_K, (256, 3, 1, 1))
    found = slices_of_view(DType.Q4_K, (256, 3, 1, 1), state, (256, 3, 1, 1), nb, 0)
    assert found is not None
    assert [s.ne[0] for s in found.slices] == [256, 0]
