"""Texts are grouped so that every one is computed once and little is padded."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ggmlb.models.tokens import (
    BATCH_OVERHEAD,
    BATCH_SIZES,
    LENGTH_STEP,
    NEW_SHAPE,
    Shape,
    padded,
    plan_batches,
)

N_MAX = 256

SHAPES = st.sets(
    st.tuples(st.sampled_from(range(4, N_MAX + 1, 4)), st.sampled_from(BATCH_SIZES)), max_size=12
)


@given(
    lengths=st.lists(st.integers(2, N_MAX), min_size=1, max_size=80), most=st.integers(1, 40), planned=SHAPES
)
def test_every_text_is_in_one_batch_that_it_fits(lengths: list[int], most: int, planned: set[Shape]) -> None:
    batches = plan_batches(lengths, most, N_MAX, planned)
    members = np.concatenate([b.members for b in batches])
    assert sorted(members) == list(range(len(lengths)))
    for batch in batches:
        n_texts = len(batch.members)
        assert n_texts <= most and n_texts in (*BATCH_SIZES, most)
        longest = max(lengths[i] for i in batch.members)
        assert longest <= batch.n_tokens <= N_MAX
        assert (batch.n_tokens, n_texts) in planned or batch.n_tokens == padded(longest, n_texts)


@given(lengths=st.lists(st.integers(2, N_MAX), min_size=1, max_size=9), planned=SHAPES)
def test_no_grouping_costs_less(lengths: list[int], planned: set[Shape]) -> None:
    def cost_of_batch(texts: list[int]) -> float:
        n, longest = len(texts), max(texts)
        known = [n * t for t, k in planned if k == n and t >= longest]
        return BATCH_OVERHEAD + min([*known, n * padded(longest, n) * NEW_SHAPE])

    def groupings(rest: list[int]) -> list[list[list[int]]]:
        if not rest:
            return [[]]
        sizes = [k for k in BATCH_SIZES if k <= len(rest)]
        return [[rest[:k], *more] for k in sizes for more in groupings(rest[k:])]

    best = min(sum(map(cost_of_batch, g)) for g in groupings(sorted(lengths)))
    found = plan_batches(lengths, 32, N_MAX, planned)
    paid = [
        BATCH_OVERHEAD
        + len(b.members) * b.n_tokens * (1 if (b.n_tokens, len(b.members)) in planned else NEW_SHAPE)
        for b in found
    ]
    assert sum(paid) == best


@given(length=st.integers(1, 1000), n_texts=st.integers(1, 512))
def test_padded_lengths_are_few(length: int, n_texts: int) -> None:
    n, step = padded(length, n_texts), 2 if n_texts == 1 else LENGTH_STEP
    assert length <= n < length + step
    assert n % step == 0


def test_a_plan_that_nearly_fits_is_used_again() -> None:
    assert plan_batches([21] * 4, 4, N_MAX)[0].n_tokens == 24
    assert plan_batches([17] * 4, 4, N_MAX, {(20, 4), (24, 4)})[0].n_tokens == 20
    assert plan_batches([25] * 4, 4, N_MAX, {(32, 4)})[0].n_tokens == 28  # planning costs less than padding
    assert plan_batches([125] * 4, 4, N_MAX, {(132, 4)})[0].n_tokens == 132


def test_one_long_text_does_not_pad_the_short_ones() -> None:
    batches = plan_batches([8] * 16 + [249], 32, N_MAX)
    assert [(len(b.members), b.n_tokens) for b in batches] == [(16, 8), (1, 250)]


def test_equal_texts_fill_whole_batches() -> None:
    batches = plan_batches([20] * 64, 32, N_MAX)
    assert [(len(b.members), b.n_tokens) for b in batches] == [(32, 20)] * 2


@pytest.mark.parametrize("n_max", [250, 12])
def test_padding_stops_at_the_longest_sequence(n_max: int) -> None:
    assert plan_batches([n_max], 1, n_max)[0].n_tokens == n_max
