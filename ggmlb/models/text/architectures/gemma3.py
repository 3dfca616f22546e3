"""Gemma 3."""

from __future__ import annotations

from ggmlb.models.text.architectures import register_architecture
from ggmlb.models.text.architectures.gemma2 import gemma_attentions
from ggmlb.models.text.blocks import POST, decoder_layers, feed_forwards, sliding_windows, windowed
from ggmlb.models.text.blocks.attention import MIN_BASE
from ggmlb.models.text.config import TextConfig
from ggmlb.models.text.keys import Keys

N_LAYER_27B = 62
"""Layers of the variant whose scores are scaled by the width per head, not by the head's size."""


@register_architecture("gemma3")
def gemma3(keys: Keys) -> TextConfig:
    """Read a model: five of six layers have a window, and another RoPE."""
    attention = gemma_attentions(keys, N_LAYER_27B, norms="head")
    base = keys.real("rope.freq_base_swa", 10000.0, MIN_BASE)
    attention = windowed(attention, sliding_windows(keys, 6), freq_base=base, freq_scale=1.0)
    return TextConfig.read(
        keys,
        decoder_layers(attention, feed_forwards(keys, "geglu"), after=POST),
        embedding_scale=keys.n_embd**0.5,
        final_softcap=keys.real("final_logit_softcapping", 0.0),
    )
