"""Qwen1.5 and Qwen2 with experts."""

from __future__ import annotations

from ggmlb import RopeType
from ggmlb.models.text.architectures import register_architecture
from ggmlb.models.text.blocks import FeedForward, Parallel, attentions, decoder_layers, experts
from ggmlb.models.text.config import TextConfig
from ggmlb.models.text.keys import Keys


@register_architecture("qwen2moe")
def qwen2moe(keys: Keys) -> TextConfig:
    """Read a model: all tokens use one expert more, whose output is scaled."""
    size = keys.count("feed_forward_length", 0, 0)
    size = keys.count("expert_shared_feed_forward_length", 0, 0) or size
    if not size:
        raise keys.error("expert_shared_feed_forward_length", f"it is {size}; it must be 1 or more")
    shared = FeedForward(size, suffix="_shexp", is_scaled=True)
    parts = [Parallel((part, shared)) for part in experts(keys, weighting="share")]
    return TextConfig.read(keys, decoder_layers(attentions(keys, RopeType.NEOX), parts))
