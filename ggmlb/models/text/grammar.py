"""Grammar: masks the tokens that a JSON schema or a grammar does not allow, by llguidance."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from ggmlb.core.errors import ArgumentError, ModelError, one_line

if TYPE_CHECKING:
    from ggmlb.models.gguf.vocabulary import Vocabulary

MAX_SOURCE = 1 << 18
"""Longest grammar or schema [characters]."""

WHITESPACE: Final[Any] = {"whitespace_pattern": r"( |\n{1,2}[ \t]{0,20})?"}
"""What may stand between parts of JSON, as in llama.cpp: small models would go on with empty lines."""

_TOKENIZERS: WeakKeyDictionary[Vocabulary, Any] = WeakKeyDictionary()
"""llguidance's view of vocabularies, which takes some 0.3 s to make."""


class _Tokens:
    """A vocabulary as llguidance's `TokenizerWrapper` takes it."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self.bos_token_id = vocabulary.bos
        self.eos_token_id = min(vocabulary.end_tokens)
        self.tokens = [vocabulary.bytes_of(token) for token in range(vocabulary.n_tokens)]
        self.special_token_ids = [t for t in range(vocabulary.n_tokens) if vocabulary.is_control(t)]

    def __call__(self, text: str | bytes) -> list[int]:
        known = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        return self._vocabulary.encode(known, special=False, add_special=False, is_start=False)


class Grammar:
    """A logits processor that leaves only tokens with which a text of a given form can go on.

    It belongs to one generation: it follows the tokens, which must come one by one.

    Args:
        vocabulary: The model's.
        grammar: A grammar in llama.cpp's GBNF, or in llguidance's variant of Lark; empty: none.
        json_schema: A JSON schema, as an object or as JSON; `{}` allows any JSON value.

    Raises:
        ArgumentError: Both are given, or the grammar or schema is invalid.
        ModelError: llguidance is not installed, or the vocabulary has no token that ends a text.
    """

    def __init__(
        self, vocabulary: Vocabulary, grammar: str, json_schema: Mapping[str, Any] | str | None
    ) -> None:
        try:
            from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
            from llguidance.gbnf_to_lark import any_to_lark
        except ImportError as error:
            raise ModelError("grammars and schemas need llguidance: pip install 'ggmlb[models]'") from error
        if grammar and json_schema is not None:
            raise ArgumentError("grammar and json_schema are both given; give one")
        if not vocabulary.end_tokens:
            raise ModelError("a grammar needs a token that ends the text; this vocabulary has none")
        kind = "grammar" if grammar else "json_schema"
        source = grammar or (json_schema if isinstance(json_schema, str) else json.dumps(json_schema))
        if len(source) > MAX_SOURCE:
            raise ArgumentError(f"{kind} has {len(source):,} characters; at most {MAX_SOURCE:,} are allowed")
        if vocabulary not in _TOKENIZERS:
            tokens = TokenizerWrapper(_Tokens(vocabulary))
            _TOKENIZERS[vocabulary] = LLTokenizer(tokens, eos_token=sorted(vocabulary.end_tokens))
        try:
            if grammar:
                text = LLMatcher.grammar_from_lark(any_to_lark(grammar))
            else:
                text = LLMatcher.grammar_from_json_schema(source, WHITESPACE)
            self._matcher = LLMatcher(_TOKENIZERS[vocabulary], text, log_level=0)
        except Exception as error:  # the parsers have errors of their own
            raise ArgumentError(f"{kind}: {one_line(error)}") from None
        if self._matcher.is_error():
            raise ArgumentError(f"{kind}: {self._matcher.get_error().splitlines()[0]}")
        self._n_read = -1

    def __call__(self, tokens: Sequence[int], logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Set the logits of tokens that are not allowed to -inf, in place.

        Raises:
            ArgumentError: The grammar is too complex to go on.
        """
        if self._n_read < 0:
            self._n_read = len(tokens)
        new = list(tokens[self._n_read :])
        self._n_read = len(tokens)
        if new and not self._matcher.consume_tokens(new):
            raise ArgumentError(f"the grammar cannot go on: {self._matcher.get_error() or new}")
        raw = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        allowed = np.zeros(logits.size, bool)
        bits = np.unpackbits(raw, bitorder="little")[: logits.size]
        allowed[: bits.size] = bits
        np.copyto(logits, -np.inf, where=~allowed)
        return logits
