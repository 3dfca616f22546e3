"""EXAONE 4."""

from __future__ import annotations

from ggmlb import RopeType
from ggmlb.models.text.architectures import register_architecture
from ggmlb.models.text.blocks import NONE, POST, attentions, decoder_layers, feed_forwards, windowed
from ggmlb.models.text.config import TextConfig
from ggmlb.models.text.keys import Keys

N_LAYER_WINDOWED = 64
"""Layers of the variant in which three of four have a window, and only these have RoPE."""


@register_architecture("exaone4")
def exaone4(keys: Keys) -> TextConfig:
    """Read a model, whose norms are after the blocks."""
    attention = attentions(keys, RopeType.NEOX, norms="head")
    if keys.n_layer == N_LAYER_WINDOWED:
        attention = windowed(keys, attention, 4, 4096, only_local_rope=True)
    return TextConfig.read(keys, decoder_layers(attention, feed_forwards(keys), NONE, POST))
