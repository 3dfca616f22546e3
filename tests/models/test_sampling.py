"""Tokens are those of a plain sampler that sorts the whole vocabulary, for the same random numbers."""

from __future__ import annotations

import numpy as np
import pytest

from ggmlb.models.text.sampling import Floats, Options, Sampler, log_probabilities


def plain(logits: Floats, s: Options, number: float) -> int:
    """The token of llama.cpp's steps in order: top-k, top-p, min-p, temperature."""
    ids = np.argsort(-logits, kind="stable")[: s.top_k or None]
    kept = logits[ids] - logits[ids[0]]
    odds = np.exp(kept.astype(np.float64))
    if s.top_p < 1:
        ids = ids[: max(1, np.count_nonzero(np.cumsum(odds) - odds < s.top_p * odds.sum()))]
    if s.min_p > 0:
        ids = ids[: max(1, np.count_nonzero(odds[: ids.size] >= s.min_p))]
    sums = np.cumsum(np.exp(kept[: ids.size].astype(np.float64) / s.temperature))
    return int(ids[min(np.searchsorted(sums, number * sums[-1], "right"), ids.size - 1)])


@pytest.mark.parametrize("seed", range(200))
def test_tokens_are_those_of_a_plain_sampler(seed: int) -> None:
    draw = np.random.default_rng(seed)
    n = int(draw.choice([1, 5, 63, 64, 65, 999, 9000]))
    logits = (draw.standard_normal(n) * draw.choice([0.01, 1, 3, 10])).astype(np.float32)
    if seed % 3 == 0:
        logits = np.round(logits)  # equal ones
    if seed % 5 == 0:
        logits[draw.random(n) < 0.5] = -np.inf
        logits[draw.integers(n)] = 1
    options = Options(
        top_k=int(draw.choice([0, 2, 40, 500, 50000])),
        top_p=float(draw.choice([1, 0.95, 0.5, 0])),
        min_p=float(draw.choice([0, 0.05, 0.5, 1, 1e-6])),
        temperature=float(draw.choice([0.1, 0.8, 2])),
        seed=seed,
    )
    sampler, numbers = Sampler(options), np.random.Generator(np.random.PCG64(seed))
    for _ in range(3):
        found = sampler(logits, [0])
        expected = int(logits.argmax()) if options.top_k == 1 else plain(logits, options, numbers.random())
        assert found == expected, options
    k = int(draw.choice([1, 3, 50]))
    assert log_probabilities(logits, k)[0] == np.argsort(-logits, kind="stable")[:k].tolist()
