"""Small vocabularies, each as metadata of a GGUF file and as a tokenizer of the library `tokenizers`."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from ggmlb.models.gguf import GgufFile, Vocabulary
from tests.support.gguf_files import write_gguf

CORPUS = (
    "The quick brown fox doesn't jump over the lazy dog; it's 1234 times too lazy, isn't it?\n\n"
    "def generate(self, tokens):\n    return [self.model(token) for token in tokens]\n\n\n"
    "Die größten Vögel fliegen über Äpfel, und die Straße ist naß.  Où est l'élève?\t\tÀ l'école!\r\n"
    "Быстрая коричневая лиса прыгает через ленивую собаку. \u0397 γρήγορη αλεπού. שלום עולם\n"
    "我想在工作中学习。日本語のテキストを読む。한국어 텍스트 안녕하세요. हिन्दी में लिखो। ภาษาไทย 🚀🦙😶‍🌫️ ✅\n"
) * 8

TEXTS = (
    "", " ", "   ", "\n", "\n\n \n", "\t\t x", "Hello world", " Hello", "isn't IT'S we'LL 'tis",
    "a.b,c;d!? (e) [f] {g}", "1 12 123 1234 12345 1,234.5", "foo_bar == baz->qux /* x */ 0xFF",
    "größten ÄPFEL naß", "лиса ЛЕНЬ γρήγορη", "我想在工作 日本語 한국어 안녕", "हिन्दी में ภาษาไทย",
    "🚀🦙 😶\u200d🌫\ufe0f ✅ e\u0301 \ufb01", "\x00\x01\x1b\x7f\x85\xa0\u2028\u3000\ufeff", "a" * 300,
    "ab" * 100 + " " * 80 + "x", "<|im_start|>user\nHi<|im_end|>", "<s>x</s><unk>", "▁▁ <0x0A> [UNK]",
)  # fmt: skip
"""Texts of many kinds."""

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace("{1,3}", "")

EXPRESSIONS = {
    "gpt-2": (GPT2,),
    "smollm": (r"\p{N}", GPT2),
    "llama-bpe": (LLAMA3,),
    "qwen2": (QWEN2,),
    "gpt-4o": (GPT4O,),
}
"""Expressions as the `tokenizer.json` of such models has them."""

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

SPECIAL = {"<|endoftext|>": CONTROL, "<|im_start|>": CONTROL, "<|im_end|>": CONTROL, "    ": USER_DEFINED}


def vocabulary(path: Path, metadata: dict[str, Any]) -> Vocabulary:
    """Write a file of metadata alone, and read its vocabulary."""
    file = path / "vocabulary.gguf"
    file.unlink(missing_ok=True)  # not overwritten: an earlier vocabulary may still read it
    return Vocabulary(GgufFile(write_gguf(file, metadata, {})).metadata)


@cache
def byte_pairs(pre: str = "gpt-2") -> tuple[dict[str, Any], Tokenizer]:
    """A byte-level BPE of 700 tokens, trained on `CORPUS`."""
    tokenizer = Tokenizer(models.BPE())
    splits = [pre_tokenizers.Split(Regex(e), "isolated") for e in EXPRESSIONS[pre]]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(
        [CORPUS], trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False)
    )
    model = json.loads(tokenizer.to_str())["model"]
    tokens = [*sorted(model["vocab"], key=model["vocab"].get), *SPECIAL]
    first = len(tokens) - len(SPECIAL)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array([NORMAL] * first + list(SPECIAL.values()), np.int32),
        "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
        "tokenizer.ggml.bos_token_id": first,
        "tokenizer.ggml.eos_token_id": first,
        "tokenizer.ggml.add_bos_token": False,
    }, tokenizer


@cache
def sentence_pieces() -> tuple[dict[str, Any], Tokenizer]:
    """SentencePiece with byte fallback: the tokens of a BPE without words, scored by their ranks."""
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    trained.train_from_iterator([CORPUS], trainers.BpeTrainer(vocab_size=500, show_progress=False))
    model = json.loads(trained.to_str())["model"]
    learned = sorted(model["vocab"], key=model["vocab"].get)
    pieces = [t for t in learned if len(t) == 1] + ["".join(pair) for pair in model["merges"]]
    first = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    tokens = [*first, *dict.fromkeys(pieces), "<start_of_turn>", "<end_of_turn>", "\n\n"]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * (len(tokens) - len(first) - 3)]
    types += [CONTROL, CONTROL, USER_DEFINED]
    ids = {token: i for i, token in enumerate(tokens)}
    merges = [
        (token[:k], token[k:])
        for token in tokens[len(first) : -3]
        for k in range(1, len(token))
        if token[:k] in ids and token[k:] in ids
    ]
    tokenizer = Tokenizer(models.BPE(ids, merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": -np.arange(len(tokens), dtype=np.float32),
        "tokenizer.ggml.token_type": np.array(types, np.int32),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }, tokenizer


def longest_tokens() -> dict[str, Any]:
    """As RWKV's: all bytes, then words and parts of characters, written as in a literal of Python."""
    longer = [
        b"  ", b"\n\n", b"\r\n", b"\\n", b"'s", b"he", b"hell", b"hello ", b"oxen", b"\xc3\xa4\xc3", b"\t\x00"
    ]  # fmt: skip
    words = {word.encode() for word in CORPUS.split(" ")} - {b""}
    pieces = [*(bytes([i]) for i in range(256)), *longer, *sorted(words - set(longer))]
    pieces = list(dict.fromkeys(piece for piece in pieces if len(piece) <= 40))
    return {
        "tokenizer.ggml.model": "rwkv",
        "tokenizer.ggml.tokens": ["<s>", *(repr(piece)[2:-1] for piece in pieces)],
        "tokenizer.ggml.token_type": np.array([CONTROL] + [NORMAL] * len(pieces), np.int32),
    }


@cache
def word_pieces() -> tuple[dict[str, Any], Tokenizer]:
    """WordPiece as in BERT, without upper case and accents."""
    first = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]", max_input_chars_per_word=1000))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.train_from_iterator(
        [CORPUS], trainers.WordPieceTrainer(vocab_size=400, special_tokens=first, show_progress=False)
    )
    ids = tokenizer.get_vocab()
    tokens = sorted(ids, key=lambda token: int(ids[token]))
    shown = [t if t in first else t[2:] if t.startswith("##") else "▁" + t for t in tokens]
    return {
        "tokenizer.ggml.model": "bert",
        "tokenizer.ggml.pre": "bert-bge",
        "tokenizer.ggml.tokens": shown,
        "tokenizer.ggml.token_type": np.array([CONTROL] * 5 + [NORMAL] * (len(tokens) - 5), np.int32),
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.unknown_token_id": 1,
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.seperator_token_id": 3,
        "tokenizer.ggml.mask_token_id": 4,
    }, tokenizer
