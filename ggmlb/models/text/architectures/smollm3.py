"""SmolLM3."""

from __future__ import annotations

from dataclasses import replace

from ggmlb import RopeType
from ggmlb.models.text.architectures import register_architecture
from ggmlb.models.text.blocks import attentions, decoder_layers, feed_forwards
from ggmlb.models.text.config import TextConfig
from ggmlb.models.text.keys import Keys


@register_architecture("smollm3")
def smollm3(keys: Keys) -> TextConfig:
    """Read a model: every fourth layer has no RoPE."""
    attention = attentions(keys, RopeType.NORMAL)
    attention[3::4] = [replace(a, rope=None) for a in attention[3::4]]
    return TextConfig.read(keys, decoder_layers(attention, feed_forwards(keys)))
