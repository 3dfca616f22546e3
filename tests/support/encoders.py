"""Small random encoders in GGUF files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.gguf_files import quantized, write_gguf

E, FF, HEADS, LAYERS, N_CTX = 256, 256, 4, 3, 64
WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"▁w{i}" for i in range(90)), "##x")
N_VOCAB = len(WORDS)

VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "bert": {"pooling_type": 1},
    "nomic-bert": {"pooling_type": 2, "rope.freq_base": 1000.0},
    "modern-bert": {
        "pooling_type": 1, "rope.freq_base": 160000.0, "rope.freq_base_swa": 10000.0,
        "attention.sliding_window": 8, "attention.sliding_window_pattern": 2,
    },
}  # fmt: skip
"""Architectures, with what their metadata has of their own."""

RERANKER = {"pooling_type": 4}


def vocabulary(spm: bool = False) -> dict[str, Any]:
    """Return the metadata of a vocabulary: special tokens, `w0` to `w89`, and a suffix `x`.

    Args:
        spm: Whether it is of SentencePiece and adds no tokens, instead of WordPiece.
    """
    key = "tokenizer.ggml."
    special = {"padding": 0, "unknown": 1, "bos": 2, "seperator": 3, "mask": 4}
    return {
        key + "model": "bert",
        key + "tokens": list(WORDS),
        key + "token_type": [3] * 5 + [1] * (N_VOCAB - 5),
        **{f"{key}{name}_token_id": number for name, number in special.items()},
        **(dict.fromkeys((f"{key}add_bos_token", f"{key}add_eos_token"), False) if spm else {}),
        **({key + "model": "llama", key + "scores": [0.0] * N_VOCAB} if spm else {}),
    }


def write_encoder(
    path: Path,
    arch: str,
    dtype: str = "f32",
    values: str = "",
    fused: bool = False,
    without: tuple[str, ...] = (),
    spm: bool = False,
    tensors: Mapping[str, Any] = {},
    **changed: Any,
) -> Path:
    """Write a small random encoder; return its path.

    Args:
        path: Where.
        arch: Of `VARIANTS`.
        dtype: Type of matrices.
        values: Type of the matrices of values; by default that of the others.
        fused: Whether queries, keys and values are one tensor (always those of modern-bert).
        without: Metadata keys and tensors that are left out.
        spm: As for `vocabulary`.
        tensors: Tensors that are added, or replaced.
        changed: Metadata, by what follows the architecture's name: `pooling_type=4`.
    """
    rng = np.random.default_rng(0)
    is_modern = arch == "modern-bert"
    data: dict[str, Any] = {}

    def add(name: str, values: Any, kept: str = "f32") -> None:
        data[name] = quantized(np.asarray(values, np.float32), kept)

    def linear(name: str, n_out: int, n_in: int, kept: str = dtype, bias: bool = arch == "bert") -> None:
        add(f"{name}.weight", rng.standard_normal((n_out, n_in)) / np.sqrt(n_in), kept)
        if bias:
            add(f"{name}.bias", 0.1 * rng.standard_normal(n_out))

    def norm(name: str) -> None:
        add(f"{name}.weight", 1 + 0.1 * rng.standard_normal(E))
        if not is_modern:
            add(f"{name}.bias", 0.1 * rng.standard_normal(E))

    own: dict[str, Any] = {
        "context_length": N_CTX, "embedding_length": E, "block_count": LAYERS, "feed_forward_length": FF,
        "attention.layer_norm_epsilon": 1e-5, "attention.head_count": HEADS, "attention.causal": False,
        "vocab_size": N_VOCAB, **VARIANTS[arch], **changed,
    }  # fmt: skip
    metadata = {f"{arch}.{key}": value for key, value in own.items() if key not in without} | vocabulary(spm)
    metadata["general.architecture"] = arch
    add("token_embd.weight", rng.standard_normal((N_VOCAB, E)))
    if not is_modern:
        metadata["tokenizer.ggml.token_type_count"] = 2
        add("token_types.weight", rng.standard_normal((2, E)))
    if arch == "bert":
        add("position_embd.weight", rng.standard_normal((N_CTX, E)))
    norm("token_embd_norm")
    for i in range(LAYERS):
        at = f"blk.{i}."
        if fused or is_modern:
            linear(f"{at}attn_qkv", 3 * E, E)
        else:
            for name in "qkv":
                linear(f"{at}attn_{name}", E, E, values or dtype if name == "v" else dtype)
        linear(f"{at}attn_output", E, E)
        linear(f"{at}ffn_up", FF * (1 + is_modern), E)
        if arch == "nomic-bert":
            linear(f"{at}ffn_gate", FF, E)
        linear(f"{at}ffn_down", E, FF)
        for name in (("attn_norm",) * (i > 0) + ("ffn_norm",)) if is_modern else (
            "attn_output_norm", "layer_output_norm",
        ):  # fmt: skip
            norm(at + name)
    if is_modern:
        norm("output_norm")
    if own["pooling_type"] == RERANKER["pooling_type"]:
        linear("cls", E, E, "f32", bias=not is_modern)
        if is_modern:
            norm("cls.norm")
        linear("cls.output", 1, E, "f32", bias=True)
    data |= tensors
    return write_gguf(path, metadata, {name: x for name, x in data.items() if name not in without})
