"""Texts are grouped so that every one is computed once and little is padded."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ggmlb.models.tokens import BATCH_OVERHEAD, BATCH_SIZES, COLUMNS_STEP, LENGTH_STEP, plan_batches

N_MAX = 256


def step(n_texts: int) -> int:
    return COLUMNS_STEP if n_texts % 2 else LENGTH_STEP


@given(
    lengths=st.lists(st.integers(2, N_MAX), min_size=1, max_size=80),
    most=st.integers(1, 40),
)
def test_every_text_is_in_one_batch_that_it_fits(lengths: list[int], most: int) -> None:
    batches = plan_batches(lengths, most, N_MAX)
    members = np.concatenate([b.members for b in batches])
    assert sorted(members) == list(range(len(lengths)))
    for batch in batches:
        assert len(batch.members) <= most
        assert len(batch.members) in (*BATCH_SIZES, most)
        longest = max(lengths[i] for i in batch.members)
        assert longest <= batch.n_tokens <= N_MAX
        assert batch.n_tokens - longest < step(len(batch.members))
        assert len(batch.members) * batch.n_tokens % COLUMNS_STEP == 0


@given(lengths=st.lists(st.integers(2, N_MAX), min_size=1, max_size=9))
def test_no_grouping_costs_less(lengths: list[int]) -> None:
    def cost(groups: list[list[int]]) -> int:
        padded = (len(g) * -(-max(g) // step(len(g))) * step(len(g)) for g in groups)
        return sum(padded) + BATCH_OVERHEAD * len(groups)

    def groupings(rest: list[int]) -> list[list[list[int]]]:
        if not rest:
            return [[]]
        sizes = [k for k in BATCH_SIZES if k <= len(rest)]
        return [[rest[:k], *more] for k in sizes for more in groupings(rest[k:])]

    best = min(cost(g) for g in groupings(sorted(lengths)))
    found = [[lengths[i] for i in b.members] for b in plan_batches(lengths, 32, N_MAX)]
    assert cost(found) == best


def test_one_long_text_does_not_pad_the_short_ones() -> None:
    batches = plan_batches([8] * 16 + [250], 32, N_MAX)
    assert [(len(b.members), b.n_tokens) for b in batches] == [(16, 8), (1, 256)]


def test_equal_texts_fill_whole_batches() -> None:
    batches = plan_batches([20] * 64, 32, N_MAX)
    assert [(len(b.members), b.n_tokens) for b in batches] == [(32, 20)] * 2


@pytest.mark.parametrize("n_max", [250, 12])
def test_padding_stops_at_the_longest_sequence(n_max: int) -> None:
    assert plan_batches([n_max], 1, n_max)[0].n_tokens == n_max
