"""DRY: a penalty of tokens that would continue a repetition, as in llama.cpp."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from ggmlb.models.gguf.vocabulary import Vocabulary
    from ggmlb.models.text.sampling import Options

MAX_TEXT, MAX_TAIL = 40, 20
"""Limits of a sequence breaker: its bytes, and its tokens after the first."""

MAX_EXPONENT = float(np.log(np.finfo(np.float32).max))

MOST_PENALTY = 1e38

Breakers = Mapping[int, Sequence[tuple[int, ...]]]
"""Sequence breakers by first token: the tokens after it; empty if that token has the whole text."""

_BREAKERS: WeakKeyDictionary[Vocabulary, tuple[tuple[str, ...], Breakers]] = WeakKeyDictionary()
"""The breakers used last; they take some 0.1 s to find."""


def breakers_of(vocabulary: Vocabulary, texts: Sequence[str]) -> Breakers:
    """Return the tokens of sequence breakers, texts that end a repetition."""
    asked = tuple(texts)
    known = _BREAKERS.get(vocabulary)
    if known is not None and known[0] == asked:
        return known[1]
    found: dict[int, list[tuple[int, ...]]] = defaultdict(list)
    raw = [text.encode()[:MAX_TEXT] for text in asked]
    for token in range(vocabulary.n_tokens):
        word = vocabulary.bytes_of(token)
        for text in raw:
            if text in word:
                found[token].append(())
                continue
            for n in range(1, min(len(text), len(word) + 1)):
                if word.endswith(text[:n]):
                    rest = text[n:].decode("utf-8", "replace")
                    tail = vocabulary.encode(rest, special=False, add_special=False)[:MAX_TAIL]
                    found[token].append(tuple(tail))
    _BREAKERS[vocabulary] = asked, found
    return found


def penalise_repetition(
    logits: npt.NDArray[np.float32], tokens: Sequence[int], options: Options, breakers: Breakers
) -> None:
    """Subtract `multiplier * base ** (n - allowed_length)` from logits of tokens, in place.

    `n` tokens before the last occurrence of such a token are those at the end of the text.
    """
    s = options
    n_last = len(tokens) if s.dry_penalty_last_n < 0 else min(len(tokens), s.dry_penalty_last_n)
    newest = np.asarray(tokens[len(tokens) - n_last :][::-1], np.int64)
    most = _since_breaker(newest.tolist(), breakers) if n_last > s.dry_allowed_length else -1
    if most < s.dry_allowed_length:
        return
    repeated = np.zeros(n_last, np.int64)  # at each place: tokens before it that are those at the end
    places, n = np.arange(1, n_last), 0
    while places.size and n < most:
        places = places[places + n < n_last]
        places = places[newest[places + n] == newest[n]]
        n += 1
        repeated[places] = n
    lengths: dict[int, int] = {}
    for place in (np.flatnonzero(repeated[1:] >= s.dry_allowed_length) + 1).tolist():
        token = int(newest[place - 1])
        lengths[token] = max(lengths.get(token, 0), int(repeated[place]))
    most_exponent = MAX_EXPONENT // np.log(s.dry_base) if s.dry_base > 1.000001 else np.inf
    for token, length in lengths.items():
        if () not in breakers.get(token, ()) and token < logits.size:
            exponent = min(length - s.dry_allowed_length, most_exponent)
            logits[token] -= min(s.dry_multiplier * s.dry_base**exponent, MOST_PENALTY)


def _since_breaker(newest: Sequence[int], breakers: Breakers) -> int:
    """Return the number of tokens after the latest breaker; `newest` are the tokens, newest first."""
    for i, token in enumerate(newest):
        tails = breakers.get(token, ()) if breakers else ()
        lengths = [n for tail in tails if (n := len(tail)) <= i and tail == tuple(newest[i - n : i][::-1])]
        if lengths:
            return i - max(lengths)
    return len(newest)
