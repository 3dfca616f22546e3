"""Vocabularies that merge neighbouring pieces: byte pair encoding (BPE) and SentencePiece (SPM).

Both start from characters and merge, again and again, the pair of neighbours with the lowest rank. In BPE the
rank of a pair is its place in the list of merges; in SPM it is the score of the merged token, negated.

Source: llm_tokenizer_bpe and llm_tokenizer_spm in llama.cpp's llama-vocab.cpp. `tokenizers` has the same
algorithms, but takes 0.2 to 1 s to build a vocabulary, which here is two dictionaries.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, lru_cache
from heapq import heapify, heappop, heappush
from typing import Final

from ggmlb.models.gguf.pretokenizers import PreTokenizer

Rank = Callable[[str, str], "float | None"]
"""Rank of a pair of neighbours; `None` if they do not merge."""

SPACE: Final = "\u2581"
"""The character for a space in tokens of SentencePiece."""

CACHED_WORDS: Final = 1 << 14
CACHED_LENGTH: Final = 64
"""Longest word whose tokens are cached [characters]."""


def merge(pieces: list[str], rank: Rank) -> list[str]:
    """Merge neighbouring strings, lowest `rank` first and leftmost of equals, until no pair has a rank.

    It takes O(n log n) for n pieces.

    Args:
        pieces: Not empty strings; the list is used up.
        rank: Called with each pair of neighbours.
    """
    n = len(pieces)
    before = list(range(-1, n - 1))
    after = [*range(1, n), -1]
    heap = []
    for i in range(n - 1):
        value = rank(pieces[i], pieces[i + 1])
        if value is not None:
            heap.append((value, i, len(pieces[i]) + len(pieces[i + 1])))
    heapify(heap)
    while heap:
        _, i, length = heappop(heap)
        left, j = pieces[i], after[i]
        # A pair whose left or right part has merged with another piece since then has another length.
        if not left or j < 0 or len(left) + len(pieces[j]) != length:
            continue
        left = pieces[i] = left + pieces[j]
        pieces[j] = ""
        following = after[i] = after[j]
        if following >= 0:
            before[following] = i
            value = rank(left, pieces[following])
            if value is not None:
                heappush(heap, (value, i, len(left) + len(pieces[following])))
        previous = before[i]
        if previous >= 0:
            value = rank(pieces[previous], left)
            if value is not None:
                heappush(heap, (value, previous, len(pieces[previous]) + len(left)))
    return [piece for piece in pieces if piece]


# -- bytes as printable characters, as GPT-2 has them ----------------------------------------------


def _printable_bytes() -> dict[int, str]:
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in kept]
    return {byte: chr(byte) for byte in kept} | {byte: chr(256 + i) for i, byte in enumerate(moved)}


_CHARACTER_OF: Final = _printable_bytes()
_BYTES_OF: Final = {ord(character): bytes([byte]) for byte, character in _CHARACTER_OF.items()}


def printable(text: str) -> str:
    """Return a text's UTF-8 bytes, each as the character of GPT-2's byte encoding."""
    return text.encode().decode("latin-1").translate(_CHARACTER_OF)


def from_printable(text: str) -> bytes:
    """Return the bytes that a text in GPT-2's byte encoding stands for; other characters become UTF-8."""
    return b"".join(_BYTES_OF.get(ord(c)) or c.encode() for c in text)


# -- BPE and SPM ---------------------------------------------------------------------------------


class BytePairs:
    """Byte pair encoding: regular expressions cut a text into words, and merges join pieces within a word.

    Args:
        ids: Token numbers by text.
        merges: Returns pairs `"left right"`, in the order of their ranks; of equal ones the first counts.
            Called when a text is first encoded.
        pre: How texts are cut into words.
    """

    def __init__(
        self, ids: Mapping[str, int], merges: Callable[[], Sequence[str]], pre: PreTokenizer
    ) -> None:
        self._ids = ids
        self._merges = merges
        self._pre = pre
        self._cached = lru_cache(CACHED_WORDS)(self._word)

    @cached_property
    def _ranks(self) -> dict[str, int]:
        merges = self._merges()
        return dict(zip(reversed(merges), range(len(merges) - 1, -1, -1), strict=True))

    def encode(self, text: str, is_start: bool) -> list[int]:
        """Return the tokens of a text; `is_start` has no effect."""
        if self._pre.is_byte_level:
            words = [printable(word) for word in self._pre.split(text)]
        else:
            words = self._pre.split(text.replace(" ", SPACE))
        tokens: list[int] = []
        for word in words:
            tokens += self._cached(word) if len(word) <= CACHED_LENGTH else self._word(word)
        return tokens

    def bytes_of(self, text: str) -> bytes:
        """Return the bytes of a normal token (no control or byte token); `text`: its vocabulary entry."""
        return from_printable(text) if self._pre.is_byte_level else text.replace(SPACE, " ").encode()

    def _word(self, word: str) -> tuple[int, ...]:
        ids, ranks = self._ids, self._ranks
        if word in ids and (self._pre.ignores_merges or (self._pre.keeps_newlines and not word.strip("\n"))):
            return (ids[word],)
        tokens: list[int] = []
        for piece in merge(list(word), lambda left, right: ranks.get(f"{left} {right}")):
            if piece in ids:
                tokens.append(ids[piece])
            else:
                tokens += self._fallback(piece)
        return tuple(tokens)

    def _fallback(self, piece: str) -> list[int]:
        """Return the byte tokens of a piece that is no token, as far as there are any."""
        names = piece if self._pre.is_byte_level else (f"<0x{byte:02X}>" for byte in piece.encode())
        return [self._ids[name] for name in names if name in self._ids]


class SentencePieces:
    """SentencePiece with scores: merges over the whole text, bytes for characters without a token.

    Args:
        ids: Token numbers by text.
        scores: Score of each token by number: the highest merges first.
        unknown: The token for bytes without a token; `None` leaves them out.
        adds_space: Whether a text begins as if there were a space before it.
    """

    def __init__(
        self, ids: Mapping[str, int], scores: Sequence[float], unknown: int | None, adds_space: bool
    ) -> None:
        self._ids = ids
        self._scores = scores
        self._unknown = unknown
        self._adds_space = adds_space
        self._cached = lru_cache(CACHED_WORDS)(self._word)

    def encode(self, text: str, is_start: bool) -> list[int]:
        """Return the tokens of a text; `is_start` means that no other text precedes it."""
        text = text.replace(" ", SPACE)
        if self._adds_space and is_start:
            text = SPACE + text
        tokens: list[int] = []
        for word in self._borders.split(text):
            tokens += self._cached(word) if len(word) <= CACHED_LENGTH else self._word(word)
        return tokens

    def bytes_of(self, text: str) -> bytes:
        """Return the bytes of a normal token (no control or byte token); `text`: its vocabulary entry."""
        return text.replace(SPACE, " ").encode()

    @cached_property
    def _borders(self) -> re.Pattern[str]:
        """Return the positions before a space that no token spans, at which words are independent."""
        crossed = {*re.findall(f"([^{SPACE}\0]){SPACE}", "\0".join(self._ids)), "\0", SPACE}
        return re.compile(f"(?<=[^{''.join(map(re.escape, sorted(crossed)))}])(?={SPACE})")

    def _rank(self, left: str, right: str) -> float | None:
        token = self._ids.get(left + right)
        return None if token is None else -self._scores[token]

    def _word(self, word: str) -> tuple[int, ...]:
        tokens: list[int] = []
        for piece in merge(list(word), self._rank):
            token = self._ids.get(piece)
            if token is not None:
                tokens.append(token)
            else:
                tokens += self._fallback(piece)
        return tuple(tokens)

    def _fallback(self, character: str) -> list[int]:
        found = (self._ids.get(f"<0x{byte:02X}>", self._unknown) for byte in character.encode())
        return [token for token in found if token is not None]
