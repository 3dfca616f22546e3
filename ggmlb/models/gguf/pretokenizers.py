r"""Pre-tokenizers of byte pair encoding: the regular expressions that cut a text into words.

A vocabulary names its own by `tokenizer.ggml.pre`. Python's `re` has no Unicode categories (`\p{L}`), and
tables of them take long to build. So a text is matched in a short form: ASCII as it is, and every other
character replaced by one that stands for its category. Time is linear in a text's length: no
expression scans a run of characters again from each of its positions.

Source: llm_tokenizer_bpe in llama.cpp's llama-vocab.cpp, which matches in the same way. Where it
simplifies a model's expressions (case beyond ASCII, combining marks), the model's own are used here.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from functools import lru_cache
from typing import Final, NamedTuple

from ggmlb.core.errors import ModelError, shown

# -- categories ------------------------------------------------------------------------------------

_ASCII: Final = {
    "Lu": "A-Z", "Ll": "a-z", "N": "0-9",
    "P": r"!-#%-*,-/:;?@\[-\]_{}", "S": r"$+<=>\^`|~",
}  # fmt: skip

_CATEGORIES: Final = ("Lu", "Ll", "Lt", "Lm", "LoHan", "LoRest", "N", "P", "M", "S")
"""Unicode's, but `Lo` in two: Chinese characters and the rest."""

_STAND_INS: Final = {name: chr(0xE000 + i) for i, name in enumerate(_CATEGORIES)}
"""A private-use character for each category."""

_OTHER: Final = "\ue0ff"

_SPACES: Final = " \t-\r\x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
"""White space, for a bracket expression."""

_SPACE: Final = re.compile(f"[{_SPACES}]")


class _ShortForm(dict[int, str]):
    """A table for `str.translate`, filled when a character is first met."""

    def __missing__(self, code: int) -> str:
        character = chr(code)
        category = unicodedata.category(character)
        is_kept = code < 128 or is_space(character)
        if category == "Lo":
            is_chinese = unicodedata.name(character, "").startswith(("CJK UNIFIED", "CJK COMPATIBILITY"))
            category = "LoHan" if is_chinese else "LoRest"
        found = character if is_kept else _STAND_INS.get(category) or _STAND_INS.get(category[0], _OTHER)
        self[code] = found
        return found


_SHORT_FORM: Final = _ShortForm()


def is_space(character: str) -> bool:
    """Return whether a character is white space."""
    return _SPACE.match(character) is not None


_PARTS: Final = re.compile(r"\\p\{(?P<category>\w+)\}|\\[sS]|\\.|.", re.DOTALL)


def _members(category: str) -> str:
    """Return a category for a bracket expression: ASCII characters, and its private-use character.

    A name stands for all categories that begin with it, as in Unicode: `L` for all letters.
    """
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

_SUFFIXES: Final = "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_PUNCTUATION: Final = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_SPACE_RUNS: Final = r"\s*[\r\n]+|\s+(?!\S)|\s+"

_GPT2: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"


def _gpt4(digits: str, suffixes: str = _SUFFIXES + "|", letters: str = r"\p{L}") -> str:
    """Return the expression of GPT-4 (`cl100k_base`): words with the character before them, short numbers."""
    word = rf"[^\r\n\p{{L}}\p{{N}}]?[{letters}]+"
    return rf"{suffixes}{word}|{digits}| ?[^\s{letters}\p{{N}}]+[\r\n]*|{_SPACE_RUNS}"


def _gpt4o(digits: str, suffixes: str, caseless: str = r"\p{Lm}\p{Lo}\p{M}", ends: str = r"\r\n/") -> str:
    """Return the expression of GPT-4o (`o200k_base`): words also end where upper case begins."""
    upper, lower = rf"[\p{{Lu}}\p{{Lt}}{caseless}]", rf"[\p{{Ll}}{caseless}]"
    before = r"[^\r\n\p{L}\p{N}]?"
    words = f"{before}{upper}*{lower}+{suffixes}|{before}{upper}+{lower}*{suffixes}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[{ends}]*|{_SPACE_RUNS}"


_LLAMA3: Final = _gpt4(r"\p{N}{1,3}")
_QWEN2: Final = _gpt4(r"\p{N}")
_GPT4O: Final = _gpt4o(r"\p{N}{1,3}", _SUFFIXES + "?")

_CHINESE_JAPANESE: Final = r"[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_DEEPSEEK_WORDS: Final = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
)
_DEEPSEEK: Final = rf"{_DEEPSEEK_WORDS}| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACE_RUNS}"
_EAST_ASIAN: Final = r"[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_BLOOM: Final = r" ?[^(\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_DIGITS_FROM_RIGHT: Final = (r"\p{N}+", r"\A\p{N}{1,2}(?=(?:\p{N}{3})+\Z)|\p{N}{1,3}")
"""Runs of digits, then groups of three in each, counted from its end."""

_THREES: Final = (r"(?<![0-9]{3})(?=(?:[0-9]{3})+(?![0-9]))", r"[0-9]{3}(?=[0-9])")
"""`(?=(?:[0-9]{3})+(?![0-9]))`, which takes the square of a run's length: first where the groups of three of
each run begin, then each group but the last."""

_LINES: Final = r"[^\n]+|\n+"

_CASED: Final = (
    r"A-Za-z"
    r"\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    r"\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481"
    r"\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf"
    r"\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d"
    r"\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4"
    r"\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107"
    r"\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f"
    r"\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d"
    r"\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17"
    r"\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb"
    r"\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
"""Letters that have a case, as DeepSeek lists them, for a bracket expression."""


class PreTokenizer(NamedTuple):
    """Splits texts into words.

    Attributes:
        patterns: Expressions; each splits the pieces left by earlier ones into matches and the gaps
            between them.
        is_byte_level: Whether words are merged byte by byte; else in characters, with the space as U+2581.
        ignores_merges: Whether a word that is a token needs no merges.
        keeps_newlines: The same for words of newlines alone.
        adds_bos: Whether a text begins with the BOS token if the file does not say.
        always_adds_bos: The same, whatever the file says.
    """

    patterns: tuple[str, ...]
    is_byte_level: bool = True
    ignores_merges: bool = False
    keeps_newlines: bool = False
    adds_bos: bool = False
    always_adds_bos: bool = False

    def split(self, text: str) -> list[str]:
        """Return the words of a text; joined, they give the text."""
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


def _table() -> dict[str, PreTokenizer]:
    """Return the pre-tokenizers by their names in files."""

    def of(*patterns: str, **flags: bool) -> PreTokenizer:
        return PreTokenizer(patterns, **flags)

    by_names = {
        "default": of(r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
        "gpt-2 phi-2 jina-es jina-de jina-v1-en jina-v2-es jina-v2-de jina-v2-code roberta-bpe gigachat "
        "a.x-4.0 mellum modern-bert exaone4 mpt olmo jais trillion granite-docling": of(_GPT2),
        "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2": of(r"\p{N}", _GPT2),
        "falcon": of(r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]"),
        "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano": of(
            _LLAMA3, ignores_merges=True, adds_bos=True
        ),
        "dbrx smaug-bpe chatglm-bpe": of(_LLAMA3),
        "glm4 glm5": of(_LLAMA3, ignores_merges=True),
        "minicpm5": of(r"\p{N}{1,3}", _gpt4(r"\p{N}+"), ignores_merges=True),
        "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2": of(_QWEN2),
        "qwen35": of(_gpt4(r"\p{N}", letters=r"\p{L}\p{M}")),
        "laguna": of(_LINES, _QWEN2),
        "ufakzeka": of(_gpt4(r"\p{N}", suffixes="")),
        "seed-coder": of(_QWEN2.replace(_PUNCTUATION, r" ?[^\s\p{L}\p{N}\r\n]+")),
        "bailingmoe bailingmoe2 llada-moe": of(_QWEN2.replace(r"\s*[\r\n]+", r"\s*[\r\n]")),
        "exaone-moe": of(
            rf"{_SUFFIXES}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
            r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
        ),
        "jais-2": of(
            _LLAMA3.removesuffix(r"\s+(?!\S)|\s+")
            + "".join(rf"\s{{{n}}}(?!\S)|" for n in (512, 256, 128, 64, 32, 16, 8, 4))
            + r"\s{1,2}(?!\S)|\s"
        ),
        "gpt-4o llama4 kanana2 talkie minimax-m2": of(_GPT4O),
        "granite-embed-multi-97m": of(_GPT4O, ignores_merges=True),
        "tekken": of(_gpt4o(r"\p{N}", ""), ignores_merges=True, adds_bos=True),
        "kimi-k2": of(
            r"\p{LoHan}+|"
            + _gpt4o(r"\p{N}{1,3}", _SUFFIXES + "?", r"\p{Lm}\p{LoRest}\p{M}", r"\r\n")
        ),
        "tiny_aya cohere2moe": of(*_DIGITS_FROM_RIGHT, _GPT4O),
        "youtu": of(
            r"[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c"
            r"\u3001-\u303f\ufe30-\ufe4f]+|[\u3105-\u312f]+|" + _CHINESE_JAPANESE,
            _gpt4o(r"\p{N}", _SUFFIXES + "?"),
            ignores_merges=True,
        ),
        "deepseek-llm": of(
            r"[\r\n]", rf"\s?[{_CASED}]+",
            r"\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
            r"(?<!\s)\s+\Z", _EAST_ASIAN, r"\p{N}+",
        ),
        "deepseek-coder": of(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _EAST_ASIAN, r"\p{N}"),
        "deepseek-v3 hunyuan-dense joyai-llm hy_v4": of(r"\p{N}{1,3}", _CHINESE_JAPANESE, _DEEPSEEK),
        "spark2_5": of(
            r"\p{N}{1,3}", _CHINESE_JAPANESE,
            rf"{_DEEPSEEK_WORDS}| ?[\p{{P}}\p{{S}}]+|[\r\n]|\s+(?!\S)|\s+", r"\p{N}",
        ),
        "afmoe": of(
            *_DIGITS_FROM_RIGHT,
            r"[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf"
            r"\u0e40-\u0e7f\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af"
            r"\u1100-\u11ff]+",
            _DEEPSEEK,
        ),
        "bloom poro-chat gpt3-finnish": of(_BLOOM),
        "viking": of(_BLOOM, r"\p{N}"),
        "chameleon": of(
            "<sentinel:[0-9]+>", "IMGIMG[A-I]{1,4}Z", r"[\t\n]|    |  ", r"\p{N}", r"[\p{P}!-/:-@\[-`{-~]",
            _GPT2, adds_bos=True,
        ),
        "superbpe": of(r"\p{N}+", *_THREES),
        "gemma4 granite-embed-multi-311m": of(
            _LINES, is_byte_level=False, keeps_newlines=True, always_adds_bos=True
        ),
        "sarvam-moe": of(_LINES, is_byte_level=False),
    }  # fmt: skip
    return {name: pre for names, pre in by_names.items() for name in names.split()}


PRE_TOKENIZERS: Final = _table()
"""Pre-tokenizers by their names."""


def pre_tokenizer(name: str) -> PreTokenizer:
    """Return the pre-tokenizer that a file names in `tokenizer.ggml.pre`.

    Raises:
        ModelError: There is none of this name.
    """
    try:
        return PRE_TOKENIZERS[name]
    except KeyError:
        known = ", ".join(sorted(PRE_TOKENIZERS))
        raise ModelError(f"unknown pre-tokenizer {shown(name)[:100]!r}; known: {known}") from None
