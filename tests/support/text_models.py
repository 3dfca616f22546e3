"""Small random language models as GGUF files, one for each architecture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ggmlb import DType, quantize
from tests.support.gguf_files import FLOAT32, Typed, write_gguf

N_EMBD, N_FF, N_HEAD, N_HEAD_KV, N_KEY, N_VOCAB = 256, 512, 4, 2, 64, 320
N_INNER, N_STATE, N_DT, N_CONV = 512, 16, 16, 4
N_EXPERT, N_USED, N_SHARED = 4, 2, 256
YARN: Mapping[str, Any] = {
    "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32,
}  # fmt: skip
LFM = ("lfm2", "lfm2moe")
HYBRID = ("lfm2", "lfm2moe", "granitehybrid", "qwen3next", "qwen35", "qwen35moe")
"""Architectures of which only every other layer, from the second on, has attention."""
HYPHENATED = ("gpt-oss", "command-r", "falcon-h1")
"""Architectures with a `-`, which else parts an architecture from a variant."""
GEMMA = ("gemma2", "gemma3", "gemma4", "gemma4-inputs")
HEAD_NORMS = ("qwen3", "qwen3moe", *GEMMA[1:], "exaone4", "qwen3next", "qwen35", "qwen35moe", *LFM)
POST_NORMS = (*GEMMA, "glm4", "olmo2", "exaone4")
NO_NORMS = ("olmo2", "exaone4")
FUSED = ("phi3", "glm4")
TIED = (*GEMMA, "command-r", "cohere2", *LFM)
PARALLEL = ("command-r", "cohere2")
CENTRED = (*PARALLEL, "rwkv7")
"""Architectures whose norms subtract the mean."""
CHOICE_BIAS = ("lfm2moe", "deepseek2-groups", "glm4moe")
N_LATENT, N_ROTATED, N_PLAIN, N_QUERY, N_OUT = 256, 32, 64, 256, 64
LATENT: Mapping[str, Any] = {
    "attention.head_count_kv": 1, "attention.key_length": N_LATENT + N_ROTATED,
    "attention.value_length": N_LATENT, "attention.key_length_mla": N_PLAIN + N_ROTATED,
    "attention.value_length_mla": N_OUT, "attention.kv_lora_rank": N_LATENT,
    "rope.dimension_count": N_ROTATED, "expert_count": N_EXPERT, "expert_used_count": N_USED,
    "expert_feed_forward_length": N_SHARED, "expert_shared_count": 1, "leading_dense_block_count": 1,
}  # fmt: skip
DENSE_FIRST = ("lfm2moe", "deepseek2", "glm4moe")
"""Architectures whose first layers are dense; the shares of their experts are not all 0 or 1 here."""
N_LAYER_LITE = 27
"""Layers of DeepSeek V2 Lite, whose queries have no latent vector."""
N_GROUP, N_MAMBA_HEAD, N_MAMBA_STATE = 2, 8, 64
MAMBA2: Mapping[str, Any] = {
    "ssm.conv_kernel": N_CONV, "ssm.inner_size": N_INNER, "ssm.state_size": N_MAMBA_STATE,
    "ssm.time_step_rank": N_MAMBA_HEAD, "ssm.group_count": N_GROUP,
}  # fmt: skip
N_DELTA, N_DELTA_HEAD, N_DELTA_KEY = 64, 4, 2
DELTA: Mapping[str, Any] = {
    "ssm.conv_kernel": N_CONV, "ssm.inner_size": N_DELTA * N_DELTA_HEAD, "ssm.state_size": N_DELTA,
    "ssm.time_step_rank": N_DELTA_HEAD, "ssm.group_count": N_DELTA_KEY, "full_attention_interval": 2,
}  # fmt: skip
N_WIDE, N_INPUT, N_OWN = 128, 32, 3
"""Of Gemma 4: elements of a head without a window, and of an embedding for a layer; layers with keys."""
GEMMA4: Mapping[str, Any] = {
    "attention.sliding_window": 8, "attention.key_length": N_WIDE, "attention.value_length": N_WIDE,
    "attention.key_length_swa": N_KEY, "attention.value_length_swa": N_KEY,
    "rope.dimension_count": N_WIDE, "rope.dimension_count_swa": N_KEY, "rope.freq_base": 1e6,
    "rope.freq_base_swa": 1e4, "final_logit_softcapping": 30.0, "embedding_length_per_layer_input": 0,
}  # fmt: skip
RANKS = {"decay": 64, "iclr": 32, "value_residual_mix": 32, "gate": 96}
RECURRENT = ("mamba", "mamba-norms", "mamba2", "rwkv7")
"""Kinds that have no attention."""
NEXT = ("qwen3next", "qwen35", "qwen35moe")
POST_ATTENTION = (*NEXT, "gpt-oss", "seed_oss", "glm4moe")
"""Architectures whose norm before the feed-forward part is `post_attention_norm`."""
LAYERS = {"gemma3": 7, "gemma4": 6, "cohere2": 5, "olmo2": 5, "smollm3": 5}
"""Of architectures with a period of layers; others have 3."""

KINDS: Mapping[str, Mapping[str, Any]] = {
    "llama": {},
    "llama-linear": {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
    "llama-yarn": YARN,
    "llama-factors": {},
    "llama-experts": {"expert_count": N_EXPERT, "expert_used_count": N_USED},
    "qwen2": {},
    "qwen3": {},
    "qwen3moe": {
        "expert_count": N_EXPERT, "expert_used_count": N_USED, "expert_feed_forward_length": N_FF,
    },
    "gemma2": {
        "attention.sliding_window": 8, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0,
    },
    "gemma3": {"attention.sliding_window": 8, "rope.freq_base": 1e6},
    "gemma4": GEMMA4,
    "gemma4-inputs": {**GEMMA4, "embedding_length_per_layer_input": N_INPUT},
    "phi3": {},
    "mamba": {
        "ssm.conv_kernel": N_CONV, "ssm.inner_size": N_INNER, "ssm.state_size": N_STATE,
        "ssm.time_step_rank": N_DT,
    },
    "mamba2": MAMBA2,
    "rwkv7": {
        "wkv.head_size": N_KEY, **{f"attention.{name}_lora_rank": n for name, n in RANKS.items()},
    },
    "falcon-h1": MAMBA2,
    "qwen3next": {
        **DELTA, "expert_count": N_EXPERT, "expert_used_count": N_USED, "expert_feed_forward_length": N_FF,
        "expert_shared_feed_forward_length": N_SHARED,
    },
    "qwen35": {**DELTA, "rope.dimension_sections": np.array([11, 11, 10, 0], np.int32)},
    "qwen35moe": {
        **DELTA, "expert_count": N_EXPERT, "expert_used_count": N_USED, "expert_feed_forward_length": N_FF,
        "expert_shared_feed_forward_length": N_SHARED,
        "rope.dimension_sections": np.array([11, 11, 10, 0], np.int32),
    },
    "granitehybrid": {
        **MAMBA2, "embedding_scale": 3.0, "logit_scale": 2.0, "residual_scale": 0.5,
        "rope.scaling.finetuned": False,
    },
    "nemotron_h": MAMBA2,
    "granitehybrid-experts": {
        **MAMBA2, "expert_count": N_EXPERT, "expert_used_count": N_USED, "attention.scale": 0.25,
        "expert_shared_feed_forward_length": N_SHARED,
    },
    "mamba-norms": {
        "ssm.conv_kernel": N_CONV, "ssm.inner_size": N_INNER, "ssm.state_size": N_STATE,
        "ssm.time_step_rank": N_DT, "ssm.dt_b_c_rms": True,
    },
    "granite": {
        "attention.scale": 0.25, "embedding_scale": 3.0, "logit_scale": 2.0, "residual_scale": 0.5,
    },
    "granite-experts": {
        "expert_count": N_EXPERT, "expert_used_count": N_USED, "expert_shared_feed_forward_length": N_SHARED,
        "embedding_scale": 3.0, "logit_scale": 2.0, "residual_scale": 0.5,
    },
    "granitemoe": {
        "expert_count": N_EXPERT, "expert_used_count": N_USED, "logit_scale": 2.0, "residual_scale": 0.5,
    },
    "olmo2": {"attention.sliding_window": 8, **YARN},
    "gpt-oss": {
        "attention.sliding_window": 8, "expert_count": N_EXPERT, "expert_used_count": N_USED,
        "expert_feed_forward_length": N_FF, **YARN,
    },
    "smollm3": {},
    "qwen2moe": {
        "expert_count": N_EXPERT, "expert_used_count": N_USED, "expert_feed_forward_length": N_FF,
        "expert_shared_feed_forward_length": N_SHARED,
    },
    "glm4": {"rope.dimension_count": N_KEY // 2},
    "seed_oss": {},
    "deepseek2": {
        **LATENT, **YARN, "attention.q_lora_rank": N_QUERY, "expert_weights_scale": 1.5,
        "rope.scaling.yarn_log_multiplier": 0.0707,
    },
    "deepseek2-groups": {
        **LATENT, **YARN, "attention.q_lora_rank": N_QUERY, "expert_count": 8, "expert_group_count": 4,
        "expert_group_used_count": 2, "expert_gating_func": 2, "expert_weights_norm": True,
        "expert_weights_scale": 0.75, "rope.scaling.yarn_log_multiplier": 0.1,
    },
    "glm4moe": {
        "expert_count": N_EXPERT, "expert_used_count": N_USED, "expert_feed_forward_length": N_SHARED,
        "expert_shared_count": 1, "leading_dense_block_count": 1, "expert_weights_norm": True,
        "rope.dimension_count": N_KEY // 2,
    },
    "lfm2": {"shortconv.l_cache": 3},
    "lfm2moe": {
        "shortconv.l_cache": 3, "expert_count": N_EXPERT, "expert_used_count": N_USED,
        "expert_feed_forward_length": N_FF, "expert_gating_func": 2, "leading_dense_block_count": 1,
    },
    "exaone4": {},
    "command-r": {"logit_scale": 0.25},
    "cohere2": {"attention.sliding_window": 8, "logit_scale": 0.25},
    "mistral3": {
        "attention.temperature_scale": 0.5, "rope.scaling.yarn_beta_fast": 16.0,
        "rope.scaling.yarn_beta_slow": 2.0, "rope.scaling.yarn_log_multiplier": 0.7, **YARN,
    },
}  # fmt: skip
"""Metadata beyond the sizes of each kind of model; a kind is an architecture and a variant of it."""


def parts_of(kind: str) -> tuple[str, str]:
    """Return the architecture and the variant of a kind."""
    for name in HYPHENATED:
        if kind.startswith(name):
            return name, kind[len(name) + 1 :]
    arch, _, variant = kind.partition("-")
    return arch, variant


def has_experts(kind: str) -> bool:
    """Whether a kind has experts."""
    return "expert_count" in KINDS[kind]


def vocabulary() -> dict[str, Any]:
    """A vocabulary with byte fallback (SPM), of letters and some special tokens."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    tokens += ["\u2581", *map(chr, range(97, 123)), *(f"\u2581{c}" for c in "abcdefghijklmnopqrstuvwxyz")]
    tokens += [f"[{i}]" for i in range(N_VOCAB - len(tokens))]
    types = [2, 3, 3, *[6] * 256, *[1] * (N_VOCAB - 259)]
    scores = [0.0, 0.0, 0.0, *[0.0] * 256, *[-float(i) for i in range(N_VOCAB - 259)]]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": np.array(scores, np.float32),
        "tokenizer.ggml.token_type": np.array(types, np.int32),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def sizes_of(kind: str, n_layer: int) -> dict[str, Any]:
    """Return the metadata of a kind of model, by what follows the architecture's name."""
    is_recurrent = kind in RECURRENT
    eps = "epsilon" if kind in CENTRED else "rms_epsilon"
    sizes: dict[str, Any] = {
        "context_length": 128, "embedding_length": N_EMBD, "block_count": n_layer,
        "feed_forward_length": 0 if kind.startswith("mamba") else N_FF,
        "attention.head_count": 0 if is_recurrent else N_HEAD,
        f"attention.layer_norm_{eps}": Typed(FLOAT32, 1e-5),
    }  # fmt: skip
    if not is_recurrent:
        sizes |= {
            "attention.head_count_kv": N_HEAD_KV, "attention.key_length": N_KEY,
            "attention.value_length": N_KEY, "rope.dimension_count": N_KEY, "vocab_size": N_VOCAB,
        }  # fmt: skip
    if parts_of(kind)[0] in HYBRID and "full_attention_interval" not in KINDS[kind]:
        sizes["attention.head_count_kv"] = np.array([N_HEAD_KV * (i % 2) for i in range(n_layer)], np.int32)
    if kind == "nemotron_h":
        sizes["attention.layer_norm_epsilon"] = Typed(FLOAT32, 1e-5)
        n_head_kv = [N_HEAD_KV * (i % 3 == 1) for i in range(n_layer)]
        sizes["attention.head_count_kv"] = np.array(n_head_kv, np.int32)
        sizes["feed_forward_length"] = np.array([N_FF * (i % 3 == 2) for i in range(n_layer)], np.int32)
    if kind.startswith("gemma4"):
        is_local = [i % N_OWN < N_OWN - 1 for i in range(n_layer)]
        sizes["attention.sliding_window_pattern"] = is_local
        sizes["attention.head_count_kv"] = np.array([1 + local for local in is_local], np.int32)
    if kind == "gemma4-inputs" and n_layer > N_OWN:
        sizes["attention.shared_kv_layers"] = n_layer - N_OWN
        sizes["feed_forward_length"] = np.array([N_FF * (1 + (i >= N_OWN)) for i in range(n_layer)], np.int32)
    found = {**sizes, **KINDS[kind]}
    if n_layer == N_LAYER_LITE:
        found.pop("attention.q_lora_rank", None)
    return found


def write_text_model(
    path: Path,
    kind: str = "llama",
    dtype: str = "f32",
    n_layer: int = 0,
    seed: int = 0,
    tied: bool = False,
    changes: Mapping[str, Any] = {},
) -> Path:
    """Write a small random model; return its path.

    Args:
        path: Where.
        kind: Of `KINDS`.
        dtype: Type of matrices; for mxfp4 of experts, and q8_0 of the others.
        n_layer: Layers; by default 3, or as many as a period of windows needs.
        seed: Of the weights.
        tied: The output has no matrix of its own.
        changes: Metadata that is changed or added, by what follows the architecture's name.
    """
    arch, variant = parts_of(kind)
    n_layer = n_layer or LAYERS.get(arch, 3)
    rng = np.random.default_rng(seed)
    tensors: dict[str, Any] = {}

    def vector(name: str, *shape: int, around: float = 0.0) -> None:
        tensors[name] = (around + 0.1 * rng.standard_normal(shape)).astype(np.float32)

    def matrix(name: str, n_out: int, n_in: int, n: int = 0, scale: float = 1.0) -> None:
        shape = (n, n_out, n_in) if n else (n_out, n_in)
        values = (scale * rng.standard_normal(shape) / np.sqrt(n_in)).astype(np.float32)
        kept = DType.parse("q8_0" if dtype == "mxfp4" and not n else dtype)
        if n_in % kept.block_size:
            kept = DType.Q8_0  # as llama.cpp quantises such rows
        tensors[name] = (quantize(values, kept), kept, shape[::-1])

    def norm(name: str, n: int = N_EMBD) -> None:
        vector(name, n, around=1.0)

    matrix("token_embd.weight", N_VOCAB, N_EMBD, scale=2.0 if arch in TIED else 8.0)
    norm("token_embd_norm.weight" if arch in LFM else "output_norm.weight")
    if arch == "rwkv7":
        norm("token_embd_norm.weight")
        vector("token_embd_norm.bias", N_EMBD)
        vector("output_norm.bias", N_EMBD)
    if not tied and arch not in TIED:
        matrix("output.weight", N_VOCAB, N_EMBD, scale=2.0)
    if variant == "factors":
        tensors["rope_freqs.weight"] = np.linspace(1, 8, N_KEY // 2, dtype=np.float32)
    if arch == "gemma4":
        factors = np.linspace(1, 8, N_WIDE // 2, dtype=np.float32)
        tensors["rope_freqs.weight"] = np.where(np.arange(N_WIDE // 2) < N_WIDE // 8, factors, 1e30)
    if variant == "inputs":
        matrix("per_layer_token_embd.weight", N_VOCAB, N_INPUT * n_layer, scale=4.0)
        matrix("per_layer_model_proj.weight", N_INPUT * n_layer, N_EMBD)
        norm("per_layer_proj_norm.weight", N_INPUT)
    n_q, n_kv, n_key, n_ff = N_HEAD * N_KEY, N_HEAD_KV * N_KEY, N_KEY, N_FF
    for i in range(n_layer):
        at = f"blk.{i}."
        if arch == "gemma4":
            is_wide, borrows = i % N_OWN == N_OWN - 1, variant == "inputs" and i >= N_OWN
            n_key = N_WIDE if is_wide else N_KEY
            n_q, n_kv, n_ff = N_HEAD * n_key, N_HEAD_KV * N_KEY, N_FF * (1 + borrows)
            tensors[at + "layer_output_scale.weight"] = np.array([0.5 + i / 4], np.float32)
        if variant == "inputs":
            matrix(at + "inp_gate.weight", N_INPUT, N_EMBD)
            matrix(at + "proj.weight", N_EMBD, N_INPUT)
            norm(at + "post_norm.weight")
        if arch not in NO_NORMS:
            norm(at + "attn_norm.weight")
        if arch == "nemotron_h" and i % 3:
            n_up = n_q if i % 3 == 1 else N_FF
            if i % 3 == 1:
                for part, n in (("q", n_q), ("k", n_kv), ("v", n_kv)):
                    matrix(f"{at}attn_{part}.weight", n, N_EMBD)
            else:
                matrix(at + "ffn_up.weight", N_FF, N_EMBD)
            matrix(at + ("attn_output.weight" if i % 3 == 1 else "ffn_down.weight"), N_EMBD, n_up)
            continue
        if arch in ("mamba2", "falcon-h1", "nemotron_h") or (arch == "granitehybrid" and not i % 2):
            n_channels = N_INNER + 2 * N_GROUP * N_MAMBA_STATE
            matrix(at + "ssm_in.weight", N_INNER + n_channels + N_MAMBA_HEAD, N_EMBD)
            vector(at + "ssm_conv1d.weight", n_channels, N_CONV, around=0.3)
            vector(at + "ssm_conv1d.bias", n_channels)
            vector(at + "ssm_dt.bias", N_MAMBA_HEAD)
            decays = -np.exp(rng.standard_normal((N_MAMBA_HEAD, 1)))
            tensors[at + "ssm_a"] = decays.astype(np.float32)
            vector(at + "ssm_d", N_MAMBA_HEAD, 1, around=1.0)
            if arch != "falcon-h1":
                vector(at + "ssm_norm.weight", N_GROUP, N_INNER // N_GROUP, around=1.0)
            matrix(at + "ssm_out.weight", N_EMBD, N_INNER)
        if arch in ("mamba2", "nemotron_h"):
            continue
        if arch == "mamba":
            matrix(at + "ssm_in.weight", 2 * N_INNER, N_EMBD)
            vector(at + "ssm_conv1d.weight", N_INNER, N_CONV)
            vector(at + "ssm_conv1d.bias", N_INNER)
            matrix(at + "ssm_x.weight", N_DT + 2 * N_STATE, N_INNER)
            tensors[at + "ssm_dt.weight"] = rng.standard_normal((N_INNER, N_DT)).astype(np.float32)
            vector(at + "ssm_dt.bias", N_INNER)
            tensors[at + "ssm_a"] = -np.exp(rng.standard_normal((N_INNER, N_STATE))).astype(np.float32)
            vector(at + "ssm_d", N_INNER, around=1.0)
            matrix(at + "ssm_out.weight", N_EMBD, N_INNER)
            continue
        if arch == "rwkv7":
            norm(at + "attn_norm_2.weight")
            for name in ("attn_norm.bias", "attn_norm_2.bias", "time_mix_ln.bias"):
                vector(at + name, N_EMBD)
            ranks = dict(zip("wavg", RANKS.values(), strict=True))
            for part, rank in (ranks if i else ranks | {"v": ranks["a"]}).items():
                for name, shape in ((f"{part}1", (rank, N_EMBD)), (f"{part}2", (N_EMBD, rank))):
                    values = rng.standard_normal(shape) / np.sqrt(shape[1])
                    tensors[f"{at}time_mix_{name}.weight"] = values.astype(np.float32)
                if part != "g":
                    vector(f"{at}time_mix_{part}0.weight", N_EMBD)
            tensors[at + "time_mix_lerp_fused.weight"] = rng.random((6, 1, 1, N_EMBD), np.float32)
            tensors[at + "channel_mix_lerp_k.weight"] = rng.random((1, 1, N_EMBD), np.float32)
            for name in ("k_k", "k_a", "ln"):
                norm(f"{at}time_mix_{name}.weight")
            vector(at + "time_mix_r_k.weight", N_EMBD)
            for name in ("receptance", "key", "value", "output"):
                matrix(f"{at}time_mix_{name}.weight", N_EMBD, N_EMBD)
            matrix(at + "channel_mix_key.weight", N_FF, N_EMBD)
            matrix(at + "channel_mix_value.weight", N_EMBD, N_FF)
            continue
        if arch in LFM and not i % 2:
            vector(at + "shortconv.conv.weight", N_EMBD, 3, around=0.5)
            matrix(at + "shortconv.in_proj.weight", 3 * N_EMBD, N_EMBD)
            matrix(at + "shortconv.out_proj.weight", N_EMBD, N_EMBD)
        elif arch == "deepseek2":
            n_head_q = N_HEAD * (N_PLAIN + N_ROTATED)
            if n_layer != N_LAYER_LITE:
                matrix(at + "attn_q_a.weight", N_QUERY, N_EMBD)
                norm(at + "attn_q_a_norm.weight", N_QUERY)
                matrix(at + "attn_q_b.weight", n_head_q, N_QUERY)
            else:
                matrix(at + "attn_q.weight", n_head_q, N_EMBD)
            matrix(at + "attn_kv_a_mqa.weight", N_LATENT + N_ROTATED, N_EMBD)
            norm(at + "attn_kv_a_norm.weight", N_LATENT)
            matrix(at + "attn_k_b.weight", N_LATENT, N_PLAIN, N_HEAD)
            matrix(at + "attn_v_b.weight", N_OUT, N_LATENT, N_HEAD)
        elif arch in NEXT and not i % 2:
            n_inner = N_DELTA * N_DELTA_HEAD
            n_channels = n_inner + 2 * N_DELTA * N_DELTA_KEY
            matrix(at + "attn_qkv.weight", n_channels, N_EMBD)
            matrix(at + "attn_gate.weight", n_inner, N_EMBD)
            ends = ("ba",) if arch == "qwen3next" else ("beta", "alpha")
            for end in ends:
                matrix(f"{at}ssm_{end}.weight", 2 * N_DELTA_HEAD // len(ends), N_EMBD)
            vector(at + "ssm_conv1d.weight", n_channels, N_CONV, around=0.3)
            vector(at + "ssm_dt.bias", N_DELTA_HEAD)
            tensors[at + "ssm_a"] = -np.exp(rng.standard_normal(N_DELTA_HEAD)).astype(np.float32)
            norm(at + "ssm_norm.weight", N_DELTA)
            matrix(at + "ssm_out.weight", N_EMBD, n_inner)
        elif arch in HYBRID and not i % 2:
            pass
        elif arch == "phi3":
            matrix(at + "attn_qkv.weight", n_q + 2 * n_kv, N_EMBD)
        else:
            parts = {"q": n_q * (1 + (arch in NEXT)), "k": n_kv, "v": n_kv}
            if arch == "gemma4" and borrows:
                parts = {"q": n_q}
            elif arch == "gemma4" and is_wide and not variant:
                del parts["v"]
            for part, n in parts.items():
                matrix(f"{at}attn_{part}.weight", n, N_EMBD)
                if arch in ("qwen2", "qwen2moe", "gpt-oss", "seed_oss", "glm4moe"):
                    vector(f"{at}attn_{part}.bias", n)
        has_attention = arch not in HYBRID or i % 2
        if has_attention:
            n_out = N_HEAD * N_OUT if arch == "deepseek2" else n_q
            matrix(at + "attn_output.weight", N_EMBD, n_out)
        if arch in HEAD_NORMS and has_attention:
            # The scores of Gemma 4 are not scaled: its queries are small.
            vector(at + "attn_q_norm.weight", n_key, around=0.1 if arch == "gemma4" else 1.0)
            if arch != "gemma4" or not borrows:
                norm(at + "attn_k_norm.weight", n_key)
        if arch == "olmo2":
            norm(at + "attn_q_norm.weight", n_q)
            norm(at + "attn_k_norm.weight", n_kv)
        if arch == "command-r" and n_layer >= 64:
            vector(at + "attn_q_norm.weight", N_HEAD, N_KEY, around=1.0)
            vector(at + "attn_k_norm.weight", N_HEAD_KV, N_KEY, around=1.0)
        if arch == "gpt-oss":
            vector(at + "attn_output.bias", N_EMBD)
            vector(at + "attn_sinks.weight", N_HEAD, around=1.0)
        if arch in (*POST_NORMS, *POST_ATTENTION):
            norm(at + "post_attention_norm.weight")
        if arch in POST_NORMS:
            norm(at + "post_ffw_norm.weight")
        if arch not in (*NO_NORMS, *PARALLEL, *POST_ATTENTION):
            norm(at + ("ffn_norm" if arch == "falcon-h1" else "ffn_norm.weight"))
        is_mixture = has_experts(kind) and i >= KINDS[kind].get("leading_dense_block_count", 0)
        if is_mixture:
            n_expert, n_ff = KINDS[kind]["expert_count"], KINDS[kind].get("expert_feed_forward_length", N_FF)
            router = rng.standard_normal((n_expert, N_EMBD)) / (8 if kind in DENSE_FIRST else 1)
            tensors[at + "ffn_gate_inp.weight"] = router.astype(np.float32)
            matrix(at + "ffn_gate_exps.weight", n_ff, N_EMBD, n_expert)
            matrix(at + "ffn_up_exps.weight", n_ff, N_EMBD, n_expert)
            # States keep the effect of another choice for all later tokens: here it is small.
            scale = 0.25 if arch in NEXT else 1.0
            matrix(at + "ffn_down_exps.weight", N_EMBD, n_ff, n_expert, scale)
        if arch == "gpt-oss":
            vector(at + "ffn_gate_inp.bias", N_EXPERT)
            for part, n in (("gate", N_FF), ("up", N_FF), ("down", N_EMBD)):
                vector(f"{at}ffn_{part}_exps.bias", N_EXPERT, n)
        is_shared = arch in ("qwen2moe", "qwen3next", "qwen35moe", "deepseek2", "glm4moe") or kind in (
            "granite-experts",
            "granitehybrid-experts",
        )
        if is_mixture and is_shared:
            matrix(at + "ffn_gate_shexp.weight", N_SHARED, N_EMBD)
            matrix(at + "ffn_up_shexp.weight", N_SHARED, N_EMBD)
            matrix(at + "ffn_down_shexp.weight", N_EMBD, N_SHARED)
        if arch in ("qwen2moe", "qwen3next", "qwen35moe"):
            tensors[at + "ffn_gate_inp_shexp.weight"] = rng.standard_normal(N_EMBD).astype(np.float32) / 16
        if is_mixture and (arch in CHOICE_BIAS or kind in CHOICE_BIAS):
            bias = rng.permutation(np.linspace(-0.5, 0.5, n_expert))
            tensors[at + "exp_probs_b.bias"] = bias.astype(np.float32)
        if is_mixture:
            continue
        if arch in FUSED:
            matrix(at + "ffn_up.weight", 2 * N_FF, N_EMBD)
        else:
            matrix(at + "ffn_gate.weight", n_ff, N_EMBD)
            matrix(at + "ffn_up.weight", n_ff, N_EMBD)
        matrix(at + "ffn_down.weight", N_EMBD, n_ff)
    metadata = {
        "general.architecture": arch,
        "general.name": "random",
        **{f"{arch}.{key}": value for key, value in {**sizes_of(kind, n_layer), **changes}.items()},
        **vocabulary(),
    }
    return write_gguf(path, metadata, tensors)
