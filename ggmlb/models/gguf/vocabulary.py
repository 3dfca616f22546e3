"""Vocabulary: text to token numbers and back, from the metadata of a GGUF file alone.

Source: llama_vocab in llama.cpp's llama-vocab.cpp.
"""

from __future__ import annotations

import codecs
import re
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from enum import IntEnum
from functools import cached_property
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from ggmlb.core.errors import ModelError, shown
from ggmlb.models.gguf.longest import LongestTokens
from ggmlb.models.gguf.merging import BytePairs, SentencePieces
from ggmlb.models.gguf.metadata import Metadata
from ggmlb.models.gguf.pretokenizers import PRE_TOKENIZERS, PreTokenizer, pre_tokenizer
from ggmlb.models.gguf.unigram import Unigrams
from ggmlb.models.gguf.wordpiece import WordPieces

_KEY: Final = "tokenizer.ggml."


class TokenType(IntEnum):
    """The type of a token (enum llama_token_type)."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


_PARSED: Final = (TokenType.USER_DEFINED, TokenType.CONTROL, TokenType.UNKNOWN)
"""Types of tokens that are matched before a text is split into words."""

_END_OF_TURN: Final = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<EOT>",
    "_<EOT>", "[EOT]", "<\uff5cend\u2581of\u2581sentence\uff5c>", "<end_of_utterance>",
)  # fmt: skip
"""Texts of the end-of-turn token, if the file does not name it."""

_ENDS: Final = frozenset({
    *_END_OF_TURN, "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "</s>", "<|eom_id|>", "[EOS]", "<eos>",
    "<turn|>", "<|tool_response>", "[e~[",
})  # fmt: skip
"""Texts of tokens that end a generation."""

_FILE_ENDS: Final = (
    ("fim_pad_token_id", ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]")),
    ("fim_rep_token_id", ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>")),
    ("fim_sep_token_id", ("<|file_sep|>",)),
)
"""Tokens between files of code, which end a generation too: key, and texts where the key is missing."""

_ALWAYS_SHOWN: Final = frozenset({"<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"})
"""Texts of control tokens that are part of the output."""

MAX_SPECIAL: Final = 256
"""Longest control or user-defined token [characters]; real ones have some dozens."""

_PHI3_KEEPS_SPACE: Final = frozenset({"<unk>", "<s>", "<|endoftext|>"})
"""Special tokens of Phi-3 after which white space is kept."""

_STRIPPED: Final = frozenset(" \t\n\v\f\r")

_SURROGATES: Final = re.compile("[\ud800-\udfff]")


class _Algorithm(Protocol):
    """Protocol of the tokenization of text between special tokens."""

    def encode(self, text: str, is_start: bool) -> list[int]:
        """Return the tokens of a text; `is_start` says whether no other text comes right before it."""

    def bytes_of(self, text: str) -> bytes:
        """Return the bytes of a normal token."""


class _Defaults(NamedTuple):
    """Defaults of a tokenizer model."""

    bos: int | None = None
    eos: int | None = None
    unk: int | None = None
    sep: int | None = None
    pad: int | None = None
    mask: int | None = None
    adds_bos: bool = False
    adds_eos: bool = False
    adds_sep: bool = False
    adds_space: bool = False


_MODELS: Final = {
    "bert": _Defaults(bos=101, unk=100, sep=102, pad=0, mask=103, adds_bos=True, adds_sep=True),
    "gemma4": _Defaults(),
    "gpt2": _Defaults(),
    "llama": _Defaults(bos=1, eos=2, unk=0, adds_bos=True, adds_space=True),
    "rwkv": _Defaults(),
    "t5": _Defaults(eos=1, unk=2, pad=0, adds_eos=True),
}
"""Tokenizer models by their names in files."""


class Vocabulary:
    """The tokens of a model.

    Args:
        metadata: Of the file.

    Attributes:
        n_tokens: Number of tokens.
        tokens: Their texts, as the file has them.
        types: Their types.
        bos: Token that begins a text; `None` if there is none, as for the following.
        eos: Token that ends a text.
        eot: Token that ends a turn of a conversation.
        eom: Token that ends a message.
        unk: Token of unknown text.
        sep: Token between texts.
        pad: Padding token.
        mask: Token of a masked word.
        adds_bos: Whether `encode` begins with `bos`.
        adds_eos: Whether `encode` ends with `eos`.
        adds_sep: Whether `encode` ends with `sep`.
        end_tokens: Tokens that end a generation.

    Raises:
        ModelError: The metadata has no vocabulary, or one of an unknown kind, or a wrong one; the message
            names file and key.
    """

    def __init__(self, metadata: Metadata) -> None:
        self._metadata = metadata
        self._model = metadata.text(_KEY + "model")
        if self._model not in _MODELS:
            known = ", ".join(_MODELS)
            raise metadata.error(_KEY + "model", f"unknown tokenizer {shown(self._model)!r}; known: {known}")
        defaults = _MODELS[self._model]
        self.tokens = metadata.texts(_KEY + "tokens")
        self.n_tokens = len(self.tokens)
        if not self.tokens:
            raise metadata.error(_KEY + "tokens", "there are no tokens")
        self._ids = dict(zip(self.tokens, range(self.n_tokens), strict=True))
        if "" in self._ids:
            self.tokens = [text or f"[EMPTY_{i}]" for i, text in enumerate(self.tokens)]
            self._ids = dict(zip(self.tokens, range(self.n_tokens), strict=True))
        self.types = self._read_types()
        self._pre = self._read_pre()

        self.bos = self._special("bos_token_id", defaults.bos)
        self.eos = self._special("eos_token_id", defaults.eos)
        self.unk = self._special("unknown_token_id", defaults.unk)
        self.sep = self._special("seperator_token_id", defaults.sep)  # the format's own spelling
        self.pad = self._special("padding_token_id", defaults.pad)
        self.mask = self._special("mask_token_id", defaults.mask)
        self.eot = self._special("eot_token_id", self._first(_END_OF_TURN))
        self.eom = self._special("eom_token_id", self._first(("<|eom_id|>",)))
        self.end_tokens = self._find_ends()
        self.adds_bos = self._adds("bos", self.bos, defaults.adds_bos or self._pre.adds_bos)
        self.adds_bos |= self._pre.always_adds_bos and self.bos is not None
        self.adds_eos = self._adds("eos", self.eos, defaults.adds_eos)
        self.adds_sep = defaults.adds_sep and self.sep is not None
        # Files of other tokenizers have the key too, but it does not apply to them.
        can_add_space = self._model in ("llama", "t5")
        self._adds_space = can_add_space and metadata.flag(_KEY + "add_space_prefix", defaults.adds_space)

    def __repr__(self) -> str:
        pre = self._metadata.get(_KEY + "pre", "default")
        return f"<Vocabulary {shown(f'{self._model}, {pre}')}: {self.n_tokens:,} tokens>"

    # -- text to tokens ----------------------------------------------------------------------------

    def encode(
        self, text: str, special: bool = True, add_special: bool = True, is_start: bool = True
    ) -> list[int]:
        """Tokenize a text; `special`: recognise control tokens; `add_special`: add BOS, EOS as the file says.

        Args:
            text: The text; halves of surrogate pairs count as U+FFFD.
            special: Whether texts of control tokens, such as `<|im_end|>`, become these tokens. `False` for
                text of which a model must not think that it ends a turn.
            add_special: Whether the tokens begin with `bos` and end with `eos` or `sep`, if the file says so.
            is_start: Whether no other text comes right before it: some vocabularies add a space then.
        """
        if not text.isascii():
            text = _SURROGATES.sub("\ufffd", text)
        algorithm = self._algorithm
        tokens = [self.bos] if add_special and self.adds_bos and self.bos is not None else []
        for part in self._parts(text, special):
            if isinstance(part, int):
                tokens.append(part)
                is_start = True
            else:
                tokens += algorithm.encode(part, is_start)
                is_start = False
        if add_special and self.adds_eos and self.eos is not None:
            tokens.append(self.eos)
        if add_special and self.adds_sep and self.sep is not None:
            tokens.append(self.sep)
        return tokens

    # -- tokens to text ----------------------------------------------------------------------------

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes of a token; a control token gives its name, such as `<s>`.

        Raises:
            ModelError: There is no such token.
        """
        if not 0 <= token < self.n_tokens:
            raise ModelError(f"there is no token {token}; the vocabulary has {self.n_tokens:,}")
        text, kind = self.tokens[token], int(self.types[token])
        if kind == TokenType.NORMAL:
            return self._algorithm.bytes_of(text)
        if kind == TokenType.BYTE:
            found = re.fullmatch("<0x([0-9A-Fa-f]{2})>", text)
            return bytes.fromhex(found[1]) if found else text.encode()
        return text.encode() if kind in _PARSED else b""

    def is_control(self, token: int) -> bool:
        """Whether a token is no text, such as the end of a turn."""
        return bool(self.types[token] == TokenType.CONTROL)

    def decode(self, tokens: Iterable[int], special: bool = False) -> str:
        """Return the text of token numbers; control tokens are left out unless `special` is true.

        The space that `encode` adds before a text is left out. Bytes that are no UTF-8 give U+FFFD.

        Args:
            tokens: Numbers of tokens.
            special: Whether control tokens are written.
        """
        drops_space = self._adds_space
        pieces = []
        for token in tokens:
            piece = self._shown_bytes(token, special)
            if drops_space and not self._is_hidden(token):
                drops_space = False
                piece = piece.removeprefix(b" ")
            pieces.append(piece)
        return b"".join(pieces).decode("utf-8", "replace")

    def stream(self, special: bool = False) -> Detokenizer:
        """Return an incremental detokenizer; control tokens are left out unless `special` is true.

        Args:
            special: Whether control tokens are written.
        """
        return Detokenizer(self, special)

    def _is_hidden(self, token: int) -> bool:
        """Whether a token is in the text only on request."""
        return token in self._hidden

    @cached_property
    def _hidden(self) -> frozenset[int]:
        is_hidden = np.isin(self.types, (TokenType.CONTROL, TokenType.UNKNOWN))
        return frozenset(np.flatnonzero(is_hidden).tolist())

    def _shown_bytes(self, token: int, special: bool) -> bytes:
        return b"" if self._is_hidden(token) and not special else self.bytes_of(token)

    # -- special tokens in a text ------------------------------------------------------------------

    def _parts(self, text: str, special: bool) -> Iterator[int | str]:
        """Cut a text at the special tokens in it: the longest first, then the leftmost."""
        at = 0
        for start, end, token in (self._all_special if special else self._user_defined).find(text):
            if start > at:
                yield text[at:start]
            yield token
            at = end
        if at < len(text):
            yield text[at:]

    @cached_property
    def _all_special(self) -> _Finder:
        return self._finder_of(_PARSED)

    @cached_property
    def _user_defined(self) -> _Finder:
        return self._finder_of((TokenType.USER_DEFINED,))

    def _finder_of(self, types: tuple[TokenType, ...]) -> _Finder:
        found = {self.tokens[i]: i for i in np.flatnonzero(np.isin(self.types, types)).tolist()}
        if (longest := max(map(len, found), default=0)) > MAX_SPECIAL:
            raise self._metadata.error(
                _KEY + "tokens",
                f"a special token has {longest} characters; at most {MAX_SPECIAL} are possible",
            )
        name = self._metadata.get("general.name", "")
        # Phi-3 was trained without the white space after special tokens; its files cannot say so.
        is_phi3 = isinstance(name, str) and ("phi-3" in name.lower() or "phi3" in name.lower())
        return _Finder(found, found.keys() - _PHI3_KEEPS_SPACE if is_phi3 else frozenset())

    # -- metadata ----------------------------------------------------------------------------------

    def _numbers(self, name: str, kinds: str) -> npt.NDArray[Any] | None:
        key = _KEY + name
        if key not in self._metadata:
            return None
        numbers = self._metadata.numbers(key)
        if numbers.dtype.kind not in kinds or numbers.size < self.n_tokens:
            raise self._metadata.error(
                key,
                f"it is {self._metadata.slot(key)}; it must have a number for each of {self.n_tokens} tokens",
            )
        return numbers[: self.n_tokens]

    def _read_types(self) -> npt.NDArray[np.int32]:
        types = self._numbers("token_type", "iu")
        if types is None:
            return np.full(self.n_tokens, TokenType.NORMAL, np.int32)
        is_known = (types >= 0) & (types <= TokenType.BYTE)
        found: npt.NDArray[np.int32] = np.where(is_known, types, TokenType.UNDEFINED).astype(np.int32)
        return found

    def _read_pre(self) -> PreTokenizer:
        if self._model != "gpt2":
            return PRE_TOKENIZERS["gemma4" if self._model == "gemma4" else "default"]
        name = self._metadata.text(_KEY + "pre", "default")
        try:
            return pre_tokenizer(name)
        except ModelError as error:
            raise self._metadata.error(_KEY + "pre", error.message) from None

    def _special(self, name: str, default: int | None) -> int | None:
        """Return the number of a special token; `None` if it is out of range."""
        default = default if default is not None and default < self.n_tokens else None
        key = _KEY + name
        if key not in self._metadata:
            return default
        found = self._metadata.integer(key, least=-(1 << 63), most=(1 << 64) - 1)
        return found if 0 <= found < self.n_tokens else default

    def _first(self, texts: Iterable[str]) -> int | None:
        """Return the first token with one of these texts, and make it a control token."""
        found = next((self._ids[text] for text in texts if text in self._ids), None)
        if found is not None:
            self.types[found] = TokenType.CONTROL
        return found

    def _find_ends(self) -> frozenset[int]:
        texts = _ENDS & self._ids.keys()
        for text in texts:
            self.types[self._ids[text]] = TokenType.CONTROL
        for text in _ALWAYS_SHOWN & self._ids.keys():
            self.types[self._ids[text]] = TokenType.USER_DEFINED
        ends = {self.eos, self.eot, self.eom, *(self._ids[text] for text in texts)}
        ends |= {self._special(name, self._first(found)) for name, found in _FILE_ENDS}
        # Texts with another meaning in some families of models.
        if {"<|return|>", "<|call|>"} <= texts or (
            "<|flush|>" in texts and texts & {"<|call|>", "<|calls|>"}
        ):
            self._keep(ends, "<|end|>", TokenType.USER_DEFINED)
        if texts & {"<|tool_response>", "<|plamo:eos|>"}:
            self._keep(ends, "</s>", TokenType.NORMAL)
        return frozenset(token for token in ends if token is not None)

    def _keep(self, ends: set[int | None], text: str, kind: TokenType) -> None:
        """Remove the token of this text, if there is one, from the end tokens."""
        token = self._ids.get(text)
        if token in ends and token is not None:
            ends.discard(token)
            self.types[token] = kind

    def _adds(self, name: str, token: int | None, default: bool) -> bool:
        key = f"{_KEY}add_{name}_token"
        adds = self._metadata.flag(key, default)
        if adds and token is None:
            if key not in self._metadata:
                return False
            raise self._metadata.error(key, f"it is true, but {_KEY}{name}_token_id names no token")
        return adds

    @cached_property
    def _algorithm(self) -> _Algorithm:
        if self._model in ("gpt2", "gemma4"):
            return BytePairs(self._ids, lambda: self._metadata.texts(_KEY + "merges"), self._pre)
        if self._model == "bert":
            lowers = self._metadata.flag(_KEY + "normalizer.lowercase", True)
            strips_accents = self._metadata.flag(_KEY + "normalizer.strip_accents", lowers)
            return WordPieces(self._ids, self.unk, lowers, strips_accents)
        if self._model == "rwkv":
            return LongestTokens(self._ids, self.unk)
        scores = self._read_scores()
        if self._model == "t5":
            return self._unigrams(scores)
        return SentencePieces(self._ids, scores, self.unk, self._adds_space)

    def _read_scores(self) -> Sequence[float]:
        scores = self._numbers("scores", "iuf")
        if scores is None:
            scores = np.zeros(self.n_tokens, np.float32)
        if np.isnan(scores).any():
            raise self._metadata.error(
                _KEY + "scores", f"token {int(np.isnan(scores).argmax())} has no number"
            )
        return array("f", scores.astype(np.float32).tobytes())

    def _unigrams(self, scores: Sequence[float]) -> Unigrams:
        metadata, key = self._metadata, _KEY + "precompiled_charsmap"
        if self.unk is None:
            raise metadata.error(_KEY + "unknown_token_id", "it names no token, which this kind needs")
        replacements = metadata.numbers(key).tobytes() if key in metadata else b""
        texts = (TokenType.NORMAL, TokenType.USER_DEFINED, TokenType.UNUSED)
        tokens = [
            text if kind in texts else None
            for text, kind in zip(self.tokens, self.types.tolist(), strict=True)
        ]
        merges_spaces = metadata.flag(_KEY + "remove_extra_whitespaces", False)
        try:
            return Unigrams(tokens, scores, self.unk, replacements, self._adds_space, merges_spaces)
        except ModelError as error:
            raise metadata.error(key, error.message) from None


class Detokenizer:
    """Decodes tokens one by one into whole characters.

    Args:
        vocabulary: Of the tokens.
        special: Whether control tokens are written.
    """

    def __init__(self, vocabulary: Vocabulary, special: bool = False) -> None:
        self._vocabulary = vocabulary
        self._special = special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token: int) -> str:
        """Return the characters that this token completes; bytes that are no UTF-8 give U+FFFD."""
        return self._decoder.decode(self._vocabulary._shown_bytes(token, self._special))

    def flush(self) -> str:
        """Return U+FFFD if the bytes of a last character are incomplete, or else an empty text."""
        return self._decoder.decode(b"", final=True)


class _Finder:
    """Finds tokens in a text by their texts, in time independent of their number.

    Args:
        ids: Token numbers by text.
        strips: Texts of tokens after which white space is left out.
    """

    def __init__(self, ids: Mapping[str, int], strips: Set[str]) -> None:
        self._ids = ids
        self._strips = strips
        self._order = {text: i for i, text in enumerate(sorted(ids, key=lambda text: -len(text.encode())))}
        lengths: dict[str, set[int]] = {}
        for text in ids:
            lengths.setdefault(text[:2], set()).add(len(text))
        self._lengths = lengths
        firsts = "".join(map(re.escape, sorted({text[0] for text in ids})))
        self._starts = re.compile(f"[{firsts}]" if firsts else "(?!)")

    def find(self, text: str) -> list[tuple[int, int, int]]:
        """Return start, end and number of each match; matches do not overlap, and the longest comes first."""
        present = []
        for start in (found.start() for found in self._starts.finditer(text)):
            for prefix in {text[start], text[start : start + 2]}:
                for length in self._lengths.get(prefix, ()):
                    order = self._order.get(piece := text[start : start + length])
                    if order is not None:
                        present.append((order, start, piece))
        present.sort()
        is_taken = bytearray(len(text))
        found = []
        for _, start, piece in present:
            end = start + len(piece)
            # Earlier tokens are at least as long: on overlap they cover an end of this one.
            if is_taken[start] or is_taken[end - 1]:
                continue
            while piece in self._strips and text[end : end + 1] in _STRIPPED and not is_taken[end]:
                end += 1
            is_taken[start:end] = b"\1" * (end - start)
            found.append((start, end, self._ids[piece]))
        return sorted(found)
