"""Gemma 2."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from ggmlb import RopeType
from ggmlb.models.text.architectures import register_architecture
from ggmlb.models.text.blocks import (
    POST,
    Attention,
    attentions,
    base_in_windows,
    decoder_layers,
    feed_forwards,
    windowed,
)
from ggmlb.models.text.config import TextConfig
from ggmlb.models.text.keys import Keys

N_LAYER_27B = 46
"""Layers of the variant whose scores are scaled by the width per head, not by the head's size."""


@register_architecture("gemma2")
def gemma2(keys: Keys) -> TextConfig:
    """Read a model: every other layer has a window, scores and logits are capped."""
    attention = gemma_attentions(keys, N_LAYER_27B, softcap=keys.real("attn_logit_softcapping", 50.0))
    return gemma(keys, windowed(keys, attention, 2, 4096, freq_base=base_in_windows(keys)), 30.0)


def gemma(keys: Keys, attention: Iterable[Attention], final_softcap: float) -> TextConfig:
    """Read the rest of a Gemma model, after its attention; `final_softcap`: if the file has none."""
    return TextConfig.read(
        keys,
        decoder_layers(attention, feed_forwards(keys, "geglu"), after=POST),
        embedding_scale=keys.n_embd**0.5,
        final_softcap=keys.real("final_logit_softcapping", final_softcap),
    )


def gemma_attentions(keys: Keys, n_layer: int, **options: Any) -> list[Attention]:
    """Read the attention of each layer of a Gemma model; the variant of `n_layer` scales otherwise."""
    found = attentions(keys, RopeType.NEOX, **options)
    is_wide = keys.n_layer == n_layer
    return [replace(a, scale=(keys.n_embd // a.n_head) ** -0.5) for a in found] if is_wide else found
