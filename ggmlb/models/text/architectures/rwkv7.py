"""RWKV-7."""

from __future__ import annotations

from ggmlb.models.text.architectures import register_architecture
from ggmlb.models.text.blocks import ChannelMix, TimeMix, decoder_layers
from ggmlb.models.text.config import TextConfig
from ggmlb.models.text.keys import Keys


@register_architecture("rwkv7")
def rwkv7(keys: Keys) -> TextConfig:
    """Read a model, whose layers have states instead of attention, and norms that subtract the mean."""
    keys.count("token_shift_count", 2, 2, 2)
    channels = [ChannelMix(keys.n_embd, n_ff) for n_ff in keys.counts("feed_forward_length")]
    layers = decoder_layers(TimeMix.read(keys), channels, ("attn_norm", "attn_norm_2"))
    return TextConfig.read(keys, layers, "layer", has_embedding_norm=True)
