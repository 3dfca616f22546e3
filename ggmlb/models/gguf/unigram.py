"""Unigrams: the vocabulary of T5 and XLM-R, which splits a text into its most likely tokens."""

from __future__ import annotations

from collections.abc import Sequence
from struct import unpack_from
from typing import Final

from ggmlb.core.errors import ModelError
from ggmlb.models.gguf.merging import SPACE
from ggmlb.models.mapped_file import failing

UNUSABLE: Final = "\U0010ffff"
"""A character that no text has: tokens that are not found by their texts begin with it."""

MAX_REPLACEMENT: Final = 256
"""Longest text that a character is replaced by [bytes]; the longest known has 33."""

MAX_REPLACED: Final = 128
"""Longest text that is replaced [bytes]; a longer match means damage."""


class Unigrams:
    """Unigram language model (UGM) over a normalised text, by the library `tokenizers`.

    Args:
        tokens: Their texts; `None` for tokens without text.
        scores: Their log-probabilities.
        unknown: The token for characters without one.
        replacements: Bytes of `precompiled_charsmap`; empty for no normalisation.
        adds_space: Whether a text begins as if there were a space before it.
        merges_spaces: Whether runs of spaces become one space.

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
            from tokenizers import models
        except ImportError:
            raise ModelError("this vocabulary needs tokenizers: pip install 'ggmlb[models]'") from None
        self._adds_space = adds_space
        self._merges_spaces = merges_spaces
        self._replacements = Replacements(replacements) if replacements else None
        with failing("the vocabulary cannot be used"):
            texts = [f"{UNUSABLE}{i}" if text is None else text for i, text in enumerate(tokens)]
            self._model = models.Unigram(list(zip(texts, scores, strict=True)), unknown, False)

    def encode(self, text: str, is_start: bool) -> list[int]:
        """Return the tokens of a text; `is_start` has no effect."""
        with failing("the vocabulary fails on a text"):
            found = self._model.tokenize(self._normalized(text.replace(UNUSABLE, "\ufffd")))
        return [token.id for token in found]

    def bytes_of(self, text: str) -> bytes:
        """Return the bytes of a normal token (no control or byte token); `text`: its vocabulary entry."""
        return text.replace(SPACE, " ").encode()

    def _normalized(self, text: str) -> str:
        if self._replacements is not None:
            text = self._replacements.apply(text)
        if self._merges_spaces:
            return "".join(SPACE + word for word in text.split(" ") if word)
        start = text.lstrip(" ")
        if self._adds_space and start:
            text = text[: len(text) - len(start)] + " " + start
        return text.replace(" ", SPACE)


class Replacements:
    """Normalisation rules of SentencePiece (`precompiled_charsmap`): the longest match is replaced.

    A double-array trie of 32-bit units, then zero-terminated replacements. `tokenizers` can apply them too,
    but drops combining marks after a replaced character.

    Args:
        raw: The bytes of `precompiled_charsmap`.

    Raises:
        ModelError: It is damaged.
    """

    def __init__(self, raw: bytes) -> None:
        nbytes = int.from_bytes(raw[:4], "little")
        if len(raw) < 4 or nbytes % 4 or nbytes > len(raw) - 4:
            raise ModelError(
                f"a trie of {nbytes:,} bytes does not fit its {len(raw):,} bytes; download the file again"
            )
        self._units = unpack_from(f"<{nbytes // 4}I", raw, 4)
        self._texts = raw[4 + nbytes :]

    def apply(self, text: str) -> str:
        """Return a text normalised by the rules: the longest match at each place is replaced.

        Raises:
            ModelError: The replacements are damaged.
        """
        data = text.encode()
        found = []
        at = 0
        try:
            while at < len(data):
                length, start = self._longest(data, at)
                if length:
                    found.append(self._texts[start : self._texts.index(0, start, start + MAX_REPLACEMENT)])
                else:
                    length = 1
                    while at + length < len(data) and data[at + length] & 0xC0 == 0x80:
                        length += 1
                    found.append(data[at : at + length])
                at += length
        except (IndexError, ValueError):
            raise ModelError(
                "precompiled_charsmap is damaged: a rule points outside it, or replaces more than "
                f"{MAX_REPLACED} bytes; download the model again"
            ) from None
        return b"".join(found).decode("utf-8", "replace")

    def _longest(self, data: bytes, at: int) -> tuple[int, int]:
        """Return the length of the longest match [bytes], 0 for none, and where its replacement begins."""
        units = self._units
        length = start = 0
        node = _base(units[0])
        for i in range(at, len(data)):
            if i - at == MAX_REPLACED:
                raise IndexError
            byte = data[i]
            node ^= byte
            unit = units[node]
            if byte == 0 or unit & 0x800000FF != byte:
                break
            node ^= _base(unit)
            if unit & 0x100:
                length, start = i - at + 1, units[node] & 0x7FFFFFFF
        return length, start


def _base(unit: int) -> int:
    return (unit >> 10) << ((unit & 0x200) >> 6)
