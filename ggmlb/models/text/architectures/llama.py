"""Llama, Mistral, Mixtral, SmolLM."""

from __future__ import annotations

from ggmlb import RopeType
from ggmlb.models.text.architectures import register_architecture
from ggmlb.models.text.blocks import attentions, experts, feed_forwards, pre_norm
from ggmlb.models.text.config import TextConfig
from ggmlb.models.text.keys import Keys


@register_architecture("llama")
def llama(keys: Keys) -> TextConfig:
    """Read a model with a dense feed-forward part or, as Mixtral, with experts."""
    parts = experts(keys, has_own_size=False) if keys.count("expert_count", 0, 0) else feed_forwards(keys)
    return TextConfig.read(keys, map(pre_norm, attentions(keys, RopeType.NORMAL), parts))
