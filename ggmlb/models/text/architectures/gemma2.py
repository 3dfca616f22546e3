"""Gemma 2."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ggmlb import RopeType
from ggmlb.models.text.architectures import register_architecture
from ggmlb.models.text.blocks import (
    POST,
    Attention,
    attentions,
    decoder_layers,
    feed_forwards,
    sliding_windows,
    windowed,
)
from ggmlb.models.text.blocks.attention import MIN_BASE
from ggmlb.models.text.config import TextConfig
from ggmlb.models.text.keys import Keys

N_LAYER_27B = 46
"""Layers of the variant whose scores are scaled by the width per head, not by the head's size."""


@register_architecture("gemma2")
def gemma2(keys: Keys) -> TextConfig:
    """Read a model: every other layer has a window, scores and logits are capped."""
    attention = gemma_attentions(keys, N_LAYER_27B, softcap=keys.real("attn_logit_softcapping", 50.0))
    base = keys.real("rope.freq_base_swa", keys.real("rope.freq_base", 10000.0, MIN_BASE), MIN_BASE)
    attention = windowed(attention, sliding_windows(keys, 2, 4096), freq_base=base)
    return TextConfig.read(
        keys,
        decoder_layers(attention, feed_forwards(keys, "geglu"), after=POST),
        embedding_scale=keys.n_embd**0.5,
        final_softcap=keys.real("final_logit_softcapping", 30.0),
    )


def gemma_attentions(keys: Keys, n_layer: int, **options: Any) -> list[Attention]:
    """Read the attention of each layer of a Gemma model; the variant of `n_layer` scales otherwise."""
    found = attentions(keys, RopeType.NEOX, **options)
    is_wide = keys.n_layer == n_layer
    return [replace(a, scale=(keys.n_embd // a.n_head) ** -0.5) for a in found] if is_wide else found
