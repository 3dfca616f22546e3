"""Unigrams: the vocabulary of T5 and XLM-R, whose tokens are the likeliest of all that make up the text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from ggmlb.core.errors import ModelError
from ggmlb.models.gguf.merging import SPACE
from ggmlb.models.mapped_file import failing

UNUSABLE: Final = "\U0010ffff"
"""A character that no text has: tokens that are not found by their texts begin with it."""


class Unigrams:
    """Unigram language model (UGM) over a normalised text, by the library `tokenizers`.

    Args:
        tokens: Their texts; `None` for tokens that do not stand for text.
        scores: Their log-probabilities.
        unknown: The token for characters without one.
        replacements: How characters are normalised, as SentencePiece compiles it; empty for not at all.
        adds_space: Whether a text begins as if there were a space before it.
        merges_spaces: Whether spaces in a row are one.

    Raises:
        ModelError: The replacements are damaged, or `tokenizers` is not installed.

    Source: llm_tokenizer_ugm in llama.cpp's llama-vocab.cpp.
    """

    def __init__(
        self,
        tokens: Sequence[str | None],
        scores: Sequence[float],
        unknown: int,
        replacements: bytes,
        adds_space: bool,
        merges_spaces: bool,
    ) -> None:
        try:
            from tokenizers import models, normalizers
        except ImportError:
            raise ModelError("this vocabulary needs tokenizers: pip install 'ggmlb[models]'") from None
        self._adds_space = adds_space
        self._merges_spaces = merges_spaces
        self._normalizer: Any = None
        with failing("the vocabulary cannot be used"):
            texts = [f"{UNUSABLE}{i}" if text is None else text for i, text in enumerate(tokens)]
            self._model = models.Unigram(list(zip(texts, scores, strict=True)), unknown, False)
            if replacements:
                self._normalizer = normalizers.Precompiled(replacements)

    def encode(self, text: str, is_start: bool) -> list[int]:
        """Return the tokens of a text; `is_start` changes nothing here."""
        with failing("the vocabulary fails on a text"):
            found = self._model.tokenize(self._normalized(text.replace(UNUSABLE, "\ufffd")))
        return [token.id for token in found]

    def bytes_of(self, text: str) -> bytes:
        """Return the bytes that a normal token stands for."""
        return text.replace(SPACE, " ").encode()

    def _normalized(self, text: str) -> str:
        if self._normalizer is not None:
            text = self._normalizer.normalize_str(text)
        if self._merges_spaces:
            return "".join(SPACE + word for word in text.split(" ") if word)
        start = text.lstrip(" ")
        if self._adds_space and start:
            text = text[: len(text) - len(start)] + " " + start
        return text.replace(" ", SPACE)
