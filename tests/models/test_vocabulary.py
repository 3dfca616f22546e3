"""Text to tokens and back, from the metadata of GGUF files."""

from __future__ import annotations

import contextlib
import re
import struct
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unicodedata import ucd_3_2_0

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ggmlb.core.errors import ModelError
from ggmlb.models.gguf import Vocabulary
from ggmlb.models.gguf.pretokenizers import PRE_TOKENIZERS
from ggmlb.models.gguf.unigram import Replacements
from ggmlb.models.gguf.vocabulary import _Finder
from ggmlb.models.gguf.wordpiece import WordPieces
from tests.support.vocabularies import (
    CONTROL,
    EXPRESSIONS,
    NORMAL,
    TEXTS,
    UNKNOWN,
    USER_DEFINED,
    byte_pairs,
    longest_tokens,
    sentence_pieces,
    vocabulary,
    word_pieces,
)

ALPHABET = st.one_of(
    st.characters(exclude_categories=["Cs", "Cn"]), st.sampled_from("aesnt 's \n\t019äß你🚀▁Ā")
)
ANY_TEXT = st.text(ALPHABET, max_size=40)

OLD_TEXT = st.text(ALPHABET.filter(lambda c: ucd_3_2_0.category(c) == unicodedata.category(c)), max_size=40)
"""Texts of characters whose categories are the same in Python's Unicode and that of `tokenizers`."""

KINDS: dict[str, Callable[[], tuple[dict[str, Any], Any]]] = {
    **{pre: lambda pre=pre: byte_pairs(pre) for pre in EXPRESSIONS},
    "spm": sentence_pieces,
    "wpm": word_pieces,
}


@pytest.fixture(scope="module")
def vocabularies(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Vocabulary]:
    kinds = {name: kind()[0] for name, kind in KINDS.items()} | {"rwkv": longest_tokens()}
    return {name: vocabulary(tmp_path_factory.mktemp(name), kind) for name, kind in kinds.items()}


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Vocabulary]:
    """Makes the vocabulary of a small file; `bos_token_id=7` changes a value, `None` leaves it out."""

    def written(kind: str = "gpt-2", **changes: Any) -> Vocabulary:
        metadata = KINDS[kind]()[0] | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
        return vocabulary(tmp_path, {key: value for key, value in metadata.items() if value is not None})

    return written


# -- against `tokenizers` ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_tokenizers(kind: str, vocabularies: dict[str, Vocabulary]) -> None:
    tokenizer = KINDS[kind]()[1]
    specials = {"<", "\n\n", "    "}  # what begins, or is, a special token here

    def same(text: str) -> None:
        found = vocabularies[kind].encode(text, special=False, add_special=False)
        assert found == tokenizer.encode(text, add_special_tokens=False).ids, text

    for text in TEXTS:
        if not any(s in text for s in specials):
            same(text)

    @given(OLD_TEXT)
    def check(text: str) -> None:
        if not any(s in text for s in specials) and not re.search("[\u01c4-\u01f3\u0130\u017f]", text):
            same(text)

    if kind == "wpm":
        return  # BERT's normaliser there and llama.cpp's differ on rare characters
    check()


# -- round trips -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [*EXPRESSIONS, "spm"])
def test_text_comes_back(kind: str, vocabularies: dict[str, Vocabulary]) -> None:
    vocabulary = vocabularies[kind]

    @given(ANY_TEXT)
    def check(text: str) -> None:
        # Without special tokens in the text: SPM adds a space after each, as it does at the start.
        spaced = text.replace("\u2581", " ").replace("\n\n", "\n")
        text = spaced if kind == "spm" else text
        assert vocabulary.decode(vocabulary.encode(text, special=False)) == text

    for text in TEXTS:
        if kind != "spm" or ("\n\n" not in text and "\u2581" not in text):
            assert vocabulary.decode(vocabulary.encode(text, special=False)) == text
    check()


@pytest.mark.parametrize("kind", ["gpt-2", "spm"])
def test_a_stream_never_ends_within_a_character(kind: str, vocabularies: dict[str, Vocabulary]) -> None:
    vocabulary = vocabularies[kind]

    @given(ANY_TEXT)
    def check(text: str) -> None:
        text = text.replace("\ufffd", "")
        tokens = vocabulary.encode(text, special=False, add_special=False)
        stream = vocabulary.stream()
        pieces = [stream.add(token) for token in tokens]
        assert not any("\ufffd" in piece for piece in pieces)
        assert stream.flush() == ""
        assert "".join(pieces).encode() == b"".join(map(vocabulary.bytes_of, tokens))

    check()


def test_half_characters_in_a_stream_are_marked_once_it_is_known(
    vocabularies: dict[str, Vocabulary],
) -> None:
    vocabulary = vocabularies["spm"]
    byte = {i: vocabulary.tokens.index(f"<0x{i:02X}>") for i in (0xF0, 0x9F, 0x9A, 0x80, 0x41)}
    stream = vocabulary.stream()
    assert [stream.add(byte[i]) for i in (0xF0, 0x9F, 0x9A, 0x80)] == ["", "", "", "🚀"]
    assert [stream.add(byte[i]) for i in (0xF0, 0x41)] == ["", "\ufffdA"]
    assert stream.add(byte[0x9F]) == "\ufffd"
    assert stream.add(byte[0xF0]) == ""
    assert stream.flush() == "\ufffd"


# -- special tokens ----------------------------------------------------------------------------------


def test_special_tokens_are_found_only_where_asked(vocabularies: dict[str, Vocabulary]) -> None:
    vocabulary = vocabularies["gpt-2"]
    start, end = (vocabulary.tokens.index(text) for text in ("<|im_start|>", "<|im_end|>"))
    text = "<|im_start|>user\nHi<|im_end|>"
    tokens = vocabulary.encode(text)
    assert (tokens[0], tokens[-1]) == (start, end)
    assert vocabulary.decode(tokens) == "user\nHi"
    assert vocabulary.decode(tokens, special=True) == text
    plain = vocabulary.encode(text, special=False)
    assert start not in plain and end not in plain
    assert vocabulary.decode(plain) == text


def test_user_defined_tokens_are_always_found_the_longest_first(write: Callable[..., Vocabulary]) -> None:
    tokens = [*byte_pairs()[0]["tokenizer.ggml.tokens"], "aa", "xaa", "aab"]
    types = np.array([NORMAL] * (len(tokens) - 3) + [USER_DEFINED] * 3, np.int32)
    vocabulary = write(tokens=tokens, token_type=types)
    a, x, b = map(tokens.index, "axb")
    aa, xaa, aab = range(len(tokens) - 3, len(tokens))
    for special in (True, False):
        assert vocabulary.encode("aaa", special) == [aa, a]
        assert vocabulary.encode("xaab", special) == [xaa, b]  # of one length: by their numbers
        assert vocabulary.encode("aaab", special) == [a, aab]
        assert vocabulary.encode("xaaaab", special) == [xaa, aab]
    assert x not in vocabulary.encode("xaa")


@given(
    st.lists(st.text("ab<", min_size=1, max_size=4), min_size=1, unique=True), st.text("ab<c", max_size=30)
)
def test_special_tokens_are_those_that_llama_cpp_finds(tokens: list[str], text: str) -> None:
    """It cuts what is left of the text at each token, the longest first."""
    parts: list[str | int] = [text]
    for piece in sorted(tokens, key=len, reverse=True):
        cut: list[str | int] = []
        for part in parts:
            if isinstance(part, str):
                first, *rest = part.split(piece)
                cut += [first, *(each for after in rest for each in (tokens.index(piece), after))]
            else:
                cut.append(part)
        parts = [part for part in cut if part != ""]
    at, found = 0, []
    for start, end, token in _Finder({t: i for i, t in enumerate(tokens)}, frozenset()).find(text):
        found += [text[at:start], token]
        at = end
    assert [part for part in (*found, text[at:]) if part != ""] == parts


class Counted(str):
    """A text that counts how often it is searched or cut."""

    n = 0

    def __getitem__(self, key: Any) -> str:
        self.n += 1
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.n += 1
        return super().__contains__(key)

    def find(self, *args: Any) -> int:
        self.n += 1
        return super().find(*args)


def test_special_tokens_are_found_in_steps_of_the_text_whatever_their_number(
    write: Callable[..., Vocabulary],
) -> None:
    tokens = [*byte_pairs()[0]["tokenizer.ggml.tokens"], *(f"<|{i}|>" for i in range(50_000))]
    types = np.full(len(tokens), CONTROL, np.int32)
    types[: len(tokens) - 50_000] = NORMAL
    text = Counted("<|12|><|" * 250)
    assert write(tokens=tokens, token_type=types).encode(text).count(tokens.index("<|12|>")) == 250
    assert text.n < 10 * len(text)


def test_texts_begin_and_end_as_the_file_says(write: Callable[..., Vocabulary]) -> None:
    words = write("spm").encode("der", add_special=False)
    assert write("spm").encode("der") == [1, *words]
    assert write("spm", add_bos_token=False, add_eos_token=True).encode("der") == [*words, 2]
    assert write("spm", add_bos_token=False).encode("") == []
    assert write("spm").encode("") == [1]
    assert write("wpm").encode("") == [2, 3]
    assert write("llama-bpe", add_bos_token=None).adds_bos
    assert not write("gpt-2", add_bos_token=None).adds_bos


def test_a_space_before_the_text_is_added_and_left_out_again(write: Callable[..., Vocabulary]) -> None:
    vocabulary = write("spm")
    assert vocabulary.encode("der")[1:] == write("spm", add_space_prefix=False).encode(" der")[1:]
    assert vocabulary.decode(vocabulary.encode("der")) == "der"
    assert vocabulary.decode(vocabulary.encode(" der")) == " der"
    unspaced = write("spm", add_space_prefix=False)
    assert unspaced.decode(unspaced.encode(" der")) == " der"
    pairs = write("gpt-2", add_space_prefix=True)
    assert pairs.decode(pairs.encode(" der")) == " der"
    # A stream goes on from a prompt, so its first space is text.
    assert vocabulary.stream().add(vocabulary.encode("d")[1]).startswith(" ")


def test_tokens_that_end_a_generation(write: Callable[..., Vocabulary]) -> None:
    vocabulary = write()
    texts = {vocabulary.tokens[i] for i in vocabulary.end_tokens}
    assert texts == {"<|endoftext|>", "<|im_end|>"}
    assert vocabulary.eot is not None and vocabulary.tokens[vocabulary.eot] == "<|im_end|>"
    spm = write("spm")
    assert {spm.tokens[i] for i in spm.end_tokens} == {"</s>", "<end_of_turn>"}
    tokens = [*byte_pairs()[0]["tokenizer.ggml.tokens"], "<|return|>", "<|call|>", "<|end|>"]
    harmony = write(tokens=tokens, token_type=np.full(len(tokens), NORMAL, np.int32))
    assert {harmony.tokens[i] for i in harmony.end_tokens} >= {"<|return|>", "<|call|>"}
    assert len(tokens) - 1 not in harmony.end_tokens
    only = write(tokens=[*tokens[:-7], *tokens[-3:]], token_type=None, eos_token_id=None)
    assert {only.tokens[i] for i in only.end_tokens} == {"<|return|>", "<|call|>"}
    assert harmony.decode([len(tokens) - 1]) == "<|end|>"


def test_phi3_leaves_out_white_space_after_special_tokens(tmp_path: Path) -> None:
    metadata = sentence_pieces()[0] | {"general.name": "Phi-3 mini", "tokenizer.ggml.add_space_prefix": False}
    vocabulary_ = vocabulary(tmp_path, metadata)
    assert vocabulary_.encode("<end_of_turn> \n der") == vocabulary_.encode("<end_of_turn>der")
    assert vocabulary_.encode("<s> der") != vocabulary_.encode("<s>der")


def best_unigrams(text: str, scores: dict[str, float]) -> float:
    """The highest sum of scores of all ways to cut a text."""
    best = [0.0]
    for end in range(1, len(text) + 1):
        parts = ((text[start:end], best[start]) for start in range(end))
        best.append(max((before + scores[part] for part, before in parts if part in scores), default=-1e9))
    return best[-1]


def test_unigrams_are_the_likeliest(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    pieces = ["\u2581", *"abc", "ab", "bc", "abc", "\u2581a", "\u2581ab", "ca", "cab", "bcab"]
    tokens = ["<pad>", "</s>", "<unk>", *pieces]
    scores = np.concatenate([np.zeros(3), -rng.uniform(1, 9, len(pieces))]).astype(np.float32)
    found = vocabulary(
        tmp_path,
        {
            "tokenizer.ggml.model": "t5",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.scores": scores,
            "tokenizer.ggml.token_type": np.array(
                [CONTROL, CONTROL, UNKNOWN] + [NORMAL] * len(pieces), np.int32
            ),
            "tokenizer.ggml.add_space_prefix": True,
            "tokenizer.ggml.remove_extra_whitespaces": True,
        },
    )
    by_text = dict(zip(pieces, scores[3:].tolist(), strict=True))
    assert found.encode("") == [1]
    assert found.encode("a  z\U0010ffff0", add_special=False) == [tokens.index("\u2581a"), 3, 2]

    @given(st.text("abc ", max_size=12))
    def check(text: str) -> None:
        normalized = "".join("\u2581" + word for word in text.split())
        ids = found.encode(text, add_special=False)
        assert "".join(tokens[i] for i in ids) == normalized
        assert sum(scores[i] for i in ids) == pytest.approx(best_unigrams(normalized, by_text), abs=1e-4)

    check()


def test_units_that_loop_are_refused() -> None:
    units = [0] * 512
    units[97] = ord("a") | 97 << 10  # back to where it came from
    with pytest.raises(ModelError, match="more than 128 bytes"):
        Replacements(struct.pack("<I512I", 4 * 512, *units)).apply("a" * 129)
    assert Replacements(struct.pack("<I512I", 4 * 512, *units)).apply("ab" * 100) == "ab" * 100


def test_characters_are_replaced() -> None:
    units = [0] * 512
    units[97] = ord("a") | 0x100 | 1 << 10
    raw = struct.pack("<I512I", 4 * 512, *units) + b"bc\0"
    assert Replacements(raw).apply("xaäa\0🚀") == "xbcäbc\0🚀"


@given(st.binary(max_size=40), st.lists(st.integers(0, (1 << 32) - 1), max_size=300), ANY_TEXT)
def test_damaged_replacements_do_no_harm(texts: bytes, units: list[int], text: str) -> None:
    raw = struct.pack(f"<I{len(units)}I", 4 * len(units), *units) + texts
    with contextlib.suppress(ModelError):
        assert isinstance(Replacements(raw).apply(text), str)
    for damaged in (raw[: len(raw) // 2], texts):
        with contextlib.suppress(ModelError):
            Replacements(damaged).apply(text)


# -- parts -------------------------------------------------------------------------------------------


@given(ANY_TEXT, st.sampled_from(sorted(PRE_TOKENIZERS)))
def test_words_are_the_text_when_joined(text: str, name: str) -> None:
    words = PRE_TOKENIZERS[name].split(text)
    assert "".join(words) == text
    assert all(words)


PLAIN = {
    "superbpe": (r"\p{N}+", r"(?=(?:[0-9]{3})+(?![0-9]))"),
    "deepseek-llm": tuple(p.replace(r"(?<!\s)", "") for p in PRE_TOKENIZERS["deepseek-llm"].patterns),
}
"""The expressions of llama.cpp for which others stand that take less time."""


@given(st.text("0123\u00b2\u0661a. \t\n\u4e2d", max_size=40), st.sampled_from(sorted(PLAIN)))
def test_words_are_those_of_the_plain_expressions(text: str, name: str) -> None:
    assert PLAIN[name] != PRE_TOKENIZERS[name].patterns
    assert PRE_TOKENIZERS[name].split(text) == PRE_TOKENIZERS[name]._replace(patterns=PLAIN[name]).split(text)


RUNS = {"spaces": (" ", "1"), "digits": ("7", "a"), "marks": ("\u0301", "\u4e2d"), "capitals": ("A", "\0")}
"""Characters of a long run, and one that ends it."""


@pytest.mark.timeout(180)
@pytest.mark.parametrize("run", RUNS)
def test_long_runs_take_no_square_of_their_length(run: str) -> None:
    """By the square, this takes many minutes."""
    character, last = RUNS[run]
    text = character * (1 << 18) + last
    for pre in {pre.patterns: pre for pre in PRE_TOKENIZERS.values()}.values():
        assert sum(map(len, pre.split(text))) == len(text)


def test_long_runs_of_marks_take_no_square_of_their_length() -> None:
    """Marks of two classes in turn, which NFD sorts."""
    words = WordPieces({"\u2581a": 0, "b": 1}, 2, True, True)
    assert words.encode("a" + "\u0301\u0316" * (3 << 18) + "b", True) == [0, 1]


def test_a_long_word_takes_no_square_of_its_length(vocabularies: dict[str, Vocabulary]) -> None:
    for kind in ("gpt-2", "spm"):
        text = "fox" * 10_000
        assert vocabularies[kind].decode(vocabularies[kind].encode(text)) == text


def longest(text: bytes, tokens: list[bytes]) -> list[int]:
    found = []
    while text:
        token = max((t for t in tokens if text.startswith(t)), key=len)
        found.append(tokens.index(token))
        text = text[len(token) :]
    return found


@given(st.one_of(ANY_TEXT, st.text("hel oxn's\n\\ä\x00\t", max_size=40)))
def test_rwkv_takes_the_longest_tokens(vocabularies: dict[str, Vocabulary], text: str) -> None:
    found = vocabularies["rwkv"].encode(text, special=False)
    tokens = [vocabularies["rwkv"].bytes_of(i) for i in range(vocabularies["rwkv"].n_tokens)]
    assert found == longest(text.encode(), tokens)
    assert b"".join(map(vocabularies["rwkv"].bytes_of, found)).decode() == text


def test_bytes_that_rwkv_has_no_token_for_are_unknown_or_left_out(tmp_path: Path) -> None:
    metadata = {"tokenizer.ggml.model": "rwkv", "tokenizer.ggml.tokens": ["?", "a", "ab", "\\xc3"]}
    assert vocabulary(tmp_path, metadata).encode("abcaä") == [2, 1, 3]
    known = metadata | {"tokenizer.ggml.unknown_token_id": 0}
    assert vocabulary(tmp_path, known).encode("abcaä") == [2, 0, 1, 3, 0]


# -- wrong and hostile files -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "changes", "told"),
    [
        (
            "gpt-2",
            {"model": "plamo2"},
            "unknown tokenizer 'plamo2'; known: bert, gemma4, gpt2, llama, rwkv, t5",
        ),
        ("gpt-2", {"pre": "nosuch"}, "unknown pre-tokenizer 'nosuch'; known: a.x-4.0, afmoe,"),
        ("gpt-2", {"pre": "x\x1b[31m" * 1000}, "unknown pre-tokenizer"),
        ("gpt-2", {"model": None}, "no metadata key 'tokenizer.ggml.model'"),
        ("gpt-2", {"tokens": None}, "no metadata key 'tokenizer.ggml.tokens'"),
        ("gpt-2", {"tokens": "x"}, "it must be an array of strings"),
        ("gpt-2", {"merges": None}, "no metadata key 'tokenizer.ggml.merges'"),
        ("gpt-2", {"token_type": np.ones(3, np.int32)}, "a number for each of"),
        ("gpt-2", {"token_type": np.ones(1000, np.float32)}, "a number for each of"),
        ("gpt-2", {"bos_token_id": None, "add_bos_token": True}, "bos_token_id names no token"),
        ("gpt-2", {"bos_token_id": "x"}, "a whole number"),
        ("spm", {"scores": np.full(2000, np.nan, np.float32)}, "token 0 has no number"),
        ("spm", {"scores": np.zeros(3, np.float32)}, "a number for each of"),
        (
            "spm",
            {
                "tokens": ["<unk>", "<s>", "</s>", 300 * "x"],
                "scores": None,
                "token_type": np.array([UNKNOWN, CONTROL, CONTROL, USER_DEFINED], np.int32),
            },
            "token has 300 characters; at most 256",
        ),
    ],
)
def test_what_is_wrong_with_a_file_is_told(
    kind: str, changes: dict[str, Any], told: str, write: Callable[..., Vocabulary]
) -> None:
    with pytest.raises(ModelError) as caught:
        write(kind, **changes).encode("Hello")
    assert told in str(caught.value)
    assert len(str(caught.value)) < 2000


def test_odd_vocabularies_do_no_harm(write: Callable[..., Vocabulary]) -> None:
    tokens = list(byte_pairs()[0]["tokenizer.ggml.tokens"])
    n = len(tokens)
    odd = write(
        tokens=[*tokens[:300], "", "", tokens[0], "x" * 100_000, *tokens[300:]],
        token_type=np.arange(n + 4, dtype=np.int32) % 2000 - 1000,
        merges=["a", "", " ", "a b c", "no such", "Ġ t", "Ġ t", "t h"],
        bos_token_id=1 << 31,
        eos_token_id=n + 4,
    )
    assert odd.bos is None and odd.eos is None
    for text in TEXTS:
        odd.encode(text)
    odd.decode(range(odd.n_tokens), special=True)
    infinite = np.array([np.inf, -np.inf] * (len(sentence_pieces()[0]["tokenizer.ggml.tokens"]) // 2 + 1))
    spm = write("spm", scores=infinite.astype(np.float32))
    assert spm.decode(spm.encode("Hello fox", special=False)) == "Hello fox"


ODD_VALUE = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(0, (1 << 32) - 1),
    st.floats(width=32),
    ANY_TEXT,
    st.lists(ANY_TEXT, max_size=300),
    st.lists(st.integers(-(1 << 31), (1 << 31) - 1), max_size=2000).map(lambda v: np.array(v, np.int32)),
    st.lists(st.floats(width=32), max_size=2000).map(lambda v: np.array(v, np.float32)),
    st.binary(max_size=2000).map(lambda v: np.frombuffer(v, np.uint8)),
)


@pytest.mark.parametrize("kind", ["gpt-2", "spm", "wpm", "gemma4", "t5"])
def test_values_of_any_kind_are_an_error_or_harmless(
    kind: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp(kind)
    metadata = dict(KINDS["spm" if kind == "t5" else "gpt-2" if kind == "gemma4" else kind]()[0])
    if kind in ("t5", "gemma4"):
        metadata["tokenizer.ggml.model"] = kind
    extra = ("add_eos_token", "add_space_prefix", "eot_token_id", "precompiled_charsmap", "fim_pad_token_id")
    keys = [*metadata, *(f"tokenizer.ggml.{name}" for name in extra), "general.name"]

    @given(st.dictionaries(st.sampled_from(keys), ODD_VALUE, min_size=1, max_size=3), ANY_TEXT)
    def check(changes: dict[str, Any], text: str) -> None:
        changed = {key: value for key, value in (metadata | changes).items() if value is not None}
        with contextlib.suppress(ModelError):
            found = vocabulary(path, changed)
            tokens = found.encode(text)
            assert all(0 <= token < found.n_tokens for token in tokens)
            found.decode(tokens, special=True)
            stream = found.stream()
            for token in tokens:
                stream.add(token)
            repr(found)

    check()


def test_numbers_that_are_no_tokens(vocabularies: dict[str, Vocabulary]) -> None:
    for token in (-1, 1 << 40):
        for use in (vocabularies["gpt-2"].bytes_of, vocabularies["gpt-2"].stream().add):
            with pytest.raises(ModelError, match="there is no token"):
                use(token)


def test_half_of_a_surrogate_pair_is_replaced(vocabularies: dict[str, Vocabulary]) -> None:
    for kind in ("gpt-2", "spm"):
        assert vocabularies[kind].decode(vocabularies[kind].encode("a\ud800b")) == "a\ufffdb"
