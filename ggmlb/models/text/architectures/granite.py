"""Granite 3 and 4, dense and with experts."""

from __future__ import annotations

from dataclasses import replace

from ggmlb import RopeType
from ggmlb.models.text.architectures import register_architecture
from ggmlb.models.text.blocks import FeedForward, Parallel, attentions, decoder_layers, dense_or_experts
from ggmlb.models.text.config import TextConfig
from ggmlb.models.text.keys import Keys


@register_architecture("granite")
@register_architecture("granitemoe")
def granite(keys: Keys) -> TextConfig:
    """Read a model: embeddings, residuals and logits are scaled; 0 is no factor."""
    attention = attentions(keys, RopeType.NORMAL)
    if scale := keys.real("attention.scale", 0.0):
        attention = [replace(a, scale=scale) for a in attention]
    if not keys.flag("rope.scaling.finetuned", True):
        attention = [replace(a, rope=None) for a in attention]
    parts = dense_or_experts(keys)
    if keys.count("expert_count", 0, 0) and (n := keys.count("expert_shared_feed_forward_length", 0, 0)):
        parts = [Parallel((part, FeedForward(n, suffix="_shexp"))) for part in parts]
    return TextConfig.read(
        keys,
        decoder_layers(attention, parts, scale=keys.real("residual_scale", 0.0) or 1.0),
        embedding_scale=keys.real("embedding_scale", 0.0) or 1.0,
        logit_scale=1 / keys.real("logit_scale", None, 1e-6),
    )
