"""Tokenizer of BERT models, and batches of texts with little padding."""

from __future__ import annotations

import json
from base64 import b64decode
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ggmlb.core.errors import ModelError
from ggmlb.models.mapped_file import failing

Tokens = npt.NDArray[np.int32]

Shape = tuple[int, int]
"""Shape of a batch: padded length and number of texts."""

MAX_WORD = 256
"""Longest word that WordPiece may cut [characters], as its time is cubic; BERT has 100."""

MAX_GROWTH = 1 << 10
"""Largest growth of a text by a normaliser, in characters per character; known ones have some dozens."""

BATCH_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Allowed numbers of texts per batch: few, so that graphs of earlier batches are reused."""

LENGTH_STEP = 4
"""Padded lengths are multiples of this, for the same reason; that of a single text, of half of it."""

BATCH_OVERHEAD = 24
"""Cost of an additional batch, in computed tokens."""

NEW_SHAPE = 1.1
"""Cost factor of a batch shape that has no graph yet."""


_OF_THE_MODEL = "use the tokenizer.json that came with the model"


class Tokenizer:
    """Splits texts into a model's tokens.

    Args:
        path: A `tokenizer.json`.
        n_max: Longest sequence including special tokens; longer ones are truncated.
        n_vocab: Number of the model's token embeddings.

    Raises:
        ModelError: The file is not a tokenizer, or one of another model, or `tokenizers` is not installed.
    """

    def __init__(self, path: Path, n_max: int, n_vocab: int) -> None:
        try:
            import tokenizers
        except ImportError:
            raise ModelError(f"reading {path} needs tokenizers: pip install 'ggmlb[models]'") from None
        self._path = path
        self._n_max = n_max
        self._n_vocab = n_vocab
        with failing(f"{path} is not a tokenizer"):
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
            last = max(self._tokenizer.get_vocab().values(), default=0)
        if last >= n_vocab:
            raise ModelError(
                f"{path} numbers tokens up to {last}, but config.json says that the model has {n_vocab}; "
                "use the tokenizer.json that came with the model"
            )
        with failing(f"{path} has a wrong normalizer"):
            normalizer = self._tokenizer.normalizer
            growth = 1 if normalizer is None else _growth(json.loads(normalizer.__getstate__()))
        if growth > MAX_GROWTH:
            raise ModelError(
                f"{path}: its normalizer turns one character into up to {growth:,}; at most {MAX_GROWTH:,} "
                f"are supported: {_OF_THE_MODEL}"
            )
        if (longest := getattr(self._tokenizer.model, "max_input_chars_per_word", 0)) > MAX_WORD:
            raise ModelError(
                f"{path}: max_input_chars_per_word is {longest}; at most {MAX_WORD} is possible: "
                + _OF_THE_MODEL
            )
        with failing(f"{path} cannot be used"):
            self._tokenizer.no_padding()
            self._tokenizer.enable_truncation(n_max)
        self([""])  # only special tokens

    def __call__(self, texts: Sequence[str]) -> list[Tokens]:
        """Return the token numbers of each text, with the model's special tokens.

        Raises:
            ModelError: The tokenizer fails (for example, without a special token), or returns no tokens,
                too many, or one without an embedding.
        """
        with failing(f"{self._path} fails on a text", cure=_OF_THE_MODEL):
            encoded = self._tokenizer.encode_batch_fast(list(texts))
        return [self._checked(np.array(e.ids, np.int64)) for e in encoded]

    def _checked(self, ids: npt.NDArray[np.int64]) -> Tokens:
        if not 1 <= ids.size <= self._n_max:
            found = f"it makes {ids.size} tokens of a text; the model takes 1 to {self._n_max}"
        elif ids.max() >= self._n_vocab:
            found = f"it gives the token {ids.max()}; config.json says that the model has {self._n_vocab}"
        else:
            return ids.astype(np.int32)
        raise ModelError(f"{self._path}: {found}: {_OF_THE_MODEL}")


def _growth(normalizer: Mapping[str, Any]) -> int:
    """Return the largest number of characters that a normaliser makes of one.

    Not counted are those whose factor is small and the same in all files (NFKD: 18).
    """
    size = 1
    for step in normalizer.get("normalizers", [normalizer]):
        match step:
            case {"type": "Sequence"}:
                size *= _growth(step)
            case {"type": "Replace", "pattern": {"String": str(pattern)}, "content": str(content)} if pattern:
                size *= max(1, -(-len(content) // len(pattern)))
            case {"type": "Replace", "content": str(content)}:  # it may match between any characters
                size *= 1 + len(content)
            case {"type": "Prepend", "prepend": str(content)}:
                size += len(content)
            case {"type": "Precompiled", "precompiled_charsmap": str(content)}:
                raw = b64decode(content)
                texts = raw[4 + int.from_bytes(raw[:4], "little") :].split(b"\0")
                size *= max(1, *map(len, texts))
    return size


class Batch(NamedTuple):
    """A batch of texts, given by their indices, and their padded length.

    Attributes:
        members: Indices of the texts.
        n_tokens: Padded length of each.
    """

    members: npt.NDArray[np.intp]
    n_tokens: int


def plan_batches(
    lengths: Sequence[int], most: int, n_max: int, planned: Collection[Shape] = ()
) -> list[Batch]:
    """Group texts by length in batches of at most `most`, of least cost (padding, graphs not yet `planned`).

    Texts are sorted by length and cut into runs by dynamic programming: the least cost of the first `i`
    texts is that of the first `i - k` plus a batch of the next `k`, minimised over `k`.

    Args:
        lengths: Tokens of each text.
        most: Most texts in a batch.
        n_max: Longest sequence of the model.
        planned: Shapes with cached graphs and plans.

    Returns:
        The batches, longest texts last.
    """

    @cache
    def batch_cost(size: int, longest: int) -> tuple[float, int]:
        """Return cost and padded length of a batch of `size` texts, the longest of `longest` tokens."""
        new = min(padded(longest, size), n_max)
        fits = [(float(size * n), n) for n, n_texts in planned if n_texts == size and n >= longest]
        return min([*fits, (size * new * NEW_SHAPE, new)])

    order = np.argsort(lengths, kind="stable")
    sizes = [k for k in BATCH_SIZES if k < most] + [most]
    best = [(0.0, 0, 0)]  # cost of the first texts; size and length of the last batch of them
    for end, i in enumerate(order, 1):
        choices = ((k, *batch_cost(k, int(lengths[i]))) for k in sizes if k <= end)
        best.append(min((best[end - k][0] + cost + BATCH_OVERHEAD, k, n) for k, cost, n in choices))
    batches = []
    end = len(order)
    while end:
        _, size, n_tokens = best[end]
        batches.append(Batch(order[end - size : end], n_tokens))
        end -= size
    return batches[::-1]


def padded(length: int, n_texts: int) -> int:
    """Return the padded length of a batch of `n_texts` texts, the longest of which has `length` tokens."""
    step = LENGTH_STEP // 2 if n_texts == 1 else LENGTH_STEP
    return -(-length // step) * step
