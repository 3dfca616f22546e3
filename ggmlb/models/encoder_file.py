"""Encoders in GGUF files: BERT, Nomic's and modern variants, and the texts' tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Final

import numpy as np

from ggmlb.core.enums import RopeType
from ggmlb.core.errors import ModelError
from ggmlb.models.bert import SEPARATE, BertConfig, BertLayout
from ggmlb.models.gguf import GgufFile
from ggmlb.models.gguf.vocabulary import Vocabulary
from ggmlb.models.text.blocks import Rope
from ggmlb.models.text.config import EPS_KEYS, POOLINGS
from ggmlb.models.text.keys import Keys
from ggmlb.models.tokens import Tokens

HEAD: Final = {"score_in": "cls", "score_norm": "cls.norm", "score": "cls.output"}
"""Weights that make scores of an embedding, and their tensors."""

GATES: Final = {
    **dict.fromkeys(("gelu", "gelu_python"), "geglu_erf"),
    **dict.fromkeys(("silu", "swish", "swiglu"), "swiglu"),
    **dict.fromkeys(
        ("gelu_new", "gelu_fast", "gelu_accurate", "gelu_python_tanh", "gelu_pytorch_tanh"), "geglu"
    ),
    "geglu": "geglu",
}
"""Gated activation by `hidden_activation`."""


@dataclass(frozen=True)
class _Variant:
    """What an architecture has: its `BertConfig` fields, the tensors of its norms, and of other parts."""

    read: Callable[[Keys], dict[str, Any]]
    names: dict[str, list[str]]


def _of_bert(keys: Keys) -> dict[str, Any]:
    return {"activation": "gelu_new"}


def _of_nomic(keys: Keys) -> dict[str, Any]:
    return {"activation": "swiglu", "ropes": (_rope_base(keys),) * keys.n_layer}


def _of_modern(keys: Keys) -> dict[str, Any]:
    base, window = _rope_base(keys), keys.count("attention.sliding_window", 0, 0)
    local = keys.real("rope.freq_base_swa", base, 1e-3)
    is_local = keys.by_layer("attention.sliding_window_pattern")
    if is_local is None:
        period = keys.count("attention.sliding_window_pattern", 3, 0)
        is_local = tuple(not period or i % period != 0 for i in range(keys.n_layer))
    is_local = tuple(bool(window) and x for x in is_local)
    act = keys.text("hidden_activation", "gelu")
    if act not in GATES:
        raise keys.error("hidden_activation", f"{act!r} is not known; known are {', '.join(GATES)}")
    if keys.count("decision_block_count", 0, 0):
        raise keys.error("decision_block_count", "models of decisions are not supported")
    return {
        "activation": GATES[act],
        "ropes": tuple(local if x else base for x in is_local),
        "windows": tuple(window if x else 0 for x in is_local),
        "norms_first": True,
    }


_SUMS: Final = {"attn_norm": ["blk.{}.attn_output_norm"], "ff_norm": ["blk.{}.layer_output_norm"]}

ENCODERS: Final = {
    "bert": _Variant(_of_bert, {**_SUMS, "positions": ["position_embd"], "types": ["token_types"]}),
    "modern-bert": _Variant(
        _of_modern,
        {"attn_norm": ["blk.{}.attn_norm"], "ff_norm": ["blk.{}.ffn_norm"], "output_norm": ["output_norm"]},
    ),
    "nomic-bert": _Variant(
        _of_nomic,
        {
            **_SUMS,
            "types": ["token_types"],
            "ff_up": ["blk.{}.ffn_gate", "blk.{}.ffn_up"],
            "ff_up.bias": [],  # llama.cpp reads them, and does not add them
            "ff_down.bias": [],
        },
    ),
}
"""The architectures of encoders."""


def _rope_base(keys: Keys) -> float:
    """Return RoPE's base; scaled positions, and RoPE of a part of each head, are refused."""
    n_key = keys.n_embd // keys.count("attention.head_count", most=keys.n_embd)
    rope = Rope.read(keys, RopeType.NEOX, n_key)
    if rope.n_dims != n_key:
        raise keys.error("rope.dimension_count", f"it is {rope.n_dims}; it must be that of a head, {n_key}")
    if (rope.freq_scale, rope.ext_factor) != (1.0, 0.0):
        raise keys.error("rope.scaling.type", "encoders with scaled positions are not supported")
    return rope.freq_base


def read_encoder(file: GgufFile) -> tuple[BertConfig, BertLayout]:
    """Return the sizes and weights of an encoder.

    Raises:
        ModelError: It is no encoder, metadata or a tensor is missing or wrong, or a tensor would be left out.
    """
    name = file.metadata.text("general.architecture")
    if name not in ENCODERS:
        raise ModelError(
            f"{file.path}: {name!r} is no encoder (those are {', '.join(ENCODERS)}); open it with TextModel"
        )
    keys, variant = Keys(file, name), ENCODERS[name]
    if keys.flag("attention.causal", True):
        raise keys.error("attention.causal", "it is true, or missing; an encoder has false")
    n_head = keys.count("attention.head_count", most=keys.n_embd)
    if keys.n_embd % n_head or keys.count("attention.head_count_kv", n_head) != n_head:
        raise keys.error("attention.head_count", f"it is {n_head}; it must divide {keys.n_embd}, as KV heads")
    pooling = POOLINGS[keys.count("pooling_type", POOLINGS.index("mean"), 0, len(POOLINGS) - 1)]
    is_modern = name == "modern-bert"
    of_head = keys.count("classifier.pooling_type", 1 + (not is_modern), 1, 3)
    act = keys.text("classifier.activation", "gelu" if is_modern else "tanh")
    if act not in ("gelu", "silu", "tanh"):
        raise keys.error("classifier.activation", f"{act!r} is not known; known are gelu, silu, tanh")
    if pooling == "none":
        raise keys.error("pooling_type", "it is 0 (none); an embedder needs mean, cls, last, or rank")
    labels = f"{name}.classifier.output_labels"
    n_ctx = keys.count("context_length", least=3, most=1 << 30)
    config = BertConfig(
        name=name,
        n_layer=keys.n_layer,
        n_embd=keys.n_embd,
        n_head=n_head,
        n_ff=keys.count("feed_forward_length"),
        n_vocab=file["token_embd.weight"].shape[0],
        n_ctx=n_ctx,
        n_type=max(1, prod(types.shape) // keys.n_embd) if (types := file.get("token_types.weight")) else 0,
        norm_eps=keys.real(EPS_KEYS["layer"], None, 0, 1),
        n_max=n_ctx,
        pooling=POOLINGS[of_head] if pooling == "rank" else pooling,
        n_score=(len(file.metadata.texts(labels)) if labels in file.metadata else 1) * (pooling == "rank"),
        score_activation=act,
        **variant.read(keys),
    )
    keys.check_unread({"expert_count": (0,), "expert_used_count": (0,), "moe_every_n_layers": (0,)})

    def may_lack(tensor: str) -> bool:
        is_bias = tensor.endswith(".bias") and (is_modern or "norm" not in tensor)
        return is_bias or tensor in ("token_types.weight", "blk.0.attn_norm.weight")

    layout = BertLayout.read(config, file, _names(file, variant, keys.n_layer), may_lack)
    return config, _checked(layout, file, bool(config.n_score))


def _names(file: GgufFile, variant: _Variant, n_layer: int) -> dict[str, list[str]]:
    names = {
        "tokens": ["token_embd"],
        "norm": ["token_embd_norm"],
        "attn_out": ["blk.{}.attn_output"],
        "ff_up": ["blk.{}.ffn_up"],
        "ff_down": ["blk.{}.ffn_down"],
        **{k: [tensor] for k, tensor in HEAD.items() if k == "score" or f"{tensor}.weight" in file},
        **variant.names,
    }
    parts = [f"blk.{{}}.attn_{name[0]}" for name in SEPARATE]
    if "blk.0.attn_qkv.weight" in file:
        return {**names, "qkv": ["blk.{}.attn_qkv"]}
    types = [
        {file[name].dtype for part in parts if (name := f"{part.format(i)}.weight") in file}
        for i in range(n_layer)
    ]
    if all(len(found) == 1 for found in types):  # blocks of several types cannot be stacked
        return {**names, "qkv": parts}
    return {**names, **dict(zip(SEPARATE, ([part] for part in parts), strict=True))}


def _checked(layout: BertLayout, file: GgufFile, scores: bool) -> BertLayout:
    """Return the layout; refuse a file with tensors that the graph would leave out."""
    parts = [layout.embeddings, *layout.layers]
    used = {name for part in parts for source in part.values() for name in source.names}
    used |= {f"{tensor}.{kind}" for tensor in HEAD.values() for kind in ("weight", "bias") if not scores}
    for name in file:
        if name not in used:
            raise ModelError(
                f"{file.path}: this architecture does not use the tensor {name!r}; the model is an "
                "unsupported variant"
            )
    return layout


class VocabularyTokenizer:
    """Splits texts into tokens by the vocabulary of a GGUF file.

    Args:
        file: The model.
        config: Its sizes; longer texts are truncated.

    Raises:
        ModelError: The file has no vocabulary, or a wrong one, or one of another size.
    """

    def __init__(self, file: GgufFile, config: BertConfig) -> None:
        self._vocabulary = words = Vocabulary(file.metadata)
        self._n_max = config.n_max
        self._two_ends = words.adds_eos and file.metadata.flag("tokenizer.ggml.add_sep_token", False)
        if words.n_tokens > config.n_vocab:
            raise ModelError(
                f"{file.path}: the vocabulary has {words.n_tokens} tokens, but {config.n_vocab} embeddings; "
                "convert the file again"
            )

    def __call__(self, texts: Sequence[str]) -> list[Tokens]:
        """Return the token numbers of each text, with the model's special tokens."""
        return [self._cut(self._encode(text)) for text in texts]

    def pair(self, first: str, second: str) -> tuple[Tokens, int]:
        """Return the tokens of two texts, with special ones between them, and how many are of the first."""
        words = self._vocabulary
        head = self._encode(first)
        n_first = len(head)
        if self._two_ends and words.sep is not None:
            head.append(words.sep)
        rest = self._encode(second)
        return self._cut(head + rest[words.adds_bos :]), n_first

    def _encode(self, text: str) -> list[int]:
        return self._vocabulary.encode(text, special=False)

    def _cut(self, tokens: list[int]) -> Tokens:
        """Cut tokens to the longest possible text, whose last one stays."""
        if len(tokens) > self._n_max:
            tokens = [*tokens[: self._n_max - 1], tokens[-1]]
        return np.array(tokens, np.int32)


def open_encoder(path: Path) -> tuple[BertConfig, BertLayout, GgufFile, VocabularyTokenizer]:
    """Open a GGUF file of an encoder: its sizes, its weights, the file, and its tokenizer.

    Raises:
        ModelError: It is none, or corrupt.
    """
    file = GgufFile(path)
    config, layout = read_encoder(file)
    return config, layout, file, VocabularyTokenizer(file, config)
