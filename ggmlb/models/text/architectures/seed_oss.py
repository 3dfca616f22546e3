"""Seed-OSS."""

from __future__ import annotations

from ggmlb import RopeType
from ggmlb.models.text.architectures import register_architecture
from ggmlb.models.text.blocks import attentions, decoder_layers, feed_forwards
from ggmlb.models.text.config import TextConfig
from ggmlb.models.text.keys import Keys


@register_architecture("seed_oss")
def seed_oss(keys: Keys) -> TextConfig:
    """Read a model, whose norm before the feed-forward part has another name than Llama's."""
    attention, norms = attentions(keys, RopeType.NEOX), ("attn_norm", "post_attention_norm")
    return TextConfig.read(keys, decoder_layers(attention, feed_forwards(keys), norms))
