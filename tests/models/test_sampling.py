"""Tokens are those of a plain sampler that sorts the whole vocabulary, for the same random numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ggmlb import ArgumentError
from ggmlb.models import TextModel
from ggmlb.models.gguf import GgufFile
from ggmlb.models.gguf.vocabulary import Vocabulary
from ggmlb.models.text.dry import breakers_of
from ggmlb.models.text.sampling import (
    CANDIDATE,
    N_BEST,
    Floats,
    Options,
    Sampler,
    log_probabilities,
)  # fmt: skip


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


def best(logits: Floats) -> np.ndarray:
    """As a device finds the most likely tokens: of equal ones at the end any."""
    found = np.empty(min(N_BEST, logits.size), CANDIDATE)
    found["id"] = np.sort(logits.size - 1 - np.argsort(-logits[::-1], kind="stable")[: found.size])
    found["logit"] = logits[found["id"]]
    return found


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
    few, some = Sampler(options), best(logits)
    for _ in range(3):
        found = sampler(logits, [0])
        if 0 < few.n_best <= np.count_nonzero(some["logit"] > some["logit"].min()):
            assert few(some, [0]) == found
        expected = int(logits.argmax()) if options.top_k == 1 else plain(logits, options, numbers.random())
        assert found == expected, options
    k = int(draw.choice([1, 3, 50]))
    assert log_probabilities(logits, k)[0] == np.argsort(-logits, kind="stable")[:k].tolist()


def test_what_would_repeat_earlier_tokens_is_penalised() -> None:
    logits = np.zeros(20, np.float32)
    logits[7], logits[8] = 1.9, 1.0
    text = [5, 6, 7, 1, 5, 6]

    def chosen(tokens: list[int], breakers: Any = None, **changes: Any) -> int:
        options = Options(**{"temperature": 0, "dry_multiplier": 1.0, **changes})
        return Sampler(options, None, breakers or {})(logits, tokens)

    assert chosen(text) == 8 and logits[7] == np.float32(1.9)
    assert chosen([6, 7, 1, 5, 6]) == 7  # one token is no repetition
    assert chosen([6, 7, 1, 5, 6], dry_allowed_length=1) == 8
    assert chosen(text, dry_penalty_last_n=4) == 7  # the first occurrence is too far away
    assert chosen(text, dry_penalty_last_n=-1) == 8
    assert chosen(text, {6: [()]}) == chosen(text, {7: [()]}) == chosen(text, {5: [(6,)]}) == 7
    assert chosen(text, {5: [(7,)]}) == 8
    assert chosen([5] * 3000, dry_penalty_last_n=-1, dry_multiplier=1e6, dry_base=1e6) == 7
    assert chosen(text, dry_base=0.5) == 7
    with pytest.raises(ArgumentError, match=r"dry_sequence_breakers is \('',\); give texts"):
        Options(dry_sequence_breakers=("",))


def test_breakers_may_begin_at_the_end_of_a_token(models: Callable[..., Path]) -> None:
    vocabulary = Vocabulary(GgufFile(models()).metadata)
    a, b, space_a = (vocabulary.tokens.index(text) for text in ("a", "b", "\u2581a"))
    assert breakers_of(vocabulary, ("a",)).keys() == {a, space_a, vocabulary.tokens.index("<0x61>")}
    found = breakers_of(vocabulary, ("ab",))
    assert found[a] == found[space_a] == [tuple(vocabulary.encode("b", add_special=False))]
    assert b not in found


def test_text_of_a_model_repeats_less(models: Callable[..., Path]) -> None:
    prompt = [1, *[260, 261, 262, 263] * 6, 260, 261]
    with TextModel(models(), ["CPU"], n_ctx=128) as model:
        first = model.generate(prompt, max_tokens=1, temperature=0, ignore_eos=True, logit_bias={262: 30})
        assert first.tokens == [262]
        options = Options(
            max_tokens=1, temperature=0, ignore_eos=True, logit_bias={262: 30}, dry_multiplier=1
        )
        assert model.generate(prompt, options).tokens != [262]
        assert model.generate(prompt, options, dry_sequence_breakers=["b"]).tokens == [262]


@pytest.mark.parametrize("changes", [
    {"repeat_penalty": 1.1}, {"frequency_penalty": 0.5}, {"presence_penalty": 0.5}, {"mirostat": 2},
    {"logit_bias": {3: 1.0}}, {"logits_processor": lambda _, logits: logits}, {"logprobs": 1}, {"top_k": 0},
    {"dry_multiplier": 0.8},
])  # fmt: skip
def test_what_needs_the_whole_vocabulary(changes: dict[str, object]) -> None:
    assert Sampler(Options()).n_best == 40
    assert Sampler(Options(temperature=0)).n_best == 1
    assert Sampler(Options(**changes)).n_best == 0  # type: ignore[arg-type]
    assert Sampler(Options(), lambda _, logits: logits).n_best == 0
