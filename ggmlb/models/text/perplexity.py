"""Perplexity of a text."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from ggmlb.core.errors import ArgumentError
from ggmlb.models.text.generation import Engine


class Perplexity(NamedTuple):
    """The perplexity of a text.

    Attributes:
        value: The exponential of the mean of the negative log-probabilities of its tokens.
        error: Standard error of the value.
        n_tokens: Predicted tokens.
        n_chunks: Number of chunks.
    """

    value: float
    error: float
    n_tokens: int
    n_chunks: int


def perplexity(
    engine: Engine,
    tokens: Sequence[int],
    n_ctx: int,
    first: int | None,
    max_chunks: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Perplexity:
    """Return the perplexity of `tokens`; `first` (BOS), if not `None`, replaces each chunk's first token."""
    if n_ctx < 3 or (max_chunks is not None and max_chunks < 1):
        raise ArgumentError(
            f"perplexity: n_ctx is {n_ctx}, max_chunks {max_chunks}; give 3 or more tokens per chunk, and 1 "
            "or more chunks"
        )
    n_chunks = min(len(tokens) // n_ctx, max_chunks or len(tokens))
    if not n_chunks:
        raise ArgumentError(f"the text has {len(tokens)} tokens; give at least a chunk of {n_ctx}")
    half = n_ctx // 2
    losses = []
    for i in range(n_chunks):
        chunk = list(tokens[i * n_ctx : (i + 1) * n_ctx])
        asked = chunk if first is None else [first, *chunk[1:]]
        logits = engine.each(asked, engine.decoder.decode)[half:-1].astype(np.float64)
        most = logits.max(axis=1)
        total = most + np.log(np.exp(logits - most[:, None]).sum(axis=1))
        losses.append(total - logits[np.arange(len(logits)), chunk[half + 1 :]])
        if progress is not None:
            progress(i + 1, n_chunks)
    loss = np.concatenate(losses)
    value = math.exp(loss.mean())
    return Perplexity(value, value * float(loss.std()) / math.sqrt(loss.size), loss.size, n_chunks)
