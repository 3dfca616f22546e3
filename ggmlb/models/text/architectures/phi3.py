"""Phi-3 and Phi-4."""

from __future__ import annotations

from ggmlb import RopeType
from ggmlb.models.text.architectures import register_architecture
from ggmlb.models.text.blocks import attentions, decoder_layers, feed_forwards
from ggmlb.models.text.config import TextConfig
from ggmlb.models.text.keys import Keys


@register_architecture("phi3")
def phi3(keys: Keys) -> TextConfig:
    """Read a model, whose projections and feed-forward products are fused."""
    return TextConfig.read(keys, decoder_layers(attentions(keys, RopeType.NEOX), feed_forwards(keys)))
