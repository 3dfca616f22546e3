"""Granite 3 and 4, dense, with experts, and with recurrent layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ggmlb import RopeType
from ggmlb.models.text.architectures import register_architecture
from ggmlb.models.text.blocks import (
    Attention,
    Block,
    FeedForward,
    Mamba2,
    Parallel,
    attention_or,
    attentions,
    decoder_layers,
    dense_or_experts,
)
from ggmlb.models.text.config import TextConfig
from ggmlb.models.text.keys import Keys


@register_architecture("granite")
@register_architecture("granitemoe")
def granite(keys: Keys) -> TextConfig:
    """Read a model: embeddings, residuals and logits are scaled; 0 is no factor."""
    return _scaled(keys, attentions(keys, RopeType.NORMAL), keys.real("logit_scale", None, 1e-6))


@register_architecture("granitehybrid")
def granitehybrid(keys: Keys) -> TextConfig:
    """Read a model: layers without KV heads have states instead of attention."""
    mixers = attention_or(keys, RopeType.NORMAL, Mamba2.read(keys))
    return _scaled(keys, mixers, keys.real("logit_scale", 0.0) or 1.0)


def _scaled(keys: Keys, mixers: Sequence[Block], logit_divisor: float) -> TextConfig:
    changes: dict[str, Any] = {}
    if scale := keys.real("attention.scale", 0.0):
        changes["scale"] = scale
    if not keys.flag("rope.scaling.finetuned", True):
        changes["rope"] = None
    mixers = [replace(m, **changes) if isinstance(m, Attention) else m for m in mixers]
    parts = dense_or_experts(keys)
    if keys.count("expert_count", 0, 0) and (n := keys.count("expert_shared_feed_forward_length", 0, 0)):
        parts = [Parallel((part, FeedForward(n, suffix="_shexp"))) for part in parts]
    return TextConfig.read(
        keys,
        decoder_layers(mixers, parts, scale=keys.real("residual_scale", 0.0) or 1.0),
        embedding_scale=keys.real("embedding_scale", 0.0) or 1.0,
        logit_scale=1 / logit_divisor,
    )
