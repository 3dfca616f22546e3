"""A language model of random weights in TinyLlama's sizes (1.1 billion parameters), in any type.

Speed depends on sizes and types alone. The blocks of some rows are quantised, and all rows drawn from them,
so that the GGUF file is written in seconds. It is kept in the cache folder.

    python benchmarks/random_model.py q4_K_M [q6_K q4_0 ...]
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ggmlb import DType, quantize, save_gguf
from ggmlb.models.gguf.mixtures import Mixture, Place
from ggmlb.models.gguf.quantizing import mixture_of
from ggmlb.system.disk_cache import folder

N_LAYER, N_EMBD, N_FF, N_HEAD, N_HEAD_KV, N_VOCAB = 22, 2048, 5632, 32, 4, 32000
N_DRAWN = 1024
"""Rows that are quantised, of each type and length."""

SIZES = {
    "context_length": 2048, "embedding_length": N_EMBD, "block_count": N_LAYER, "feed_forward_length": N_FF,
    "attention.head_count": N_HEAD, "attention.head_count_kv": N_HEAD_KV,
    "attention.layer_norm_rms_epsilon": 1e-5, "rope.dimension_count": N_EMBD // N_HEAD, "vocab_size": N_VOCAB,
}  # fmt: skip
N_KV = N_HEAD_KV * N_EMBD // N_HEAD
MATRICES = {
    "attn_q": (N_EMBD, N_EMBD), "attn_k": (N_EMBD, N_KV), "attn_v": (N_EMBD, N_KV),
    "attn_output": (N_EMBD, N_EMBD), "ffn_gate": (N_EMBD, N_FF), "ffn_up": (N_EMBD, N_FF),
    "ffn_down": (N_FF, N_EMBD),
}  # fmt: skip
"""Extents of a layer's matrices in ggml order: inputs, outputs."""

Blocks = npt.NDArray[np.uint8]


def random_model(dtype: str) -> Path:
    """Return the file of the model in a type, or a mixture as `q4_K_M`; it is written if it is not there."""
    to = mixture_of(dtype)
    path = folder("benchmarks") / f"random-1.1B-{dtype.lower()}.gguf"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        save_gguf(path, metadata(to), tensors(to))
    return path


def metadata(to: Mixture) -> dict[str, Any]:
    """Return sizes, and a vocabulary (SPM) of bytes and of numbers."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    types = [2, 3, 3, *[6] * 256]
    words = [f"\u2581{i}" for i in range(N_VOCAB - len(tokens))]
    return {
        "general.architecture": "llama",
        "general.name": "random 1.1B",
        "general.file_type": to.file_type,
        "general.quantization_version": 2,
        **{f"llama.{key}": value for key, value in SIZES.items()},
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [*tokens, *words],
        "tokenizer.ggml.scores": -np.arange(N_VOCAB, dtype=np.float32),
        "tokenizer.ggml.token_type": np.array([*types, *[1] * len(words)], np.int32),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def tensors(to: Mixture) -> dict[str, Any]:
    """Return the weights; the matrices are drawn when they are written."""
    rng = np.random.default_rng(0)

    def matrix(dtype: DType, n_in: int, n_out: int) -> tuple[Iterator[Blocks], DType, tuple[int, int]]:
        return drawn(rng, dtype, n_in, n_out), dtype, (n_in, n_out)

    norm = np.ones(N_EMBD, np.float32)
    found: dict[str, Any] = {
        "token_embd.weight": matrix(to.dtype, N_EMBD, N_VOCAB),
        "output_norm.weight": norm,
        "output.weight": matrix(to.output_type, N_EMBD, N_VOCAB),
    }
    for layer in range(N_LAYER):
        place = Place(layer, N_LAYER, 0, N_HEAD // N_HEAD_KV)
        at = f"blk.{layer}."
        found |= {at + "attn_norm.weight": norm, at + "ffn_norm.weight": norm}
        for part, extents in MATRICES.items():
            name = f"{at}{part}.weight"
            found[name] = matrix(to.type_of(name, place), *extents)
    return found


def drawn(rng: np.random.Generator, dtype: DType, n_in: int, n_out: int) -> Iterator[Blocks]:
    """Yield rows of blocks, drawn from few."""
    rows = quantized_rows(dtype, n_in)
    for start in range(0, n_out, len(rows)):
        yield rows[rng.permutation(len(rows))[: n_out - start]].reshape(-1)


@cache
def quantized_rows(dtype: DType, n_in: int) -> Blocks:
    """Rows of normally distributed weights that keep the length of what they multiply."""
    values = np.random.default_rng(n_in).standard_normal((N_DRAWN, n_in)) / np.sqrt(n_in)
    return quantize(values.astype(np.float32), dtype).view(np.uint8)


if __name__ == "__main__":
    for given in sys.argv[1:]:
        print(random_model(given))
