"""Qwen2 and Qwen2.5."""

from __future__ import annotations

from ggmlb import RopeType
from ggmlb.models.text.architectures import register_architecture
from ggmlb.models.text.blocks import attentions, decoder_layers, feed_forwards
from ggmlb.models.text.config import TextConfig
from ggmlb.models.text.keys import Keys


@register_architecture("qwen2")
def qwen2(keys: Keys) -> TextConfig:
    """Read a model; its biases are those of the file."""
    return TextConfig.read(keys, decoder_layers(attentions(keys, RopeType.NEOX), feed_forwards(keys)))
