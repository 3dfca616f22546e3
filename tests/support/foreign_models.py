"""Small random models for llama.cpp on our devices, of other architectures, written with PyPI's `gguf`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from ggmlb import DType, quantize
from tests.support.text_models import N_VOCAB, vocabulary

E, FF, HEADS, KV, K, LAYERS, EXPERTS, USED, RANK = 256, 256, 4, 2, 64, 2, 4, 2, 128
INNER, STATE, GROUPS, DT = 512, 64, 2, 8

RMS = {"attention.layer_norm_rms_epsilon": 1e-5}
ATTENTION = {"attention.head_count": HEADS, "attention.head_count_kv": KV, "rope.dimension_count": K}
MIXTURE = {"expert_count": EXPERTS, "expert_used_count": USED, "expert_feed_forward_length": FF}

ARCHITECTURES: Mapping[str, Mapping[str, Any]] = {
    "lfm2": {**RMS, **ATTENTION, "attention.head_count_kv": [0, KV], "shortconv.l_cache": 3},
    "deepseek2": {
        **RMS, **MIXTURE, "attention.head_count": HEADS, "attention.head_count_kv": 1,
        "rope.dimension_count": 32,
        "attention.q_lora_rank": RANK, "attention.kv_lora_rank": RANK, "attention.key_length": RANK + 32,
        "attention.value_length": RANK, "attention.key_length_mla": 96, "attention.value_length_mla": 64,
        "expert_shared_count": 1, "leading_dense_block_count": 1,
    },
    "qwen2moe": {**RMS, **ATTENTION, **MIXTURE, "expert_shared_feed_forward_length": 128},
    "gpt-oss": {**RMS, **ATTENTION, **MIXTURE, "attention.sliding_window": 16},
    "mamba2": {
        **RMS, "ssm.conv_kernel": 4, "ssm.inner_size": INNER, "ssm.state_size": STATE,
        "ssm.group_count": GROUPS, "ssm.time_step_rank": DT, "attention.head_count": 0,
    },
    "bert": {
        "attention.layer_norm_epsilon": 1e-5, "attention.head_count": HEADS, "attention.causal": False,
        "pooling_type": 1,
    },
}  # fmt: skip
"""Architectures (a hybrid, latent attention, mixtures, a recurrent one, an encoder) with their metadata."""


def write_foreign_model(path: Path, arch: str, dtype: str = "f32", experts: str = "") -> Path:
    """Write a small random model; return its path.

    Args:
        path: Where.
        arch: Of `ARCHITECTURES`.
        dtype: Type of matrices.
        experts: Type of experts; by default that of matrices.
    """
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, arch)

    def add(name: str, values: Any, kept: str = "f32") -> None:
        kind = DType.parse(kept)
        data = np.asarray(values, np.float32)
        blocks = data if kept == "f32" else quantize(data, kind).reshape(*data.shape[:-1], -1)
        writer.add_tensor(
            name, blocks, raw_dtype=None if kept == "f32" else gguf.GGMLQuantizationType(int(kind))
        )

    def vector(name: str, *shape: int, around: float = 0.0) -> None:
        add(name, around + 0.1 * rng.standard_normal(shape))

    def matrix(name: str, *shape: int, scale: float = 1.0, kept: str = dtype) -> None:
        add(f"{name}.weight", scale * rng.standard_normal(shape) / np.sqrt(shape[-1]), kept)

    def norm(name: str, n: int = E, with_bias: bool = False) -> None:
        vector(f"{name}.weight", n, around=1.0)
        if with_bias:
            vector(f"{name}.bias", n)

    def mixture(at: str, with_bias: bool = False) -> None:
        matrix(f"{at}ffn_gate_inp", EXPERTS, E, scale=4.0, kept="f32")
        for name, n_out, n_in in (("gate", FF, E), ("up", FF, E), ("down", E, FF)):
            matrix(f"{at}ffn_{name}_exps", EXPERTS, n_out, n_in, kept=experts or dtype)
            if with_bias:
                vector(f"{at}ffn_{name}_exps.bias", EXPERTS, n_out)
        if with_bias:
            vector(f"{at}ffn_gate_inp.bias", EXPERTS)

    def dense(
        at: str, names: tuple[str, ...] = ("gate", "up", "down"), suffix: str = "", n: int = FF
    ) -> None:
        for name in names:
            matrix(f"{at}ffn_{name}{suffix}", *((E, n) if name == "down" else (n, E)))

    metadata = {
        "context_length": 128,
        "embedding_length": E,
        "block_count": LAYERS,
        "feed_forward_length": FF,
    }
    metadata |= {"vocab_size": N_VOCAB, **ARCHITECTURES[arch]}
    for key, value in {**{f"{arch}.{k}": v for k, v in metadata.items()}, **vocabulary()}.items():
        put: dict[type, Any] = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        put |= {bool: writer.add_bool, list: writer.add_array}
        value = value.tolist() if isinstance(value, np.ndarray) else value
        put[type(value)](key, value)

    matrix("token_embd", N_VOCAB, E, scale=8.0, kept="f32")
    if arch == "bert":
        matrix("token_types", 2, E, kept="f32")
        writer.add_uint32("tokenizer.ggml.token_type_count", 2)
        matrix("position_embd", 128, E, kept="f32")
    norm("token_embd_norm" if arch in ("lfm2", "bert") else "output_norm", with_bias=arch == "bert")
    if arch != "bert":
        matrix("output", N_VOCAB, E, scale=2.0)
    for i in range(LAYERS):
        at = f"blk.{i}."
        if arch != "bert":
            norm(f"{at}attn_norm")
        if arch not in ("mamba2", "bert", "gpt-oss"):
            norm(f"{at}ffn_norm")
        if arch == "mamba2":
            inside = INNER + 2 * GROUPS * STATE
            matrix(f"{at}ssm_in", INNER + inside + DT, E)
            vector(f"{at}ssm_conv1d.weight", inside, 4, around=0.3)
            vector(f"{at}ssm_conv1d.bias", inside)
            vector(f"{at}ssm_dt.bias", DT)
            add(f"{at}ssm_a", -np.exp(rng.standard_normal((DT, 1))))
            vector(f"{at}ssm_d", DT, 1, around=1.0)
            vector(f"{at}ssm_norm.weight", GROUPS, INNER // GROUPS, around=1.0)
            matrix(f"{at}ssm_out", E, INNER)
        elif arch == "deepseek2":
            for name in ("q_a", "kv_a"):
                norm(f"{at}attn_{name}_norm", RANK)
            matrix(f"{at}attn_q_a", RANK, E)
            matrix(f"{at}attn_q_b", HEADS * 96, RANK)
            matrix(f"{at}attn_kv_a_mqa", RANK + 32, E)
            matrix(f"{at}attn_k_b", HEADS, RANK, 64)
            matrix(f"{at}attn_v_b", HEADS, 64, RANK)
            matrix(f"{at}attn_output", E, HEADS * 64)
        elif arch == "lfm2" and not i:
            vector(f"{at}shortconv.conv.weight", E, 3, around=0.5)
            matrix(f"{at}shortconv.in_proj", 3 * E, E)
            matrix(f"{at}shortconv.out_proj", E, E)
        else:
            n_kv = HEADS if arch == "bert" else KV
            for name, n in (("q", HEADS * K), ("k", n_kv * K), ("v", n_kv * K)):
                matrix(f"{at}attn_{name}", n, E)
                if arch in ("gpt-oss", "bert"):
                    vector(f"{at}attn_{name}.bias", n)
            matrix(f"{at}attn_output", E, HEADS * K)
        if arch == "lfm2":
            if i:
                norm(f"{at}attn_q_norm", K)
                norm(f"{at}attn_k_norm", K)
            dense(at)
        elif arch == "deepseek2":
            if i:
                mixture(at)
                dense(at, suffix="_shexp")
            else:
                dense(at)
        elif arch == "qwen2moe":
            mixture(at)
            add(f"{at}ffn_gate_inp_shexp.weight", rng.standard_normal(E) / 16)
            dense(at, suffix="_shexp", n=128)
        elif arch == "gpt-oss":
            norm(f"{at}post_attention_norm")
            vector(f"{at}attn_output.bias", E)
            vector(f"{at}attn_sinks.weight", HEADS)
            mixture(at, with_bias=True)
        elif arch == "bert":
            norm(f"{at}attn_output_norm", with_bias=True)
            norm(f"{at}layer_output_norm", with_bias=True)
            dense(at, ("up", "down"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
