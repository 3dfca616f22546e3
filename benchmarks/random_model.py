"""Language models of random weights, in any type: of 1.1 and 8 billion parameters, with experts, and small.

Speed depends on sizes and types alone. The blocks of some rows are quantised, and all rows drawn from them,
so that the GGUF file is written in seconds. It is kept in the cache folder.

    python benchmarks/random_model.py q4_K_M [q6_K q4_0 ...]
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ggmlb import DType, quantize, save_gguf
from ggmlb.models.gguf.mixtures import Mixture, MixtureLayer
from ggmlb.models.gguf.quantizing import mixture_of
from ggmlb.system.disk_cache import folder

N_DRAWN = 1024
"""Rows that are quantised, of each type and length."""


class Shape(NamedTuple):
    """The sizes of a model."""

    n_layer: int
    n_embd: int
    n_ff: int
    n_head: int
    n_head_kv: int
    n_expert: int = 0
    n_used: int = 0

    @property
    def sizes(self) -> dict[str, Any]:
        """The metadata of the architecture."""
        experts = {"expert_count": self.n_expert, "expert_used_count": self.n_used} if self.n_expert else {}
        return {
            "context_length": 2048, "embedding_length": self.n_embd, "block_count": self.n_layer,
            "feed_forward_length": self.n_ff, "attention.head_count": self.n_head,
            "attention.head_count_kv": self.n_head_kv, "attention.layer_norm_rms_epsilon": 1e-5,
            "rope.dimension_count": self.n_embd // self.n_head, "vocab_size": N_VOCAB, **experts,
        }  # fmt: skip

    @property
    def matrices(self) -> dict[str, tuple[int, ...]]:
        """Extents of a layer's matrices in ggml order: inputs, outputs, experts."""
        n, n_kv = self.n_embd, self.n_embd // self.n_head * self.n_head_kv
        found: dict[str, tuple[int, ...]] = {
            "attn_q": (n, n), "attn_k": (n, n_kv), "attn_v": (n, n_kv), "attn_output": (n, n)
        }  # fmt: skip
        if not self.n_expert:
            return found | {"ffn_gate": (n, self.n_ff), "ffn_up": (n, self.n_ff), "ffn_down": (self.n_ff, n)}
        up, down = (n, self.n_ff, self.n_expert), (self.n_ff, n, self.n_expert)
        return found | {"ffn_gate_exps": up, "ffn_up_exps": up, "ffn_down_exps": down}


N_VOCAB = 32000
SHAPES = {
    "1.1B": Shape(22, 2048, 5632, 32, 4),  # TinyLlama's
    "8B": Shape(32, 4096, 14336, 32, 8),  # Llama 3's
    "32 layers": Shape(32, 1024, 2048, 16, 4),
    "2 layers": Shape(2, 256, 512, 4, 2),
    "8 experts": Shape(8, 1024, 2048, 16, 4, n_expert=8, n_used=2),
}

Blocks = npt.NDArray[np.uint8]


def random_model(dtype: str, shape: str = "1.1B", home: Path | None = None) -> Path:
    """Return the file of a model in a type or mixture, as `q4_K_M`; it is written if it is not there.

    Args:
        dtype: The type.
        shape: Of `SHAPES`.
        home: The file's folder; by default in ggmlb's cache.
    """
    to = mixture_of(dtype)
    path = (home or folder("benchmarks")) / f"random-{shape.replace(' ', '-')}-{dtype.lower()}.gguf"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        save_gguf(path, metadata(shape, to), tensors(SHAPES[shape], to))
    return path


def metadata(shape: str, to: Mixture) -> dict[str, Any]:
    """Return sizes, and a vocabulary (SPM) of bytes and of numbers."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    types = [2, 3, 3, *[6] * 256]
    words = [f"\u2581{i}" for i in range(N_VOCAB - len(tokens))]
    return {
        "general.architecture": "llama",
        "general.name": f"random {shape}",
        "general.file_type": to.file_type,
        "general.quantization_version": 2,
        **{f"llama.{key}": value for key, value in SHAPES[shape].sizes.items()},
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [*tokens, *words],
        "tokenizer.ggml.scores": -np.arange(N_VOCAB, dtype=np.float32),
        "tokenizer.ggml.token_type": np.array([*types, *[1] * len(words)], np.int32),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def tensors(shape: Shape, to: Mixture) -> dict[str, Any]:
    """Return the weights; the matrices are drawn when they are written."""
    rng = np.random.default_rng(0)

    def matrix(dtype: DType, *ne: int) -> tuple[Iterator[Blocks], DType, tuple[int, ...]]:
        return drawn(rng, dtype, ne[0], math.prod(ne[1:])), dtype, ne

    norm = np.ones(shape.n_embd, np.float32)
    found: dict[str, Any] = {
        "token_embd.weight": matrix(to.dtype, shape.n_embd, N_VOCAB),
        "output_norm.weight": norm,
        "output.weight": matrix(to.output_type, shape.n_embd, N_VOCAB),
    }
    for layer in range(shape.n_layer):
        place = MixtureLayer(layer, shape.n_layer, shape.n_expert, shape.n_head // shape.n_head_kv)
        at = f"blk.{layer}."
        found |= {at + "attn_norm.weight": norm, at + "ffn_norm.weight": norm}
        if shape.n_expert:
            found[at + "ffn_gate_inp.weight"] = matrix(DType.F32, shape.n_embd, shape.n_expert)
        for part, extents in shape.matrices.items():
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
