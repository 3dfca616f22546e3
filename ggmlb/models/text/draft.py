"""Speculative decoding: drafts of the next tokens, which the model verifies in one batch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ggmlb.core.arguments import alias, checked_methods
from ggmlb.core.errors import AllocationError, ArgumentError, FreedError
from ggmlb.models.text.decoder import N_BATCH, Token
from ggmlb.models.text.generation import Engine, Request, n_equal

if TYPE_CHECKING:
    from ggmlb.models.gguf.vocabulary import Vocabulary
    from ggmlb.models.text.config import TextConfig

Draft = Callable[[npt.NDArray[np.int32]], Sequence[int] | npt.NDArray[Any]]
"""`draft(tokens)`: tokens that may come next, given those so far, prompt included."""
alias("Draft", "Callable")

MAX_UNLIKE = 128
"""Most tokens that the vocabulary of a draft model may have more or fewer, as in llama.cpp."""


@checked_methods
class PromptLookup:
    """Drafts what followed the last tokens where they occurred before, as in summaries and edited code.

    Example: `TextModel("model.gguf", draft=PromptLookup())`

    Args:
        max_ngram_size: Most last tokens to search for; fewer, if they did not occur.
        num_pred_tokens: Most tokens of a draft.

    Raises:
        ArgumentError: A number is not positive.
    """

    def __init__(self, max_ngram_size: int = 2, num_pred_tokens: int = 10) -> None:
        if max_ngram_size < 1 or num_pred_tokens < 1:
            raise ArgumentError(f"PromptLookup({max_ngram_size}, {num_pred_tokens}): give 1 or more")
        self._n_most, self._n_draft = max_ngram_size, num_pred_tokens

    def __call__(self, tokens: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """Return the draft."""
        for n in range(min(self._n_most, len(tokens) - 1), 0, -1):
            earlier = np.lib.stride_tricks.sliding_window_view(tokens, n)[:-1]
            ends = np.flatnonzero((earlier == tokens[-n:]).all(axis=1)) + n
            if ends.size:
                whole = ends[ends + self._n_draft <= len(tokens)]
                start = int(whole[-1] if whole.size else ends[0])
                return tokens[start : start + self._n_draft]
        return tokens[:0]


class Drafts:
    """Drafts of running requests by a function.

    Args:
        draft: The function.
        n_vocab: Size of the model's vocabulary.
    """

    def __init__(self, draft: Draft, n_vocab: int) -> None:
        self._draft = draft
        self._n_vocab = n_vocab

    def __call__(self, requests: Sequence[Request], counts: Sequence[int]) -> list[list[int]]:
        """Return for each request a draft of at most that many tokens.

        Raises:
            ArgumentError: The function returned tokens that the vocabulary lacks.
        """
        found = []
        for request, n in zip(requests, counts, strict=True):
            draft = np.asarray(self._draft(np.array(request.tokens, np.int32)))[:n]
            is_known = draft.ndim == 1 and (draft.dtype.kind in "iu" or not draft.size)
            if not is_known or (draft.size and not 0 <= draft.min() <= draft.max() < self._n_vocab):
                raise ArgumentError(f"draft returned {draft}; give tokens from 0 to {self._n_vocab - 1}")
            found.append(draft.tolist())
        return found


class ModelDrafts:
    """Drafts of running requests by a smaller model, whose KV cache keeps sequences of its own.

    Tokens are sampled with the options and the random numbers with which the model will sample.

    Args:
        engine: Of the smaller model.
        n_vocab: Size of the larger model's vocabulary.
        n_known: Size of its own.
    """

    def __init__(self, engine: Engine, n_vocab: int, n_known: int) -> None:
        self._engine = engine
        self._n_vocab, self._n_known = n_vocab, n_known
        assert engine.memory.cells is not None  # no model with recurrent states drafts
        self._idle = engine.memory.cells.idle
        # By the model's sequence: the smaller model's, which is idle between drafts, and its tokens.
        self._kept: dict[int, tuple[int, list[int]]] = {}

    def __call__(self, requests: Sequence[Request], counts: Sequence[int]) -> list[list[int]]:
        """Return for each request a draft of at most that many tokens; empty where there is no room."""
        with self._engine.lock:
            self._kept = {key: kept for key, kept in self._kept.items() if kept[0] in self._idle}
            busy = {request.sequence for request in requests}
            kept = [self._sequence(request, busy) for request in requests]
            for sequence, _ in kept:
                self._idle.pop(sequence, None)
            try:
                return self._draft(requests, counts, kept)
            except AllocationError:  # the device lacks room
                return [[] for _ in requests]
            finally:
                self._idle |= dict.fromkeys(sequence for sequence, tokens in kept if tokens)

    def free(self) -> None:
        """Remove the sequences of all drafts from the smaller model's KV cache."""
        with self._engine.lock, suppress(FreedError):  # the smaller model may be closed already
            while self._kept:
                self._engine.memory.remove(self._kept.popitem()[1][0])

    def _draft(
        self, requests: Sequence[Request], counts: Sequence[int], kept: Sequence[tuple[int, list[int]]]
    ) -> list[list[int]]:
        decode, drafts = self._engine.decoder.likeliest, [list[int]() for _ in requests]
        most = [len(request.tokens) + n for request, n in zip(requests, counts, strict=True)]
        if not self._engine.memory.fits(dict(zip((sequence for sequence, _ in kept), most, strict=True))):
            return drafts
        batch: list[Token] = []
        going: list[int] = []
        for i, (request, (sequence, known)) in enumerate(zip(requests, kept, strict=True)):
            tokens = request.tokens
            n = self._engine.memory.remove(sequence, n_equal(known, tokens, len(tokens) - 1))
            del known[n:]
            if max(tokens[n:]) >= self._n_known:
                continue
            new = [Token(t, sequence, j, j == len(tokens) - 1) for j, t in enumerate(tokens[n:], n)]
            known += tokens[n:]
            alone = new[:-1] if len(new) > 2 else []
            for start in range(0, len(alone), N_BATCH):
                decode(alone[start : start + N_BATCH], 0)
            batch += new[len(alone) :]
            going.append(i)
        samplers = [request.guesser() for request in requests]
        while batch:
            rows, asked = decode(batch, 0), going
            batch, going = [], []
            for row, i in zip(rows, asked, strict=True):
                if not np.isfinite(row.max()):
                    continue
                (sequence, known), draft = kept[i], drafts[i]
                token = samplers[i](row[: self._n_vocab], known)
                draft.append(token)
                if len(draft) < counts[i] and token not in requests[i].ends:
                    batch.append(Token(token, sequence, len(known), True))
                    known.append(token)
                    going.append(i)
        return drafts

    def _sequence(self, request: Request, busy: Collection[int]) -> tuple[int, list[int]]:
        """Return the sequence of a request, and its tokens: for a new request, one that it continues."""
        found = self._kept.pop(request.sequence, None)
        if found is None:
            alike = (
                (n_equal(of, request.tokens, len(of)), key)
                for key, (_, of) in self._kept.items()
                if key not in busy
            )
            n, key = max(alike, default=(0, 0))
            found = self._engine.new_sequence(), []
            if n and n > len(self._kept[key][1]) // 2:
                found = self._kept.pop(key)
        self._kept[request.sequence] = found
        return found


def check_rewinds(config: TextConfig) -> None:
    """Raise an ArgumentError if a model cannot remove rejected tokens.

    Raises:
        ArgumentError: The model has recurrent states.
    """
    if config.is_recurrent:
        raise ArgumentError(
            f"draft: a model of the architecture {config.name} has recurrent states, which cannot go back "
            "behind rejected tokens; leave out draft, or give another draft model"
        )


def check_vocabularies(vocabulary: Vocabulary, draft: Vocabulary) -> None:
    """Raise an ArgumentError if the tokens of a draft model have another meaning.

    Raises:
        ArgumentError: The vocabularies differ in more than some tokens at the end.
    """
    ours, theirs = vocabulary.tokens, draft.tokens
    n = min(len(ours), len(theirs))
    if abs(len(ours) - len(theirs)) > MAX_UNLIKE or ours[:n] != theirs[:n]:
        raise ArgumentError(
            f"draft: the vocabulary of the draft model ({len(theirs):,} tokens) is not that of the model "
            f"({len(ours):,} tokens); give a smaller model of the same family"
        )
