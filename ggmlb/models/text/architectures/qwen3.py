"""Qwen3, dense and with experts."""

from __future__ import annotations

from ggmlb import RopeType
from ggmlb.models.text.architectures import register_architecture
from ggmlb.models.text.blocks import attentions, decoder_layers, experts, feed_forwards
from ggmlb.models.text.config import TextConfig
from ggmlb.models.text.keys import Keys


@register_architecture("qwen3")
def qwen3(keys: Keys) -> TextConfig:
    """Read the configuration of a dense model, whose queries and keys have norms."""
    attention = attentions(keys, RopeType.NEOX, norms="head")
    return TextConfig.read(keys, decoder_layers(attention, feed_forwards(keys)))


@register_architecture("qwen3moe")
def qwen3moe(keys: Keys) -> TextConfig:
    """Read a model with experts."""
    attention = attentions(keys, RopeType.NEOX, norms="head")
    return TextConfig.read(keys, decoder_layers(attention, experts(keys)))
