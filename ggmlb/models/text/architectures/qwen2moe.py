"""Qwen1.5 and Qwen2 with experts."""

from __future__ import annotations

from ggmlb import RopeType
from ggmlb.models.text.architectures import register_architecture
from ggmlb.models.text.blocks import attentions, decoder_layers, experts, scaled_shared
from ggmlb.models.text.config import TextConfig
from ggmlb.models.text.keys import Keys


@register_architecture("qwen2moe")
def qwen2moe(keys: Keys) -> TextConfig:
    """Read a model: all tokens use one expert more, whose output is scaled."""
    parts = scaled_shared(keys, experts(keys, weighting="share"))
    return TextConfig.read(keys, decoder_layers(attentions(keys, RopeType.NEOX), parts))
