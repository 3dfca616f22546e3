"""Llama, Mistral, Mixtral, SmolLM."""

from __future__ import annotations

from ggmlb import RopeType
from ggmlb.models.text.architectures import register_architecture
from ggmlb.models.text.blocks import attentions, decoder_layers, dense_or_experts
from ggmlb.models.text.config import TextConfig
from ggmlb.models.text.keys import Keys


@register_architecture("llama")
def llama(keys: Keys) -> TextConfig:
    """Read a model with a dense feed-forward part or, as Mixtral, with experts."""
    return TextConfig.read(keys, decoder_layers(attentions(keys, RopeType.NORMAL), dense_or_experts(keys)))
