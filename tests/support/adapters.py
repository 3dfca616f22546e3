"""Random LoRA adapters as GGUF files, for the models of `text_models`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ggmlb import open_gguf, save_gguf
from tests.support.gguf_files import FLOAT32, Typed, write_gguf

ALPHA, RANK = 6.0, 3

WITHOUT = (
    "norm", "ssm_conv1d", "shortconv.conv", "rope_freqs", "bias", "sinks", "ffn_gate_inp_shexp", "lerp",
    "layer_output_scale", "per_layer",
    *(f"time_mix_{part}" for part in ("w", "a", "v0", "v1", "v2", "g", "k_", "r_k", "ln")),
)  # fmt: skip
"""Parts of names of weights that no product reads, that have one row, or that llama.cpp does not adapt."""


def adapted(model: Path) -> list[str]:
    """The names of the weights of a model that an adapter may change."""
    return [n for n in open_gguf(model) if n.endswith(".weight") and not any(w in n for w in WITHOUT)]


def write_adapter(
    path: Path, model: Path, names: list[str] | None = None, seed: int = 1, size: float = 0.3, **metadata: Any
) -> Path:
    """Write a random adapter for some weights of a model, all by default; return its path."""
    file, rng = open_gguf(model), np.random.default_rng(seed)
    tensors = {}
    for name in adapted(model) if names is None else names:
        *experts, n_out, n_in = file[name].shape
        shapes: list[tuple[int, ...]] = [(*experts, RANK, n_in), (*experts, n_out, RANK)]
        if name == "token_embd.weight":
            shapes = [(n_out, RANK), (n_in, RANK)]
        scale = np.float32(size * (RANK / n_in) ** 0.5 / ALPHA)
        a, b = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
        tensors[name + ".lora_a"], tensors[name + ".lora_b"] = a, scale * b
    keys = {
        "general.type": "adapter",
        "general.architecture": file.metadata.text("general.architecture"),
        "adapter.type": "lora",
        "adapter.lora.alpha": Typed(FLOAT32, ALPHA),
        **metadata,
    }
    return write_gguf(path, {k: v for k, v in keys.items() if v is not None}, tensors)


def write_merged(path: Path, model: Path, adapter: Path, scale: float) -> Path:
    """Write a model of f32 weights with an adapter's products added to them; return its path."""
    file, factors = open_gguf(model), open_gguf(adapter)
    tensors = {name: np.array(file.array(name)) for name in file}
    for name in tensors:
        if name + ".lora_a" in factors:
            a, b = (factors.array(f"{name}.lora_{part}").astype(np.float64) for part in "ab")
            product = a @ b.T if name == "token_embd.weight" else b @ a
            tensors[name] = (tensors[name] + scale * ALPHA / RANK * product).astype(np.float32)
    save_gguf(path, {key: file.metadata.raw(key) for key in file.metadata}, tensors)
    return path
