"""Llama, Mistral, Mixtral, SmolLM."""

from __future__ import annotations

from ggmlb import RopeType
from ggmlb.models.text.architectures import register_architecture
from ggmlb.models.text.blocks import attentions, dense_or_experts, pre_norm
from ggmlb.models.text.config import TextConfig
from ggmlb.models.text.keys import Keys


@register_architecture("llama")
def llama(keys: Keys) -> TextConfig:
    """Read a model with a dense feed-forward part or, as Mixtral, with experts."""
    return TextConfig.read(keys, map(pre_norm, attentions(keys, RopeType.NORMAL), dense_or_experts(keys)))
