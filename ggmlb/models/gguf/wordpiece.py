"""WordPieces: the vocabulary of BERT, which takes the longest tokens from the left."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Mapping
from typing import Final

from ggmlb.models.gguf.merging import SPACE
from ggmlb.models.gguf.pretokenizers import is_space

MAX_LENGTH: Final = 256
"""Longest token [characters]; BERT's longest has some dozens."""

_CHINESE: Final = (
    (0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xF900, 0xFAFF), (0x20000, 0x2A6DF), (0x2A700, 0x2B81F),
    (0x2B920, 0x2CEAF), (0x2F800, 0x2FA1F),
)  # fmt: skip
"""Characters that are words of their own, from the first to the last, as BERT has them."""


class WordPieces:
    """WordPiece, the vocabulary of BERT: cuts each normalised word into the longest tokens from the left.

    Args:
        ids: Token numbers by text; tokens that begin a word begin with U+2581.
        unknown: The token for a word that tokens cannot make up; `None` leaves it out.
        lowers: Whether text becomes lower case.
        strips_accents: Whether accents are removed.

    Source: llm_tokenizer_wpm in llama.cpp's llama-vocab.cpp, but for accents, which are left out as by BERT:
    the marks beside letters of Indian scripts stay, and so do the vowels of Hangul.
    """

    def __init__(
        self, ids: Mapping[str, int], unknown: int | None, lowers: bool, strips_accents: bool
    ) -> None:
        self._ids = ids
        self._unknown = [] if unknown is None else [unknown]
        self._lowers = lowers
        self._strips_accents = strips_accents
        self._longest = min(max(map(len, ids)), MAX_LENGTH)

    def encode(self, text: str, is_start: bool) -> list[int]:
        """Return the tokens of a text; `is_start` has no effect."""
        return [token for word in self._words(text) for token in self._pieces(SPACE + word)]

    def bytes_of(self, text: str) -> bytes:
        """Return the bytes of a normal token (no control or byte token); `text`: its vocabulary entry."""
        return text.replace(SPACE, " ").encode()

    def _words(self, text: str) -> Iterator[str]:
        if self._strips_accents:
            # One by one: normalising a whole text sorts marks, in time quadratic in their number.
            text = "".join(unicodedata.normalize("NFD", character) for character in text)
        word = ""
        for character in text:
            category = unicodedata.category(character)
            if is_space(character):
                if word:
                    yield word
                word = ""
                continue
            is_control = category in ("Cc", "Cf", "Cs", "Co") or character in "\0\ufffd"
            if is_control or (self._strips_accents and category == "Mn"):
                continue
            lowered = character.lower() if self._lowers else character
            if _stands_alone(character, category):
                if word:
                    yield word
                yield lowered
                word = ""
            else:
                word += lowered
        if word:
            yield word

    def _pieces(self, word: str) -> list[int]:
        tokens = []
        start = 0
        while start < len(word):
            for end in range(min(len(word), start + self._longest), start, -1):
                token = self._ids.get(word[start:end])
                if token is not None:
                    tokens.append(token)
                    start = end
                    break
            else:
                return self._unknown
        return tokens


def _stands_alone(character: str, category: str) -> bool:
    code = ord(character)
    is_symbol = category[0] == "P" or (category[0] == "S" and code < 0x7F)
    return is_symbol or any(first <= code <= last for first, last in _CHINESE)
