"""OLMo 2 and 3."""

from __future__ import annotations

from ggmlb import RopeType
from ggmlb.models.text.architectures import register_architecture
from ggmlb.models.text.blocks import NONE, POST, attentions, decoder_layers, feed_forwards, windowed
from ggmlb.models.text.config import TextConfig
from ggmlb.models.text.keys import Keys


@register_architecture("olmo2")
def olmo2(keys: Keys) -> TextConfig:
    """Read a model, whose norms are after the blocks; RoPE is not scaled in layers with a window."""
    attention = attentions(keys, RopeType.NEOX, norms="row")
    attention = windowed(keys, attention, 4, freq_scale=1.0, ext_factor=0.0, attn_factor=1.0)
    return TextConfig.read(keys, decoder_layers(attention, feed_forwards(keys), NONE, POST))
