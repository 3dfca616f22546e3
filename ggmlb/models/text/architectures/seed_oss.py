"""Seed-OSS."""

from __future__ import annotations

from ggmlb import RopeType
from ggmlb.models.text.architectures import register_architecture
from ggmlb.models.text.blocks import Layer, Residual, attentions, feed_forwards
from ggmlb.models.text.config import TextConfig
from ggmlb.models.text.keys import Keys


@register_architecture("seed_oss")
def seed_oss(keys: Keys) -> TextConfig:
    """Read a model, whose norm before the feed-forward part has another name than Llama's."""
    layers = (
        Layer((Residual("attn_norm", attention), Residual("post_attention_norm", feed_forward)))
        for attention, feed_forward in zip(attentions(keys, RopeType.NEOX), feed_forwards(keys), strict=True)
    )
    return TextConfig.read(keys, layers)
