r"""Pre-tokenizers of byte pair encoding: the regular expressions that cut a text into words.

A vocabulary names its own by `tokenizer.ggml.pre`. Python's `re` has no Unicode categories (`\p{L}`), and
tables of them take long to build. So a text is matched in a short form: ASCII as it is, and every other
character replaced by one that stands for its category.

Source: llm_tokenizer_bpe in llama.cpp's llama-vocab.cpp, which matches in the same way. Where its expressions
are simpler than the model's own (upper and lower case beyond ASCII, marks), the model's stand here.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from functools import lru_cache
from typing import Final, NamedTuple

from ggmlb.core.errors import ModelError, did_you_mean, shown

# -- categories ------------------------------------------------------------------------------------

_ASCII: Final = {
    "Lu": "A-Z", "Ll": "a-z", "N": "0-9",
    "P": r"!-#%-*,-/:;?@\[-\]_{}", "S": r"$+<=>\^`|~",
}  # fmt: skip

_STAND_INS: Final = dict(
    zip(("Lu", "Ll", "Lt", "Lm", "Lo", "N", "P", "M", "S"), map(chr, range(0xE000, 0xE009)), strict=True)
)
"""The character that stands for each category, from a private area of Unicode."""

_OTHER: Final = "\ue0ff"

_SPACES: Final = " \t-\r\x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
"""White space, as members of a bracket."""

_IS_SPACE: Final = re.compile(f"[{_SPACES}]").match


class _ShortForm(dict[int, str]):
    """A table for `str.translate`, filled when a character is first met."""

    def __missing__(self, code: int) -> str:
        character = chr(code)
        category = unicodedata.category(character)
        is_kept = code < 128 or _IS_SPACE(character)
        found = character if is_kept else _STAND_INS.get(category) or _STAND_INS.get(category[0], _OTHER)
        self[code] = found
        return found


_SHORT_FORM: Final = _ShortForm()

_PARTS: Final = re.compile(r"\\p\{(?P<category>\w+)\}|\\[sS]|\\.|.", re.DOTALL)


def _members(category: str) -> str:
    """Return the characters of a category as members of a bracket: ASCII, and what stands for the others."""
    return "".join(
        _ASCII.get(name, "") + stand_in for name, stand_in in _STAND_INS.items() if name.startswith(category)
    )


@lru_cache(256)
def _compiled(pattern: str) -> re.Pattern[str]:
    """Compile an expression after writing out its categories and white space."""
    parts = []
    is_inside = False
    for found in _PARTS.finditer(pattern):
        part = found[0]
        if found["category"] or part == r"\s":
            members = _members(found["category"]) if found["category"] else _SPACES
            part = members if is_inside else f"[{members}]"
        elif part == r"\S":
            part = f"[^{_SPACES}]"
        elif part in "[]":
            is_inside = part == "["
        parts.append(part)
    return re.compile("".join(parts))


# -- expressions -----------------------------------------------------------------------------------

_GPT2: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_DIGIT: Final = r"\p{N}"
_THREE_DIGITS: Final = "[0-9][0-9][0-9]"


class PreTokenizer(NamedTuple):
    """How a vocabulary cuts texts into words.

    Attributes:
        patterns: Expressions, each applied to what those before it have left: matches and the gaps between
            them are words.
        is_byte_level: Whether words are merged byte by byte; else in characters, with the space as U+2581.
        ignores_merges: Whether a word that is a token needs no merges.
        keeps_newlines: The same for words of newlines alone.
        adds_bos: Whether a text begins with the BOS token if the file does not say.
    """

    patterns: tuple[str, ...]
    is_byte_level: bool = True
    ignores_merges: bool = False
    keeps_newlines: bool = False
    adds_bos: bool = False

    def split(self, text: str) -> list[str]:
        """Return the words of a text; they are the text when joined."""
        short = text if text.isascii() else text.translate(_SHORT_FORM)
        ends = [len(text)]
        for pattern in self.patterns:
            ends = list(_ends(_compiled(pattern), short if r"\p" in pattern else text, ends))
        starts = [0, *ends[:-1]]
        return [text[start:end] for start, end in zip(starts, ends, strict=True) if end > start]


def _ends(expression: re.Pattern[str], text: str, ends: list[int]) -> Iterator[int]:
    """Cut each piece of a text at the matches within it; yield where the new pieces end."""
    start = 0
    for end in ends:
        # Look-arounds must not see beyond the piece, hence a slice unless it is the whole text.
        piece = text if end - start == len(text) else text[start:end]
        for found in expression.finditer(piece):
            first, last = found.span()
            if first > 0:
                yield start + first
            if last > first:
                yield start + last
        yield end
        start = end


_LEAVING_DIGITS: Final = PreTokenizer((_DIGIT, _GPT2))

PRE_TOKENIZERS: Final = {
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", _THREE_DIGITS)),
    "gpt-2": PreTokenizer((_GPT2,)),
    "smollm": _LEAVING_DIGITS,
}
"""Pre-tokenizers by the names that files give them."""


def pre_tokenizer(name: str) -> PreTokenizer:
    """Return a pre-tokenizer by its name.

    Raises:
        ModelError: There is none of this name.
    """
    try:
        return PRE_TOKENIZERS[name]
    except KeyError:
        known = ", ".join(sorted(PRE_TOKENIZERS))
        told = did_you_mean(name, PRE_TOKENIZERS) if len(PRE_TOKENIZERS) > 60 else ""
        raise ModelError(f"unknown pre-tokenizer {shown(name)!r}{told}; known: {known}") from None
