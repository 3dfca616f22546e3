"""LongestTokens: the vocabulary of RWKV, which takes the longest token from the left."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from typing import Final

MAX_LENGTH: Final = 256
"""Longest token [bytes]; RWKV's longest has 128."""

_ESCAPES: Final = {b"t": b"\t", b"n": b"\n", b"r": b"\r"}


class LongestTokens:
    """The vocabulary of RWKV: cuts the bytes of a text into the longest tokens from the left.

    Args:
        ids: Token numbers by text, in which bytes are written as in a `bytes` literal of Python.
        unknown: The token for a byte with which no token begins; `None` leaves it out.

    Source: llm_tokenizer_rwkv in llama.cpp's llama-vocab.cpp.
    """

    def __init__(self, ids: Mapping[str, int], unknown: int | None) -> None:
        found = {self.bytes_of(text): token for text, token in ids.items()}
        self._ids = {piece: token for piece, token in found.items() if len(piece) <= MAX_LENGTH}
        self._unknown = [] if unknown is None else [unknown]
        lengths: dict[bytes, set[int]] = defaultdict(set)
        for piece in self._ids:
            lengths[piece[:2]].add(len(piece))
        self._lengths = {start: sorted(of_start, reverse=True) for start, of_start in lengths.items()}

    def encode(self, text: str, is_start: bool) -> list[int]:
        """Return the tokens of a text; `is_start` has no effect."""
        data, at, found = text.encode(), 0, list[int]()
        while at < len(data):
            for length in (*self._lengths.get(data[at : at + 2], ()), 1):
                piece = data[at : at + length]
                if (token := self._ids.get(piece)) is not None:
                    found.append(token)
                    break
            else:
                found += self._unknown
            at += len(piece)
        return found

    def bytes_of(self, text: str) -> bytes:
        """Return the bytes of a normal token; `text`: its vocabulary entry."""
        return re.sub(rb"(?s)\\(?:x([0-9a-f]{2})|(.?))", _unescaped, text.encode())


def _unescaped(found: re.Match[bytes]) -> bytes:
    if found[1] is not None:
        return bytes.fromhex(found[1].decode())
    return _ESCAPES.get(found[2], found[2])
